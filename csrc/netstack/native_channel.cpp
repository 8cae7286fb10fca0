// The Channel of lamina.netstack.contract.fabric over any engine: order, bounds, views, errors.
#include "native_channel.h"

#include <structmember.h>

#include <new>

namespace lamina {
namespace {

// The value of the keyword timeout_s, which may be the only one; false with an exception set.
bool take_timeout(State* state, PyObject* const* values, PyObject* names, const char* method, double* timeout_s) {
  const Py_ssize_t count = names ? PyTuple_GET_SIZE(names) : 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* name = PyTuple_GET_ITEM(names, i);
    if (name != state->name_timeout_s && PyUnicode_Compare(name, state->name_timeout_s) != 0)
      return PyErr_Format(PyExc_TypeError, "%s has no argument %R", method, name), false;
    *timeout_s = PyFloat_AsDouble(values[i]);
  }
  return !PyErr_Occurred();
}

PyObject* channel_reserve(PyObject* object, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  Channel* self = of(object);
  State* state = state_of(object);
  if (count != 1) return PyErr_Format(PyExc_TypeError, "reserve takes (nbytes, *, timeout_s=0.0)");
  double timeout_s = 0.0;
  if (!take_timeout(state, args + 1, names, "reserve", &timeout_s)) return nullptr;
  PyObject* number = PyNumber_Index(args[0]);
  if (!number) return nullptr;
  int overflow;
  const long long nbytes = PyLong_AsLongLongAndOverflow(number, &overflow);
  Py_DECREF(number);
  if (overflow || nbytes < 0 || Number(nbytes) > self->out.slot_bytes)
    return PyErr_Format(PyExc_ValueError, "%U: a message has 0..%llu bytes, not %S", self->peer,
                        Number(self->out.slot_bytes), args[0]);
  const Call call(self);
  if (!await(self, Role::sender, timeout_s)) return nullptr;
  const Grant grant = self->engine->grant();
  PyObject* view = make_view(state, self->memory, grant.data, std::uint64_t(nbytes), false);
  PyObject* slot = make_record<2>(state->slot, {view, PyLong_FromUnsignedLongLong(grant.index)});
  if (slot) self->granted->push(slot);
  return slot;
}

Status send(Channel* self, std::uint64_t nbytes, const char* tag, Py_ssize_t tag_bytes, std::uint64_t* seqno) {
  Engine* engine = self->engine;
  const auto* tag_start = reinterpret_cast<const std::uint8_t*>(tag);
  Status status;
  Py_BEGIN_ALLOW_THREADS;
  status = engine->publish(nbytes, tag_start, std::uint64_t(tag_bytes), seqno);
  Py_END_ALLOW_THREADS;
  while (status == Status::pending) {
    if (PyErr_CheckSignals()) {
      engine->give_up("a put was interrupted half-way");
      return status;
    }
    Py_BEGIN_ALLOW_THREADS;
    status = engine->resume();
    Py_END_ALLOW_THREADS;
  }
  return status;
}

// Of a slot that reserve has made.
Py_ssize_t slot_bytes(const State* state, PyObject* slot) {
  PyObject* const view = *state->slot.field(slot, 0);
  if (view && PyMemoryView_Check(view)) return PyMemoryView_GET_BUFFER(view)->len;
  PyErr_SetString(PyExc_TypeError, "a slot's data is the view that reserve gave");
  return -1;
}

PyObject* channel_put_signal(PyObject* object, PyObject* const* args, Py_ssize_t count) {
  Channel* self = of(object);
  if (count != 2) return PyErr_Format(PyExc_TypeError, "put_signal takes (slot, tag)");
  PyObject* slot = args[0];
  if (self->granted->front() != slot)
    return PyErr_Format(PyExc_ValueError, "%U: put_signal takes each reserved slot once, in the order reserved",
                        self->peer);
  char* tag;
  Py_ssize_t tag_bytes;
  const Py_ssize_t nbytes = slot_bytes(state_of(object), slot);
  if (nbytes < 0 || PyBytes_AsStringAndSize(args[1], &tag, &tag_bytes)) return nullptr;
  if (tag_bytes > Py_ssize_t(kTagBytes))
    return PyErr_Format(PyExc_ValueError, "%U: a tag has at most %llu bytes, not %zd", self->peer, Number(kTagBytes),
                        tag_bytes);
  const Call call(self);
  std::uint64_t seqno = 0;
  const Status status = send(self, std::uint64_t(nbytes), tag, tag_bytes, &seqno);
  if (status == Status::pending) return nullptr;
  if (status != Status::ready) return raise_over(self, status, "put_signal");
  if (self->granted->front() == slot) self->granted->pop();
  return PyLong_FromUnsignedLongLong(seqno);
}

PyObject* channel_wait_signal(PyObject* object, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  Channel* self = of(object);
  State* state = state_of(object);
  if (count != 0 || !names) return PyErr_Format(PyExc_TypeError, "wait_signal takes (*, timeout_s)");
  double timeout_s = 0.0;
  if (!take_timeout(state, args, names, "wait_signal", &timeout_s)) return nullptr;
  const Call call(self);
  if (self->has_unread && !self->memory) return raise_over(self, Status::stopped, "wait_signal");
  if (!self->has_unread && !await(self, Role::receiver, timeout_s)) return nullptr;
  Message message = self->unread;
  if (const Status status = self->has_unread ? Status::ready : self->engine->take(&message); status != Status::ready)
    return raise_over(self, status, "wait_signal");
  const char* tag = reinterpret_cast<char*>(message.tag);
  PyObject* arrival =
      make_record<3>(state->arrival,
                     {PyLong_FromUnsignedLongLong(message.seqno), PyBytes_FromStringAndSize(tag, Py_ssize_t(kTagBytes)),
                      make_view(state, self->memory, message.data, message.length, true)});
  if (!arrival) return nullptr;
  self->has_unread = false;
  self->arrived->push(arrival);
  return arrival;
}

PyObject* channel_release(PyObject* object, PyObject* arrival) {
  Channel* self = of(object);
  if (self->held || self->arrived->front() != arrival)
    return PyErr_Format(PyExc_ValueError, "%U: release takes each arrival once, in the order in which they came",
                        self->peer);
  const Call call(self);
  self->arrived->pop();
  if (!self->engine->stopped()) self->engine->release();
  Py_RETURN_NONE;
}

PyObject* channel_abort(PyObject* object, PyObject* reason) {
  Py_ssize_t bytes;
  const char* text = PyUnicode_AsUTF8AndSize(reason, &bytes);
  if (!text) return nullptr;
  stop(of(object), kAborted, text, bytes);
  Py_RETURN_NONE;
}

PyObject* channel_close(PyObject* object, PyObject*) {
  close_channel(of(object));
  Py_RETURN_NONE;
}

bool enter(PyObject* object) {
  Channel* self = of(object);
  if (self->granted->front() || self->arrived->front() || self->has_unread)
    return PyErr_Format(PyExc_ValueError, "%U: a slot or an arrival is held", self->peer), false;
  if (!self->memory) return raise_over(self, Status::stopped, "enter"), false;
  ++self->calls;
  self->held = 0;
  return true;
}

void leave(PyObject* object, std::uint64_t held) {
  Channel* self = of(object);
  self->held = held;
  --self->calls;
  give_back(self);
}

void unread(PyObject* object, const Message& message) {
  of(object)->unread = message;
  of(object)->has_unread = true;
}

void raise_waited(PyObject* object, Role role, Status status, const char* operation, double waited_s) {
  if (status == Status::pending)
    raise_late(of(object), role, waited_s);
  else
    raise_over(of(object), status, operation);
}

PyObject* channel_calls(PyObject* object, PyObject*) {
  return PyCapsule_New(&of(object)->native, ChannelCalls::kName, nullptr);
}

PyMethodDef methods[] = {
    {"reserve", method(channel_reserve), METH_FASTCALL | METH_KEYWORDS, nullptr},
    {"put_signal", method(channel_put_signal), METH_FASTCALL, nullptr},
    {"wait_signal", method(channel_wait_signal), METH_FASTCALL | METH_KEYWORDS, nullptr},
    {"release", channel_release, METH_O, nullptr},
    {"abort", channel_abort, METH_O, nullptr},
    {"close", channel_close, METH_NOARGS, nullptr},
    {"calls", channel_calls, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyMemberDef members[] = {
    {"peer", T_OBJECT_EX, offsetof(Channel, peer), READONLY, nullptr},
    {"peer_name", T_OBJECT_EX, offsetof(Channel, peer_name), READONLY, nullptr},
    {"outbound", T_OBJECT_EX, offsetof(Channel, outbound), READONLY, nullptr},
    {"inbound", T_OBJECT_EX, offsetof(Channel, inbound), READONLY, nullptr},
    {"epoch", T_ULONGLONG, offsetof(Channel, epoch), READONLY, nullptr},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Channel, weak), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(channel_dealloc)},
                       {Py_tp_methods, methods},
                       {Py_tp_members, members},
                       {0, nullptr}};

}  // namespace

