// A channel as an object of Python: what it holds, how its calls wait, and the errors that they raise.
#pragma once

#include "native.h"
#include "netstack/calls.h"

#include <memory>
#include <new>

namespace lamina {

// Slots reserved, or arrivals not yet released, oldest first. The objects are held.
class Fifo {
 public:
  explicit Fifo(std::uint64_t slots) : capacity_(slots), ring_(new (std::nothrow) PyObject*[slots]) {}
  ~Fifo() {
    while (count_) pop();
  }
  bool usable() const { return ring_ != nullptr; }
  PyObject* front() const { return count_ ? ring_[head_ % capacity_] : nullptr; }
  void push(PyObject* object) { ring_[(head_ + count_++) % capacity_] = Py_NewRef(object); }
  void pop() {
    --count_;
    Py_DECREF(ring_[head_++ % capacity_]);
  }

 private:
  const std::uint64_t capacity_;
  std::uint64_t head_ = 0, count_ = 0;
  std::unique_ptr<PyObject*[]> ring_;
};

struct Channel {
  PyObject_HEAD PyObject* weak;
  Engine* engine;
  PyObject* memory;  // null once closed and left by every call
  PyObject *peer, *peer_name, *outbound, *inbound;
  Number epoch;
  Shape out, in;
  Fifo *granted, *arrived;
  int calls;  // in progress; the last one to leave a closed channel gives memory and descriptors back
  bool closed;
  ChannelCalls native;  // for other native modules
  std::uint64_t held;   // messages that one of those has taken, and not released
  Message unread;       // one that it has taken for Python
  bool has_unread;
};

inline Channel* of(PyObject* object) { return reinterpret_cast<Channel*>(object); }
inline State* state_of(PyObject* self) { return static_cast<State*>(PyType_GetModuleState(Py_TYPE(self))); }

inline void give_back(Channel* self) {
  if (self->calls || !self->memory || !self->closed) return;
  self->engine->shut();
  Py_CLEAR(self->memory);
}

// Keeps memory and descriptors in place while a method runs, also if another thread closes the channel meanwhile.
class Call {
 public:
  explicit Call(Channel* self) : self_(self) { ++self_->calls; }
  ~Call() {
    --self_->calls;
    give_back(self_);
  }
  Call(const Call&) = delete;

 private:
  Channel* self_;
};

// Without the GIL: an engine may let what was put arrive first.
inline void stop(Channel* self, Farewell farewell, const char* reason, Py_ssize_t bytes) {
  if (self->closed) return;
  const Call call(self);
  Py_BEGIN_ALLOW_THREADS;
  self->engine->stop(farewell, reason, std::uint64_t(bytes));
  Py_END_ALLOW_THREADS;
}

inline void close_channel(Channel* self) {
  stop(self, kClosed, "", 0);
  self->closed = true;
  give_back(self);
}

inline void channel_dealloc(PyObject* object) {
  Channel* self = of(object);
  if (self->weak) PyObject_ClearWeakRefs(object);
  if (self->engine) close_channel(self);
  delete self->engine;
  delete self->granted;
  delete self->arrived;
  Py_XDECREF(self->memory);
  Py_XDECREF(self->peer);
  Py_XDECREF(self->peer_name);
  Py_XDECREF(self->outbound);
  Py_XDECREF(self->inbound);
  free_object(object);
}

// The channel is over, on either side.
inline PyObject* raise_over(Channel* self, Status status, const char* operation) {
  State* state = state_of(reinterpret_cast<PyObject*>(self));
  if (status == Status::stopped)
    return PyErr_Format(state->aborted, "%U: %s: the channel was aborted or closed on this side", self->peer,
                        operation);
  char text[kTextBytes];
  self->engine->why(text);
  PyObject* decoded = PyUnicode_DecodeUTF8(text, Py_ssize_t(strnlen(text, kTextBytes)), "replace");
  for (Py_ssize_t i = 0; decoded && i < PyUnicode_GET_LENGTH(decoded); ++i)  // a peer may send anything
    if (!Py_UNICODE_ISPRINTABLE(PyUnicode_READ_CHAR(decoded, i)) && PyUnicode_WriteChar(decoded, i, ' '))
      Py_CLEAR(decoded);
  if (decoded) PyErr_Format(state->peer_fault, "%U: %s: %U", self->peer, operation, decoded);
  Py_XDECREF(decoded);
  return nullptr;
}

inline void raise_late(Channel* self, Role role, double timeout_s) {
  State* state = state_of(reinterpret_cast<PyObject*>(self));
  char text[32];
  PyOS_snprintf(text, sizeof text, "%g", std::max(timeout_s, 0.0));
  if (role == Role::sender)
    PyErr_Format(state->no_resource, "%U: reserve: none of %llu slots became free within %s s", self->peer,
                 Number(self->out.slots), text);
  else
    PyErr_Format(state->timeout, "%U: wait_signal: no message within %s s", self->peer, text);
}

// Waits until `role` can go on, without the GIL unless it already can. False with an exception set otherwise.
inline bool await(Channel* self, Role role, double timeout_s) {
  Engine* engine = self->engine;
  Status status = engine->look(role);
  if (status == Status::pending) {
    std::uint64_t now = now_ns();
    const std::uint64_t deadline = deadline_in(timeout_s, now);
    do {
      Py_BEGIN_ALLOW_THREADS;
      status = engine->wait(role, deadline);
      now = now_ns();
      Py_END_ALLOW_THREADS;
      if (PyErr_CheckSignals()) return false;
    } while (status == Status::pending && now < deadline);
  }
  if (status == Status::ready) return true;
  if (status == Status::pending)
    raise_late(self, role, timeout_s);
  else
    raise_over(self, status, role == Role::sender ? "reserve" : "wait_signal");
  return false;
}

}  // namespace lamina
