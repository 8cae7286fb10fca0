// lamina.netstack.host._netstack: the module, and a constructor for each engine.
#include "native.h"

#include <sys/stat.h>

#include <new>
#include <utility>

#include "netstack/host/link.h"
#include "netstack/host/stream.h"
#include "netstack/verbs/native.h"

namespace lamina {
namespace {

bool read_number(PyObject* geometry, PyObject* name, std::uint64_t most, std::uint64_t* value) {
  PyObject* number = PyObject_GetAttr(geometry, name);
  if (!number) return false;
  *value = PyLong_AsUnsignedLongLong(number);
  Py_DECREF(number);
  if (PyErr_Occurred()) return false;
  if (*value < 1 || *value > most)
    return PyErr_Format(PyExc_ValueError, "%U must be 1..%llu", name, Number(most)), false;
  return true;
}

}  // namespace

bool read_geometry(State* state, PyObject* geometry, Shape* shape) {
  return read_number(geometry, state->name_slots, 1 << 20, &shape->slots) &&
         read_number(geometry, state->name_slot_bytes, 1ull << 40, &shape->slot_bytes);
}

bool check_epoch(Number epoch) {
  if (epoch >> 16) PyErr_Format(PyExc_ValueError, "epoch must be 0..65535, not %llu", epoch);
  return !(epoch >> 16);
}

std::uint64_t nanoseconds(double seconds) { return std::uint64_t(std::min(std::max(seconds, 0.0), 1e9) * 1e9); }

namespace {

State* state_of_module(PyObject* module) { return static_cast<State*>(PyModule_GetState(module)); }

bool check_key(Py_ssize_t bytes) {
  if (bytes != Py_ssize_t(kKeyBytes)) PyErr_Format(PyExc_ValueError, "a key has %llu bytes", Number(kKeyBytes));
  return bytes == Py_ssize_t(kKeyBytes);
}

// libcrypto is not there, or has failed.
bool raise_fault() {
  const char* fault = Crypto::get().fault;
  PyErr_Format(PyExc_OSError, "libcrypto: %s", *fault ? fault : "it failed");
  return false;
}

PyObject* open_link(PyObject* module, PyObject* args) {
  State* state = state_of_module(module);
  int memory_fd, life_line, listening;
  Number epoch;
  PyObject *outbound, *inbound, *peer, *peer_name;
  double spin_s;
  Shape out, in;
  if (!PyArg_ParseTuple(args, "iipKOOdUU", &memory_fd, &life_line, &listening, &epoch, &outbound, &inbound, &spin_s,
                        &peer, &peer_name) ||
      !check_epoch(epoch) || !read_geometry(state, outbound, &out) || !read_geometry(state, inbound, &in))
    return nullptr;
  const std::uint64_t out_bytes = Ring::bytes(out.slots, out.slot_bytes),
                      in_bytes = Ring::bytes(in.slots, in.slot_bytes);
  struct stat info;
  if (fstat(memory_fd, &info)) return PyErr_SetFromErrno(PyExc_OSError);
  if (std::uint64_t(info.st_size) != out_bytes + in_bytes)
    return PyErr_Format(PyExc_ValueError, "the shared memory has %lld bytes, the geometry needs %llu",
                        static_cast<long long>(info.st_size), Number(out_bytes + in_bytes));
  PyObject* memory = map_memory(state, memory_fd, out_bytes + in_bytes);
  if (!memory) return nullptr;
  // The connector's outbound ring comes first in the mapping, so both sides name the same bytes.
  std::uint8_t* base = memory_base(memory);
  const Ring out_ring(base + (listening ? in_bytes : 0), out.slots, out.slot_bytes, epoch);
  const Ring in_ring(base + (listening ? 0 : out_bytes), in.slots, in.slot_bytes, epoch);
  if (listening) {
    out_ring.clear();
    in_ring.clear();
  }
  auto* link = new (std::nothrow) Link(out_ring, in_ring, life_line, nanoseconds(spin_s));
  if (!link) {
    Py_DECREF(memory);
    return PyErr_NoMemory();
  }
  return make_channel(state, link, memory, peer, peer_name, epoch, outbound, out, inbound, in);
}

// None, or the keys of the outbound and of the inbound direction.
bool read_guards(PyObject* keys, Guard* out, Guard* in) {
  if (keys == Py_None) return true;
  const char *out_key, *in_key;
  Py_ssize_t out_bytes, in_bytes;
  if (!PyTuple_Check(keys)) return PyErr_Format(PyExc_TypeError, "keys are None or two byte strings"), false;
  if (!PyArg_ParseTuple(keys, "y#y#", &out_key, &out_bytes, &in_key, &in_bytes)) return false;
  if (!check_key(out_bytes) || !check_key(in_bytes)) return false;
  *out = Guard(reinterpret_cast<const std::uint8_t*>(out_key), true);
  *in = Guard(reinterpret_cast<const std::uint8_t*>(in_key), false);
  return (out->sound() && in->sound()) || raise_fault();
}

PyObject* open_stream(PyObject* module, PyObject* args) {
  State* state = state_of_module(module);
  int sock;
  Number epoch;
  PyObject *outbound, *inbound, *keys, *peer, *peer_name;
  double spin_s, stall_s;
  Shape out, in;
  Guard out_guard, in_guard;
  if (!PyArg_ParseTuple(args, "iKOOOddUU", &sock, &epoch, &outbound, &inbound, &keys, &spin_s, &stall_s, &peer,
                        &peer_name) ||
      !check_epoch(epoch) || !read_geometry(state, outbound, &out) || !read_geometry(state, inbound, &in) ||
      !read_guards(keys, &out_guard, &in_guard))
    return nullptr;
  const std::uint64_t out_bytes = Outbox::bytes(out.slots, out.slot_bytes);
  PyObject* memory = map_memory(state, -1, out_bytes + Slots::bytes(in.slots, in.slot_bytes));
  if (!memory) return nullptr;
  std::uint8_t* base = memory_base(memory);
  const Outbox outbox{base, out.slots, out.slot_bytes};
  const Slots inbox{base + out_bytes, in.slots, in.slot_bytes};
  auto* stream = new (std::nothrow) Stream(sock, outbox, inbox, epoch, std::move(out_guard), std::move(in_guard),
                                           nanoseconds(spin_s), nanoseconds(stall_s), *state->teller);
  if (!stream || !stream->start()) {
    PyErr_SetFromErrno(PyExc_OSError);
    delete stream;
    Py_DECREF(memory);
    return nullptr;
  }
  return make_channel(state, stream, memory, peer, peer_name, epoch, outbound, out, inbound, in);
}

PyObject* ring_bytes(PyObject*, PyObject* args) {
  Number slots, slot_bytes;
  if (!PyArg_ParseTuple(args, "KK", &slots, &slot_bytes)) return nullptr;
  return PyLong_FromUnsignedLongLong(Ring::bytes(slots, slot_bytes));
}

// check(part, frame, bytes): the checksum of a part of a frame; of other bytes, by a part that no frame has.
PyObject* check(PyObject*, PyObject* args) {
  Number part, frame;
  Py_buffer data;
  if (!PyArg_ParseTuple(args, "KKy*", &part, &frame, &data)) return nullptr;
  std::uint8_t out[kCheckBytes];
  Check sum(part, frame);
  sum.update(static_cast<std::uint8_t*>(data.buf), std::uint64_t(data.len));
  sum.finish(out);
  PyBuffer_Release(&data);
  return PyBytes_FromStringAndSize(reinterpret_cast<char*>(out), Py_ssize_t(kCheckBytes));
}

// seal(key, counter, bytes) and unseal(key, counter, bytes): one text, followed by its tag.
template <bool seals>
PyObject* pass(PyObject*, PyObject* args) {
  const char* key;
  Py_ssize_t key_bytes;
  Number counter;
  Py_buffer data;
  if (!PyArg_ParseTuple(args, "y#Ky*", &key, &key_bytes, &counter, &data)) return nullptr;
  constexpr auto code_bytes = Py_ssize_t(kCodeBytes);
  PyObject* out = nullptr;
  if (!seals && data.len < code_bytes)
    PyErr_SetString(PyExc_ValueError, "no text is so short");
  else if (check_key(key_bytes))
    out = PyBytes_FromStringAndSize(nullptr, data.len + (seals ? code_bytes : -code_bytes));
  if (out) {
    const auto* from = static_cast<const std::uint8_t*>(data.buf);
    auto* to = reinterpret_cast<std::uint8_t*>(PyBytes_AS_STRING(out));
    const auto text_bytes = std::uint64_t(seals ? data.len : data.len - code_bytes);
    bool sound, genuine = true;
    Py_BEGIN_ALLOW_THREADS;
    Cipher cipher(reinterpret_cast<const std::uint8_t*>(key), seals);
    cipher.begin(counter);
    cipher.pass(from, to, text_bytes);
    sound = cipher.sound();
    if constexpr (seals)
      cipher.seal(to + text_bytes), sound = cipher.sound();
    else
      genuine = sound && cipher.open(from + text_bytes);
    Py_END_ALLOW_THREADS;
    if (!sound) raise_fault();
    if (sound && !genuine) PyErr_SetString(PyExc_ValueError, "a text with a wrong code");
    if (!sound || !genuine) Py_CLEAR(out);
  }
  PyBuffer_Release(&data);
  return out;
}

PyObject* crypto_fault(PyObject*, PyObject*) { return PyUnicode_DecodeFSDefault(Crypto::get().fault); }

bool fill_names(State* state) {
  PyObject* fabric = PyImport_ImportModule("lamina.netstack.contract.fabric");
  if (!fabric) return false;
  const std::pair<PyObject**, const char*> taken[] = {{&state->no_resource, "NoResource"},
                                                      {&state->timeout, "ChannelTimeout"},
                                                      {&state->peer_fault, "PeerFault"},
                                                      {&state->aborted, "ChannelAborted"}};
  const std::pair<PyObject**, const char*> interned[] = {
      {&state->name_slots, "slots"}, {&state->name_slot_bytes, "slot_bytes"}, {&state->name_timeout_s, "timeout_s"}};
  bool filled = find_record(fabric, "Slot", {"data", "index", nullptr}, &state->slot) &&
                find_record(fabric, "Arrival", {"seqno", "tag", "data"}, &state->arrival);
  for (const auto& [place, name] : taken) filled = filled && (*place = PyObject_GetAttrString(fabric, name));
  for (const auto& [place, name] : interned) filled = filled && (*place = PyUnicode_InternFromString(name));
  Py_DECREF(fabric);
  return filled;
}

int module_exec(PyObject* module) {
  State* state = state_of_module(module);
  state->teller = new (std::nothrow) Teller;
  if (!state->teller) return PyErr_NoMemory(), -1;
  if (!make_memory_types(state, module) || !fill_names(state) || !add_device(module) || !add_ringer(module) ||
      !add_rdma_end(state, module) || !add_kernel_pair(state, module))
    return -1;
  state->channel_type = reinterpret_cast<PyTypeObject*>(PyType_FromModuleAndSpec(module, &channel_spec, nullptr));
  return state->channel_type ? PyModule_AddType(module, state->channel_type) : -1;
}

int module_clear(PyObject* module) {
  State* state = state_of_module(module);
  for (PyTypeObject** type : {&state->memory_type, &state->view_type, &state->channel_type, &state->rdma_end_type,
                              &state->kernel_pair_type, &state->slot.type, &state->arrival.type})
    Py_CLEAR(*type);
  for (PyObject** object : {&state->no_resource, &state->timeout, &state->peer_fault, &state->aborted,
                            &state->name_slots, &state->name_slot_bytes, &state->name_timeout_s})
    Py_CLEAR(*object);
  return 0;
}

// Channels hold their type, which holds the module: none is left by now.
void module_free(void* module) { delete state_of_module(static_cast<PyObject*>(module))->teller; }

PyMethodDef module_methods[] = {{"open_link", open_link, METH_VARARGS, nullptr},
                                {"open_stream", open_stream, METH_VARARGS, nullptr},
                                {"open_rdma_end", open_rdma_end, METH_VARARGS, nullptr},
                                {"rdma_gids", rdma_gids, METH_VARARGS, nullptr},
                                {"verbs_fault", verbs_fault, METH_NOARGS, nullptr},
                                {"open_kernel_pair", open_kernel_pair, METH_VARARGS, nullptr},
                                {"rings_bytes", rings_bytes, METH_O, nullptr},
                                {"mlx5_fault", mlx5_fault, METH_NOARGS, nullptr},
                                {"ring_bytes", ring_bytes, METH_VARARGS, nullptr},
                                {"check", check, METH_VARARGS, nullptr},
                                {"seal", pass<true>, METH_VARARGS, nullptr},
                                {"unseal", pass<false>, METH_VARARGS, nullptr},
                                {"crypto_fault", crypto_fault, METH_NOARGS, nullptr},
                                {"bounce", bounce, METH_VARARGS, nullptr},
                                {"flood", flood, METH_VARARGS, nullptr},
                                {nullptr, nullptr, 0, nullptr}};
PyModuleDef_Slot module_slots[] = {{Py_mod_exec, reinterpret_cast<void*>(module_exec)}, {0, nullptr}};
PyModuleDef module_def = {PyModuleDef_HEAD_INIT, "_netstack", nullptr,      sizeof(State), module_methods,
                          module_slots,          nullptr,     module_clear, module_free};

}  // namespace

}  // namespace lamina

PyMODINIT_FUNC PyInit__netstack() { return PyModuleDef_Init(&lamina::module_def); }