PyType_Spec channel_spec = {"lamina.netstack.host._netstack.Channel", sizeof(Channel), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

PyObject* make_channel(State* state, Engine* engine, PyObject* memory, PyObject* peer, PyObject* peer_name,
                       std::uint64_t epoch, PyObject* outbound, const Shape& out, PyObject* inbound, const Shape& in) {
  auto* self = allocate<Channel>(state->channel_type);
  if (!self) {
    delete engine;
    Py_DECREF(memory);
    return nullptr;
  }
  self->engine = engine;
  self->memory = memory;
  self->peer = Py_NewRef(peer);
  self->peer_name = Py_NewRef(peer_name);
  self->outbound = Py_NewRef(outbound);
  self->inbound = Py_NewRef(inbound);
  self->epoch = epoch;
  self->out = out;
  self->in = in;
  self->native = {reinterpret_cast<PyObject*>(self), engine, out.slot_bytes, enter, leave, unread, raise_waited};
  self->granted = new (std::nothrow) Fifo(out.slots);
  self->arrived = new (std::nothrow) Fifo(in.slots);
  if (!self->granted || !self->arrived || !self->granted->usable() || !self->arrived->usable()) {
    Py_DECREF(self);
    return PyErr_NoMemory();
  }
  return reinterpret_cast<PyObject*>(self);
}

}  // namespace lamina
