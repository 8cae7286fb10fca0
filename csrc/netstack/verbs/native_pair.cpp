// The part of the module that opens queue pairs for kernels: KernelPair, whose ring, completions and doorbell a kernel
// uses. Memory that a peer may write to, or that is sent from, belongs to the caller.
#include "native.h"

#if __has_include(<infiniband/mlx5dv.h>)
#include <memory>
#include <new>

#include "firmware.h"
#include "pair.h"

namespace lamina {
namespace {

using verbs::End;

struct KernelPair {
  PyObject_HEAD std::unique_ptr<End> end;
  verbs::Layout layout;
};

KernelPair* pair_of(PyObject* object) { return reinterpret_cast<KernelPair*>(object); }

void pair_dealloc(PyObject* object) {
  pair_of(object)->end.~unique_ptr();
  free_object(object);
}

// Needs the GIL, except while it connects, which its creating thread does. Closing and asking are serialized.
bool is_open(const KernelPair* self) {
  if (!self->end->is_open()) PyErr_SetString(PyExc_ValueError, "the queue pair was closed");
  return self->end->is_open();
}

PyObject* pair_card(PyObject* object, PyObject*) {
  return is_open(pair_of(object)) ? card_of(*pair_of(object)->end) : nullptr;
}

PyObject* pair_connect(PyObject* object, PyObject* args) {
  return is_open(pair_of(object)) ? connect(*pair_of(object)->end, args) : nullptr;
}

PyObject* pair_queue(PyObject* object, PyObject*) {
  const KernelPair* self = pair_of(object);
  if (!is_open(self)) return nullptr;
  const verbs::Layout& q = self->layout;
  const auto at = [](const void* place) { return Number(reinterpret_cast<std::uintptr_t>(place)); };
  return Py_BuildValue("{sKsKsKsKsKsIsIsIsIsIsI}", "ring", at(q.ring), "record", at(q.record), "doorbell",
                       at(q.doorbell), "completions", at(q.completions), "seen", at(q.seen), "number", q.number,
                       "blocks", q.blocks, "cqes", q.cqes, "alternate", q.alternate, "near", q.near, "key",
                       self->end->staging_key());
}

PyObject* pair_events_fds(PyObject* object, PyObject*) {
  if (!is_open(pair_of(object))) return nullptr;
  const End& end = *pair_of(object)->end;
  return end.more_events_fd() < 0 ? Py_BuildValue("(i)", end.async_fd())
                                  : Py_BuildValue("(ii)", end.async_fd(), end.more_events_fd());
}

PyObject* pair_event(PyObject* object, PyObject*) {
  End& end = *pair_of(object)->end;
  ibv_event_type type;
  while (end.is_open() && end.event(&type))
    if (verbs::ends_pair(type)) return PyUnicode_FromString(end.words(type));
  Py_RETURN_NONE;
}

PyObject* pair_halt(PyObject* object, PyObject*) {
  if (pair_of(object)->end->is_open()) pair_of(object)->end->halt();
  Py_RETURN_NONE;
}

PyObject* pair_close(PyObject* object, PyObject*) {
  pair_of(object)->end->close();
  Py_RETURN_NONE;
}

PyMethodDef pair_methods[] = {
    {"card", pair_card, METH_NOARGS, nullptr},   {"connect", pair_connect, METH_VARARGS, nullptr},
    {"queue", pair_queue, METH_NOARGS, nullptr}, {"events_fds", pair_events_fds, METH_NOARGS, nullptr},
    {"event", pair_event, METH_NOARGS, nullptr}, {"halt", pair_halt, METH_NOARGS, nullptr},
    {"close", pair_close, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyType_Slot pair_slots[] = {{Py_tp_dealloc, slot(pair_dealloc)}, {Py_tp_methods, pair_methods}, {0, nullptr}};
PyType_Spec pair_spec = {"lamina.netstack.host._netstack.KernelPair", sizeof(KernelPair), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, pair_slots};

}  // namespace

PyObject* open_kernel_pair(PyObject* module, PyObject* args) {
  auto* state = static_cast<State*>(PyModule_GetState(module));
  const char* device;
  verbs::Port port{};
  unsigned blocks;
  Number places[3], bytes[3];
  int files[3];
  if (!PyArg_ParseTuple(args, "sbiHbbbI(KKi)(KKi)(KKi)", &device, &port.number, &port.gid_index, &port.pkey_index,
                        &port.service_level, &port.traffic_class, &port.ack_timeout, &blocks, &places[0], &bytes[0],
                        &files[0], &places[1], &bytes[1], &files[1], &places[2], &bytes[2], &files[2]))
    return nullptr;
  if (bytes[2] && bytes[2] != verbs::rings_bytes(blocks))
    return PyErr_Format(PyExc_ValueError, "rings of %u blocks have %llu bytes", blocks, verbs::rings_bytes(blocks));
  auto* self = allocate<KernelPair>(state->kernel_pair_type);
  if (!self) return nullptr;
  auto* object = reinterpret_cast<PyObject*>(self);
  auto* const firmware = bytes[2] ? new (std::nothrow) verbs::FirmwareEnd : nullptr;
  new (&self->end) std::unique_ptr<End>(firmware || bytes[2] ? firmware : new (std::nothrow) End);
  if (!self->end) return Py_DECREF(object), PyErr_NoMemory();
  port.device = device;
  const auto piece = [&](int i) {
    return verbs::Piece{reinterpret_cast<std::uint8_t*>(std::uintptr_t(places[i])), bytes[i], files[i]};
  };
  bool opened;
  std::string fault;
  Py_BEGIN_ALLOW_THREADS;
  opened = firmware ? firmware->open(port, piece(0), piece(1), piece(2), blocks)
                    : self->end->open(port, piece(0), piece(1), verbs::depth_of(blocks));
  if (!opened) fault = self->end->fault();
  if (opened && firmware) self->layout = firmware->layout();
  opened = opened && (firmware || verbs::lay_out(self->end->pair(), &self->layout, &fault));
  Py_END_ALLOW_THREADS;
  if (opened) return object;
  PyErr_Format(PyExc_OSError, "cannot %s", fault.c_str());
  Py_DECREF(object);
  return nullptr;
}

PyObject* rings_bytes(PyObject*, PyObject* blocks) {
  const unsigned long count = PyLong_AsUnsignedLong(blocks);
  return PyErr_Occurred() ? nullptr : PyLong_FromUnsignedLongLong(verbs::rings_bytes(std::uint32_t(count)));
}

PyObject* mlx5_fault(PyObject*, PyObject*) {
  const char* fault = verbs::Library::get().fault;
  return PyUnicode_DecodeFSDefault(*fault ? fault : verbs::Provider::get().fault);
}

bool add_kernel_pair(State* state, PyObject* module) {
  state->kernel_pair_type = reinterpret_cast<PyTypeObject*>(PyType_FromModuleAndSpec(module, &pair_spec, nullptr));
  return state->kernel_pair_type != nullptr;
}

}  // namespace lamina

#else

namespace lamina {

PyObject* open_kernel_pair(PyObject*, PyObject*) { return PyErr_Format(PyExc_OSError, "%s", kUnbuilt); }
PyObject* rings_bytes(PyObject*, PyObject*) { return PyErr_Format(PyExc_OSError, "%s", kUnbuilt); }
PyObject* mlx5_fault(PyObject*, PyObject*) { return PyUnicode_FromString(kUnbuilt); }
bool add_kernel_pair(State*, PyObject*) { return true; }

}  // namespace lamina

#endif
