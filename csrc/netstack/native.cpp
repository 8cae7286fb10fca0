// lamina.netstack._native: the rings of ring.h as Python objects. netstack/_native.pyi documents them.
//
// Ownership: Memory owns the mapping; every view handed out and every call in progress holds a reference to it, so
// the mapping goes when the last of them does, whatever was closed before. Counters are guarded by the GIL.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <new>
#include <type_traits>

#include "ring.h"

namespace {

using namespace lamina;

struct State {
  PyTypeObject *memory_type, *view_type;
  PyObject *no_resource, *timeout, *peer_fault, *aborted;
};

struct Memory {
  PyObject_HEAD
  std::uint8_t* base;
  std::size_t bytes;
};

struct View {
  PyObject_HEAD
  PyObject* memory;
  std::uint8_t* data;
  Py_ssize_t bytes;
  int readonly;
};

struct LinkObject {
  PyObject_HEAD
  Link* link;
  PyObject* memory;  // null once closed and left by every call
  PyObject* peer;    // str, for error texts
  PyObject* fault;   // str once the peer broke the protocol, else null
  int life_line;
  int calls;  // calls in progress; the last one to leave a closed link gives mapping and life line back
  bool closed;
};

using Number = unsigned long long;  // what the %llu of PyErr_Format and the K of Py_BuildValue take

constexpr Number kCopyWithGil = 32768;  // below, a copy is shorter than giving the GIL away and waiting for it

State* state_of(LinkObject* self) { return static_cast<State*>(PyType_GetModuleState(Py_TYPE(self))); }

template <class T>
T* allocate(PyTypeObject* type) {
  return reinterpret_cast<T*>(type->tp_alloc(type, 0));
}

void free_object(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

void memory_dealloc(PyObject* self) {
  auto* memory = reinterpret_cast<Memory*>(self);
  if (memory->base) munmap(memory->base, memory->bytes);
  free_object(self);
}

void view_dealloc(PyObject* self) {
  Py_XDECREF(reinterpret_cast<View*>(self)->memory);
  free_object(self);
}

int view_getbuffer(PyObject* self, Py_buffer* buffer, int flags) {
  auto* view = reinterpret_cast<View*>(self);
  return PyBuffer_FillInfo(buffer, self, view->data, view->bytes, view->readonly, flags);
}

PyObject* make_view(LinkObject* self, std::uint8_t* data, std::uint64_t bytes, bool readonly) {
  auto* view = allocate<View>(state_of(self)->view_type);
  if (!view) return nullptr;
  view->memory = Py_NewRef(self->memory);
  view->data = data;
  view->bytes = Py_ssize_t(bytes);
  view->readonly = readonly;
  PyObject* result = PyMemoryView_FromObject(reinterpret_cast<PyObject*>(view));
  Py_DECREF(view);
  return result;
}

void give_back(LinkObject* self) {
  if (self->calls || !self->memory || !self->closed) return;
  close(self->life_line);
  Py_CLEAR(self->memory);
}

// Keeps mapping and life line in place while a method runs, also if another thread closes the link meanwhile.
class Call {
 public:
  explicit Call(LinkObject* self) : self_(self) { ++self_->calls; }
  ~Call() {
    --self_->calls;
    give_back(self_);
  }
  Call(const Call&) = delete;

 private:
  LinkObject* self_;
};

void stop(LinkObject* self, Farewell farewell, const char* reason, Py_ssize_t bytes) {
  if (!self->closed) self->link->stop(farewell, reason, std::uint64_t(bytes));
}

void close_link(LinkObject* self) {
  stop(self, kClosed, "", 0);
  self->closed = true;
  give_back(self);
}

void link_dealloc(PyObject* object) {
  auto* self = reinterpret_cast<LinkObject*>(object);
  if (self->link) close_link(self);
  delete self->link;
  Py_XDECREF(self->peer);
  Py_XDECREF(self->fault);
  free_object(object);
}

PyObject* link_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"memory_fd", "life_line", "listening", "epoch", "outbound", "inbound", "spin_s", "peer", nullptr};
  int memory_fd, life_line, listening;
  Number epoch, out_slots, out_bytes, in_slots, in_bytes;
  double spin_s;
  PyObject* peer;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iipK(KK)(KK)dU", const_cast<char**>(names), &memory_fd, &life_line,
                                   &listening, &epoch, &out_slots, &out_bytes, &in_slots, &in_bytes, &spin_s, &peer))
    return nullptr;
  for (Number slots : {out_slots, in_slots})
    if (slots < 1 || slots > 1 << 20) return PyErr_Format(PyExc_ValueError, "slots must be 1..2**20, not %llu", slots);
  for (Number bytes : {out_bytes, in_bytes})
    if (bytes < 1 || bytes > 1ull << 40) return PyErr_Format(PyExc_ValueError, "slot_bytes must be 1..2**40, not %llu", bytes);
  if (epoch >> 16) return PyErr_Format(PyExc_ValueError, "epoch must be 0..65535, not %llu", epoch);
  const std::uint64_t out_total = Ring::bytes(out_slots, out_bytes), in_total = Ring::bytes(in_slots, in_bytes);

  struct stat info;
  if (fstat(memory_fd, &info)) return PyErr_SetFromErrno(PyExc_OSError);
  if (std::uint64_t(info.st_size) != out_total + in_total)
    return PyErr_Format(PyExc_ValueError, "the shared memory has %lld bytes, the geometry needs %llu",
                        static_cast<long long>(info.st_size), Number(out_total + in_total));
  void* base = mmap(nullptr, out_total + in_total, PROT_READ | PROT_WRITE, MAP_SHARED, memory_fd, 0);
  if (base == MAP_FAILED) return PyErr_SetFromErrno(PyExc_OSError);

  auto* state = static_cast<State*>(PyType_GetModuleState(type));
  auto* memory = allocate<Memory>(state->memory_type);
  if (!memory) {
    munmap(base, out_total + in_total);
    return nullptr;
  }
  memory->base = static_cast<std::uint8_t*>(base);
  memory->bytes = out_total + in_total;
  auto* self = allocate<LinkObject>(type);
  if (!self) {
    Py_DECREF(memory);
    return nullptr;
  }
  self->memory = reinterpret_cast<PyObject*>(memory);
  self->peer = Py_NewRef(peer);
  self->life_line = life_line;
  // The connector's outbound ring comes first in the mapping, so both sides name the same bytes.
  std::uint8_t* out_base = memory->base + (listening ? in_total : 0);
  std::uint8_t* in_base = memory->base + (listening ? 0 : out_total);
  self->link = new (std::nothrow) Link{Sender{Ring(out_base, out_slots, out_bytes, epoch)},
                                       Receiver{Ring(in_base, in_slots, in_bytes, epoch)}, life_line,
                                       std::uint64_t(std::max(spin_s, 0.0) * 1e9)};
  if (!self->link) {
    Py_CLEAR(self->memory);
    Py_DECREF(self);
    return PyErr_NoMemory();
  }
  return reinterpret_cast<PyObject*>(self);
}

