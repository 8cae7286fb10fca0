// The part of the module that opens queue pairs: RdmaEnd, which becomes a channel once it has met its peer.
//
// Where the headers of libibverbs are missing it says so, and has nothing else.
#include "native.h"

#if __has_include(<infiniband/verbs.h>)
#include <sys/mman.h>

#include <memory>
#include <new>

#include "pair.h"
#include "verbs.h"

namespace lamina {
namespace {

using verbs::End;

struct RdmaEnd {
  PyObject_HEAD std::unique_ptr<End> end;
  PyObject* memory;  // staging, then inbox
  PyObject *outbound, *inbound;
  verbs::Slots staging, inbox;
};

RdmaEnd* end_of(PyObject* object) { return reinterpret_cast<RdmaEnd*>(object); }

void end_dealloc(PyObject* object) {
  RdmaEnd* self = end_of(object);
  self->end.~unique_ptr();
  Py_XDECREF(self->memory);
  Py_XDECREF(self->outbound);
  Py_XDECREF(self->inbound);
  free_object(object);
}

bool is_open(RdmaEnd* self) {
  if (!self->end) PyErr_SetString(PyExc_ValueError, "the end was closed, or has become a channel");
  return self->end != nullptr;
}

PyObject* end_card(PyObject* object, PyObject*) {
  RdmaEnd* self = end_of(object);
  return is_open(self) ? card_of(*self->end) : nullptr;
}

PyObject* end_connect(PyObject* object, PyObject* args) {
  RdmaEnd* self = end_of(object);
  return is_open(self) ? connect(*self->end, args) : nullptr;
}

// channel(sock, epoch, spin_s, stall_s, peer, peer_name) -> Channel
PyObject* end_channel(PyObject* object, PyObject* args) {
  RdmaEnd* self = end_of(object);
  State* state = static_cast<State*>(PyType_GetModuleState(Py_TYPE(object)));
  int sock;
  Number epoch;
  double spin_s, stall_s;
  PyObject *peer, *peer_name;
  if (!is_open(self) || !PyArg_ParseTuple(args, "iKddUU", &sock, &epoch, &spin_s, &stall_s, &peer, &peer_name) ||
      !check_epoch(epoch))
    return nullptr;
  auto* engine = new (std::nothrow) verbs::Verbs(std::move(self->end), sock, self->staging, self->inbox, epoch,
                                                 nanoseconds(spin_s), nanoseconds(stall_s), *state->teller);
  if (!engine || !engine->start()) {
    PyErr_SetFromErrno(PyExc_OSError);
    delete engine;
    return nullptr;
  }
  const Shape out{self->staging.slots, self->staging.slot_bytes}, in{self->inbox.slots, self->inbox.slot_bytes};
  PyObject* memory = self->memory;
  self->memory = nullptr;
  return make_channel(state, engine, memory, peer, peer_name, epoch, self->outbound, out, self->inbound, in);
}

PyObject* end_close(PyObject* object, PyObject*) {
  RdmaEnd* self = end_of(object);
  self->end.reset();
  Py_CLEAR(self->memory);
  Py_RETURN_NONE;
}

PyMethodDef end_methods[] = {{"card", end_card, METH_NOARGS, nullptr},
                             {"connect", end_connect, METH_VARARGS, nullptr},
                             {"channel", end_channel, METH_VARARGS, nullptr},
                             {"close", end_close, METH_NOARGS, nullptr},
                             {nullptr, nullptr, 0, nullptr}};
PyType_Slot end_slots[] = {{Py_tp_dealloc, slot(end_dealloc)}, {Py_tp_methods, end_methods}, {0, nullptr}};
PyType_Spec end_spec = {"lamina.netstack.host._netstack.RdmaEnd", sizeof(RdmaEnd), 0,
                        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, end_slots};

}  // namespace

PyObject* open_rdma_end(PyObject* module, PyObject* args) {
  auto* state = static_cast<State*>(PyModule_GetState(module));
  const char* device;
  verbs::Port port{};
  PyObject *outbound, *inbound;
  Shape out, in;
  if (!PyArg_ParseTuple(args, "sbiHbbbOO", &device, &port.number, &port.gid_index, &port.pkey_index,
                        &port.service_level, &port.traffic_class, &port.ack_timeout, &outbound, &inbound) ||
      !read_geometry(state, outbound, &out) || !read_geometry(state, inbound, &in))
    return nullptr;
  auto* self = allocate<RdmaEnd>(state->rdma_end_type);
  if (!self) return nullptr;
  auto* object = reinterpret_cast<PyObject*>(self);
  new (&self->end) std::unique_ptr<End>(new (std::nothrow) End);
  const std::uint64_t out_bytes = verbs::Slots::bytes(out.slots, out.slot_bytes),
                      in_bytes = verbs::Slots::bytes(in.slots, in.slot_bytes);
  self->memory = map_memory(state, -1, out_bytes + in_bytes);
  if (!self->end || !self->memory) {
    if (!PyErr_Occurred()) PyErr_NoMemory();
    Py_DECREF(object);
    return nullptr;
  }
  std::uint8_t* base = memory_base(self->memory);
  self->staging = {base, out.slots, out.slot_bytes};
  self->inbox = {base + out_bytes, in.slots, in.slot_bytes};
  self->outbound = Py_NewRef(outbound);
  self->inbound = Py_NewRef(inbound);
  port.device = device;
  bool opened;
  Py_BEGIN_ALLOW_THREADS;
  madvise(base, out_bytes + in_bytes, MADV_DONTFORK);  // a fork must not move what the NIC writes to
  opened = self->end->open(port, {base, out_bytes}, {base + out_bytes, in_bytes},
                           verbs::depth_of(self->staging, self->inbox));
  Py_END_ALLOW_THREADS;
  if (opened) return object;
  PyErr_Format(PyExc_OSError, "cannot %s", self->end->fault());
  Py_DECREF(object);
  return nullptr;
}

PyObject* rdma_gids(PyObject*, PyObject* args) {
  const char* device;
  unsigned char port;
  if (!PyArg_ParseTuple(args, "sb", &device, &port)) return nullptr;
  const verbs::Library& lib = verbs::Library::get();
  if (*lib.fault || !lib.query_gid_table) return PyErr_Format(PyExc_OSError, "libibverbs lists no GIDs");
  constexpr std::size_t most = 2000;  // whose bytes fit the 16-bit length of the kernel's interface
  const std::unique_ptr<verbs::GidEntry[]> entries(new (std::nothrow) verbs::GidEntry[most]);
  if (!entries) return PyErr_NoMemory();
  ssize_t count = -1;
  Py_BEGIN_ALLOW_THREADS;
  if (ibv_context* context = lib.open(device)) {
    count = lib.query_gid_table(context, entries.get(), most, 0, sizeof(verbs::GidEntry));
    lib.close_device(context);
  }
  Py_END_ALLOW_THREADS;
  if (count < 0) return PyErr_Format(PyExc_OSError, "cannot list the GIDs of %s", device);
  PyObject* list = PyList_New(0);
  for (ssize_t i = 0; list && i < count; ++i) {
    const verbs::GidEntry& e = entries[std::size_t(i)];
    if (e.port != port) continue;
    PyObject* entry = Py_BuildValue("Iy#I", e.index, e.gid.raw, Py_ssize_t(sizeof e.gid.raw), e.kind);
    if (!entry || PyList_Append(list, entry)) Py_CLEAR(list);
    Py_XDECREF(entry);
  }
  return list;
}

PyObject* verbs_fault(PyObject*, PyObject*) { return PyUnicode_DecodeFSDefault(verbs::Library::get().fault); }

bool add_rdma_end(State* state, PyObject* module) {
  state->rdma_end_type = reinterpret_cast<PyTypeObject*>(PyType_FromModuleAndSpec(module, &end_spec, nullptr));
  return state->rdma_end_type != nullptr;
}

}  // namespace lamina

#else

namespace lamina {

PyObject* open_rdma_end(PyObject*, PyObject*) { return PyErr_Format(PyExc_OSError, "%s", kUnbuilt); }
PyObject* rdma_gids(PyObject*, PyObject*) { return PyErr_Format(PyExc_OSError, "%s", kUnbuilt); }
PyObject* verbs_fault(PyObject*, PyObject*) { return PyUnicode_FromString(kUnbuilt); }
bool add_rdma_end(State*, PyObject*) { return true; }

}  // namespace lamina

#endif