void raise_gone(LinkObject* self, const char* operation) {
  PyObject* type = state_of(self)->peer_fault;
  const Control* theirs = self->link->in.ring.control;
  const std::uint32_t farewell = theirs->farewell.load(std::memory_order_acquire);
  if (farewell == kStaying) {
    PyErr_Format(type, "%U: %s: the peer's process is gone", self->peer, operation);
  } else if (farewell == kAborted) {
    char reason[kReasonBytes + 1] = {};
    std::memcpy(reason, theirs->reason, kReasonBytes);
    PyObject* text = PyUnicode_DecodeUTF8(reason, Py_ssize_t(strnlen(reason, kReasonBytes)), "replace");
    if (text) PyErr_Format(type, "%U: %s: the peer aborted: %U", self->peer, operation, text);
    Py_XDECREF(text);
  } else {
    PyErr_Format(type, "%U: %s: the peer closed the channel", self->peer, operation);
  }
}

// The peer wrote nonsense: remember it for all later calls and leave.
void raise_fault(LinkObject* self, PyObject* text) {
  if (!text) return;
  Py_XSETREF(self->fault, text);
  PyErr_SetObject(state_of(self)->peer_fault, text);
  stop(self, kAborted, "broken protocol", 15);
}

void raise_late(LinkObject* self, bool sending, double timeout_s) {
  char text[32];
  PyOS_snprintf(text, sizeof text, "%g", std::max(timeout_s, 0.0));
  if (sending)
    PyErr_Format(state_of(self)->no_resource, "%U: reserve: none of %llu slots became free within %s s", self->peer,
                 Number(self->link->out.ring.slots), text);
  else
    PyErr_Format(state_of(self)->timeout, "%U: wait_signal: no message within %s s", self->peer, text);
}

void raise_stopped(LinkObject* self, const char* operation) {
  if (self->fault) return PyErr_SetObject(state_of(self)->peer_fault, self->fault);
  PyErr_Format(state_of(self)->aborted, "%U: %s: the channel was aborted or closed on this side", self->peer, operation);
}

bool stopped(LinkObject* self, const char* operation) {
  if (!self->link->stopped.load(std::memory_order_acquire)) return false;
  raise_stopped(self, operation);
  return true;
}

// Waits until `end` is ready, without the GIL unless it already is. False with an exception set otherwise.
template <class End>
bool await(LinkObject* self, End& end, double timeout_s, const char* operation) {
  Link& link = *self->link;
  Status status = link.look(end, true);
  if (status == Status::pending && !(timeout_s > 0)) status = Status::timeout;
  if (status == Status::pending) {
    const std::uint64_t deadline = now_ns() + std::uint64_t(std::min(timeout_s, 1e9) * 1e9);
    for (bool first = true; status == Status::pending; first = false) {
      Py_BEGIN_ALLOW_THREADS;
      if (first) status = link.spin(end, deadline);
      if (status == Status::pending) status = link.sleep(end, deadline);
      Py_END_ALLOW_THREADS;
      if (PyErr_CheckSignals()) return false;
    }
  }
  constexpr bool sending = std::is_same_v<End, Sender>;
  switch (status) {
    case Status::ready: return true;
    case Status::timeout: raise_late(self, sending, timeout_s); break;
    case Status::stopped: raise_stopped(self, operation); break;
    case Status::gone: raise_gone(self, operation); break;
    default:
      raise_fault(self, PyUnicode_FromFormat("%U: %s: the peer broke the protocol: %s %llx after %llx", self->peer,
                                             operation, sending ? "credit" : "signal", Number(end.bad),
                                             Number(end.ring.zero + end.done())));
  }
  return false;
}

PyObject* link_reserve(PyObject* object, PyObject* const* args, Py_ssize_t count) {
  auto* self = reinterpret_cast<LinkObject*>(object);
  if (count != 2) return PyErr_Format(PyExc_TypeError, "reserve takes (nbytes, timeout_s)");
  PyObject* index = PyNumber_Index(args[0]);
  if (!index) return nullptr;
  const Number nbytes = PyLong_AsUnsignedLongLong(index);
  Py_DECREF(index);
  const double timeout_s = PyErr_Occurred() ? 0.0 : PyFloat_AsDouble(args[1]);
  if (PyErr_Occurred()) return nullptr;
  Sender& out = self->link->out;
  if (nbytes > out.ring.slot_bytes)
    return PyErr_Format(PyExc_ValueError, "%llu bytes do not fit a slot of %llu", nbytes, Number(out.ring.slot_bytes));
  const Call call(self);
  if (!await(self, out, timeout_s, "reserve")) return nullptr;
  PyObject* view = make_view(self, out.ring.payload(out.granted), nbytes, false);
  if (!view) return nullptr;
  return Py_BuildValue("KN", Number(out.ring.index(out.granted++)), view);
}

PyObject* link_publish(PyObject* object, PyObject* const* args, Py_ssize_t count) {
  auto* self = reinterpret_cast<LinkObject*>(object);
  if (count != 3) return PyErr_Format(PyExc_TypeError, "publish takes (nbytes, tag, source or None)");
  const Number nbytes = PyLong_AsUnsignedLongLong(args[0]);
  char* tag;
  Py_ssize_t tag_bytes;
  if (PyErr_Occurred() || PyBytes_AsStringAndSize(args[1], &tag, &tag_bytes)) return nullptr;
  Sender& out = self->link->out;
  if (nbytes > out.ring.slot_bytes || tag_bytes > Py_ssize_t(kTagBytes))
    return PyErr_Format(PyExc_ValueError, "message of %llu bytes or tag of %zd bytes is too long", nbytes, tag_bytes);
  const Call call(self);
  if (stopped(self, "put_signal")) return nullptr;
  if (out.published == out.granted) return PyErr_Format(PyExc_ValueError, "put_signal before reserve");
  if (self->link->peer_left()) return raise_gone(self, "put_signal"), nullptr;
  if (args[2] != Py_None) {
    Py_buffer source;
    if (PyObject_GetBuffer(args[2], &source, PyBUF_SIMPLE)) return nullptr;
    const bool fits = Number(source.len) == nbytes;
    if (fits && nbytes > kCopyWithGil) {
      Py_BEGIN_ALLOW_THREADS;
      std::memcpy(out.ring.payload(out.published), source.buf, nbytes);
      Py_END_ALLOW_THREADS;
    } else if (fits) {
      std::memcpy(out.ring.payload(out.published), source.buf, nbytes);
    }
    PyBuffer_Release(&source);
    if (!fits) return PyErr_Format(PyExc_ValueError, "the source does not have the slot's %llu bytes", nbytes);
    if (stopped(self, "put_signal")) return nullptr;
  }
  const std::uint64_t seqno = out.publish(nbytes, reinterpret_cast<std::uint8_t*>(tag), std::uint64_t(tag_bytes));
  return PyLong_FromUnsignedLongLong(seqno);
}

PyObject* link_wait(PyObject* object, PyObject* timeout) {
  auto* self = reinterpret_cast<LinkObject*>(object);
  const double timeout_s = PyFloat_AsDouble(timeout);
  if (PyErr_Occurred()) return nullptr;
  const Call call(self);
  Receiver& in = self->link->in;
  if (!await(self, in, timeout_s, "wait_signal")) return nullptr;
  std::uint64_t seqno, length;
  std::uint8_t tag[kTagBytes];
  std::uint8_t* payload = in.ring.payload(in.received);
  if (!in.take(&seqno, &length, tag)) {
    raise_fault(self, PyUnicode_FromFormat(
                          "%U: wait_signal: the peer broke the protocol: header of message %llx, %llu bytes, after %llx",
                          self->peer, Number(seqno), Number(length), Number(in.ring.zero + in.received)));
    return nullptr;
  }
  PyObject* view = make_view(self, payload, length, true);
  return view ? Py_BuildValue("Ky#N", Number(seqno), reinterpret_cast<char*>(tag), Py_ssize_t(kTagBytes), view) : nullptr;
}

PyObject* link_release(PyObject* object, PyObject*) {
  auto* self = reinterpret_cast<LinkObject*>(object);
  const Call call(self);
  if (self->link->stopped.load(std::memory_order_acquire)) Py_RETURN_NONE;
  Receiver& in = self->link->in;
  if (in.released == in.received) return PyErr_Format(PyExc_ValueError, "release without a message");
  in.release();
  Py_RETURN_NONE;
}

PyObject* link_abort(PyObject* object, PyObject* reason) {
  Py_ssize_t bytes;
  const char* text = PyUnicode_AsUTF8AndSize(reason, &bytes);
  if (!text) return nullptr;
  stop(reinterpret_cast<LinkObject*>(object), kAborted, text, bytes);
  Py_RETURN_NONE;
}

PyObject* link_close(PyObject* object, PyObject*) {
  close_link(reinterpret_cast<LinkObject*>(object));
  Py_RETURN_NONE;
}

PyObject* ring_bytes(PyObject*, PyObject* args) {
  Number slots, slot_bytes;
  if (!PyArg_ParseTuple(args, "KK", &slots, &slot_bytes)) return nullptr;
  return PyLong_FromUnsignedLongLong(Ring::bytes(slots, slot_bytes));
}

PyCFunction fast(PyObject* (*method)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(method));
}

PyMethodDef link_methods[] = {
    {"reserve", fast(link_reserve), METH_FASTCALL, nullptr},
    {"publish", fast(link_publish), METH_FASTCALL, nullptr},
    {"wait", link_wait, METH_O, nullptr},
    {"release", link_release, METH_NOARGS, nullptr},
    {"abort", link_abort, METH_O, nullptr},
    {"close", link_close, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

template <class F>
void* slot(F* function) {
  return reinterpret_cast<void*>(function);
}

PyType_Slot memory_slots[] = {{Py_tp_dealloc, slot(memory_dealloc)}, {0, nullptr}};
PyType_Slot view_slots[] = {
    {Py_tp_dealloc, slot(view_dealloc)}, {Py_bf_getbuffer, slot(view_getbuffer)}, {0, nullptr}};
PyType_Slot link_slots[] = {
    {Py_tp_dealloc, slot(link_dealloc)}, {Py_tp_new, slot(link_new)}, {Py_tp_methods, link_methods}, {0, nullptr}};

constexpr unsigned kHidden = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION;
PyType_Spec memory_spec = {"lamina.netstack._native.Memory", sizeof(Memory), 0, kHidden, memory_slots};
PyType_Spec view_spec = {"lamina.netstack._native.View", sizeof(View), 0, kHidden, view_slots};
PyType_Spec link_spec = {"lamina.netstack._native.Link", sizeof(LinkObject), 0, Py_TPFLAGS_DEFAULT, link_slots};

bool take_errors(State* state) {
  PyObject* fabric = PyImport_ImportModule("lamina.netstack.fabric");
  if (!fabric) return false;
  state->no_resource = PyObject_GetAttrString(fabric, "NoResource");
  state->timeout = PyObject_GetAttrString(fabric, "ChannelTimeout");
  state->peer_fault = PyObject_GetAttrString(fabric, "PeerFault");
  state->aborted = PyObject_GetAttrString(fabric, "ChannelAborted");
  Py_DECREF(fabric);
  return state->no_resource && state->timeout && state->peer_fault && state->aborted;
}

int module_exec(PyObject* module) {
  auto* state = static_cast<State*>(PyModule_GetState(module));
  if (!take_errors(state)) return -1;
  state->memory_type = reinterpret_cast<PyTypeObject*>(PyType_FromModuleAndSpec(module, &memory_spec, nullptr));
  state->view_type = reinterpret_cast<PyTypeObject*>(PyType_FromModuleAndSpec(module, &view_spec, nullptr));
  PyObject* link_type = PyType_FromModuleAndSpec(module, &link_spec, nullptr);
  if (!state->memory_type || !state->view_type || !link_type) return -1;
  const int failed = PyModule_AddType(module, reinterpret_cast<PyTypeObject*>(link_type));
  Py_DECREF(link_type);
  return failed;
}

int module_clear(PyObject* module) {
  auto* state = static_cast<State*>(PyModule_GetState(module));
  Py_CLEAR(state->memory_type);
  Py_CLEAR(state->view_type);
  Py_CLEAR(state->no_resource);
  Py_CLEAR(state->timeout);
  Py_CLEAR(state->peer_fault);
  Py_CLEAR(state->aborted);
  return 0;
}

PyMethodDef module_methods[] = {{"ring_bytes", ring_bytes, METH_VARARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyModuleDef_Slot module_slots[] = {{Py_mod_exec, slot(module_exec)}, {0, nullptr}};
PyModuleDef module_def = {PyModuleDef_HEAD_INIT, "_native",    nullptr, sizeof(State), module_methods,
                          module_slots,          nullptr, module_clear, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() { return PyModuleDef_Init(&module_def); }
