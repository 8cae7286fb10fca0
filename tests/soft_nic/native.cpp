// soft_nic._native: a channel of mlx5_channel.h over the software NIC. netstack/nic_model/_native.pyi documents it.
//
// The GIL is the queue's lock: the thread that posts or polls holds it. Only waits, which read the inbox, go without.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <memory>
#include <thread>

#include "module_types.h"
#include "netstack/device_module.h"
#include "soft_nic/end.h"

namespace {

using namespace lamina;
using mlx5::u64;

constexpr u64 kInboxAddress = 0x7e0000000000;
constexpr u64 kMessageMost = 1ull << 30;  // of the NIC, header included

struct Endpoint {
  PyObject_HEAD Py_buffer inbox, staging, peer;  // obj is null until taken
  u64 abort;
  bool proxied;  // `ring` moves the NIC
  nic_model::End* end;
};

Endpoint* self_of(PyObject* object) { return reinterpret_cast<Endpoint*>(object); }

bool take_buffer(PyObject* object, u64 bytes, const char* name, Py_buffer* buffer) {
  if (PyObject_GetBuffer(object, buffer, PyBUF_WRITABLE)) return false;
  if (u64(buffer->len) == bytes && reinterpret_cast<std::uintptr_t>(buffer->buf) % mlx5::kLine == 0) return true;
  PyErr_Format(PyExc_ValueError, "%s has %zd bytes; it needs %llu, on a line's boundary", name, buffer->len, bytes);
  PyBuffer_Release(buffer);
  buffer->obj = nullptr;
  return false;
}

std::uint32_t ring_blocks(u64 messages, u64 credits) {
  std::uint32_t blocks = 8;
  while (blocks < 2 * (messages + credits)) blocks *= 2;
  return blocks;
}

PyObject* endpoint_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"inbox",  "staging", "outbound", "inbound", "epoch",
                                "number", "seed",    "proxied",  nullptr};
  PyObject *inbox, *staging;
  mlx5::Slots out, in;
  u64 epoch, seed;
  unsigned number;
  int proxied = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO(KK)(KK)KIK|p", const_cast<char**>(names), &inbox, &staging,
                                   &out.count, &out.bytes, &in.count, &in.bytes, &epoch, &number, &seed, &proxied))
    return nullptr;
  for (const mlx5::Slots& slots : {out, in})
    if (slots.count < 1 || slots.count > 1024 || slots.bytes > kMessageMost - sizeof(mlx5::Header))
      return PyErr_Format(PyExc_ValueError, "%llu slots of %llu bytes do not fit the NIC", slots.count, slots.bytes);
  if (epoch >> 16 || number >> 24) return PyErr_Format(PyExc_ValueError, "epoch has 16 bits, number 24");
  PyObject* object = type->tp_alloc(type, 0);
  if (!object) return nullptr;
  Endpoint* self = self_of(object);
  if (!take_buffer(inbox, in.inbox_bytes(), "inbox", &self->inbox) ||
      !take_buffer(staging, out.inbox_bytes(), "staging", &self->staging)) {
    Py_DECREF(object);
    return nullptr;
  }
  nic_model::Shape shape{out, in, number, 0, 0, epoch << 48};
  shape.blocks = shape.cqes = ring_blocks(out.count, in.count);
  self->proxied = shape.proxied = proxied != 0;
  auto* at = static_cast<std::uint8_t*>(self->inbox.buf);
  nic_model::open_inbox(at, shape.zero);
  try {
    self->end = new nic_model::End(shape, at, static_cast<std::uint8_t*>(self->staging.buf), &self->abort,
                                   {true, true, false}, seed, nullptr);
  } catch (const std::bad_alloc&) {
    Py_DECREF(object);
    return PyErr_NoMemory();
  }
  return object;
}

void endpoint_dealloc(PyObject* object) {
  Endpoint* self = self_of(object);
  delete self->end;
  for (Py_buffer* buffer : {&self->inbox, &self->staging, &self->peer})
    if (buffer->obj) PyBuffer_Release(buffer);
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}

PyObject* endpoint_reach(PyObject* object, PyObject* args) {
  Endpoint* self = self_of(object);
  PyObject* inbox;
  u64 address;
  unsigned key;
  if (!PyArg_ParseTuple(args, "OKI", &inbox, &address, &key)) return nullptr;
  if (self->peer.obj) return PyErr_Format(PyExc_ValueError, "the peer is known already");
  if (!take_buffer(inbox, self->end->channel.out.inbox_bytes(), "the peer's inbox", &self->peer)) return nullptr;
  self->end->reach({address, key}, static_cast<std::uint8_t*>(self->peer.buf), nullptr);
  Py_RETURN_NONE;
}

// Runs `wait(bus, ends, timeout_ns)`: once with the GIL, and if nothing is there yet, without it. It leaves the queue
// alone, of which the GIL is the lock.
template <class Wait>
PyObject* run_wait(PyObject* object, PyObject* timeout, Wait wait) {
  const double timeout_s = PyFloat_AsDouble(timeout);
  if (PyErr_Occurred()) return nullptr;
  mlx5::Ends& ends = self_of(object)->end->channel;
  mlx5::Bus bus;
  mlx5::Status status = wait(bus, ends, 0);
  if (status == mlx5::kTimeout && timeout_s > 0) {
    Py_BEGIN_ALLOW_THREADS;
    status = wait(bus, ends, u64(std::min(timeout_s, 1e6) * 1e9));
    Py_END_ALLOW_THREADS;
  }
  return PyLong_FromLong(status);
}

PyObject* endpoint_wait_slot(PyObject* object, PyObject* timeout) {
  return run_wait(object, timeout, [](auto& bus, auto& ends, u64 ns) { return mlx5::wait_slot(bus, ends, ns); });
}

PyObject* endpoint_wait_message(PyObject* object, PyObject* timeout) {
  return run_wait(object, timeout, [](auto& bus, auto& ends, u64 ns) { return mlx5::wait_message(bus, ends, ns); });
}

PyObject* endpoint_grant(PyObject* object, PyObject*) {
  mlx5::Channel& c = self_of(object)->end->channel;
  if (c.granted - c.credited >= c.out.count) return PyErr_Format(PyExc_ValueError, "grant without a free slot");
  const u64 message = c.granted++;
  return Py_BuildValue("KK", message % c.out.count, u64(mlx5::payload_of(c, message) - c.staging));
}

PyObject* endpoint_publish(PyObject* object, PyObject* args) {
  Endpoint* self = self_of(object);
  u64 bytes;
  Py_buffer tag;
  if (!PyArg_ParseTuple(args, "Ky*", &bytes, &tag)) return nullptr;
  u64 words[mlx5::kTagWords] = {};
  const bool fits = tag.len <= Py_ssize_t(sizeof words);
  if (fits) std::memcpy(words, tag.buf, std::size_t(tag.len));
  PyBuffer_Release(&tag);
  nic_model::End& end = *self->end;
  mlx5::Channel& c = end.channel;
  if (!fits || bytes > c.out.bytes || c.published == c.granted || !self->peer.obj)
    return PyErr_Format(PyExc_ValueError, "publish takes a granted slot, at most its bytes, and a tag of %zu bytes",
                        sizeof words);
  const mlx5::Status status = mlx5::publish(end.bus, c, bytes, words);
  if (!self->proxied) end.nic.run();
  return PyLong_FromLong(status);
}

PyObject* endpoint_take(PyObject* object, PyObject*) {
  mlx5::Channel& c = self_of(object)->end->channel;
  mlx5::Bus bus;
  mlx5::Header header;
  const mlx5::u8* payload;
  if (mlx5::take(bus, c, &header, &payload) != mlx5::kOk) Py_RETURN_NONE;
  return Py_BuildValue("Ky#KK", header.seqno, reinterpret_cast<const char*>(header.tag), Py_ssize_t(sizeof header.tag),
                       u64(payload - c.inbox), header.length);
}

PyObject* endpoint_release(PyObject* object, PyObject*) {
  mlx5::Channel& c = self_of(object)->end->channel;
  if (c.released == c.received) return PyErr_Format(PyExc_ValueError, "release without a message");
  mlx5::Bus bus;
  mlx5::give_back(bus, c, c.released + 1);
  Py_RETURN_NONE;
}

PyObject* endpoint_report(PyObject* object, PyObject*) {
  nic_model::End& end = *self_of(object)->end;
  const mlx5::Status status = mlx5::report(end.bus, end.channel);
  if (!self_of(object)->proxied) end.nic.run();
  return PyLong_FromLong(status);
}

PyObject* endpoint_ring(PyObject* object, PyObject* timeout) {
  const double timeout_s = PyFloat_AsDouble(timeout);
  if (PyErr_Occurred()) return nullptr;
  Endpoint* self = self_of(object);
  const u64 known = self->end->rung();
  mlx5::Bus bus;
  bool aborted;
  Py_BEGIN_ALLOW_THREADS;
  const u64 start = bus.now_ns(), most = u64(std::min(timeout_s, 1e6) * 1e9);
  while (!(aborted = bus.load(&self->abort) != 0) && bus.acquire(self->end->mailbox()) == known &&
         bus.now_ns() - start < most)
    bus.rest(20'000);
  Py_END_ALLOW_THREADS;
  self->end->clerk();
  self->end->nic.run();
  return PyBool_FromLong(!aborted);
}

PyObject* endpoint_syndrome(PyObject* object, PyObject*) {
  nic_model::End& end = *self_of(object)->end;
  while (mlx5::poll_cq(end.bus, end.channel.queue) == mlx5::kOk) {
  }
  return PyLong_FromUnsignedLong(end.channel.queue.syndrome);
}

PyObject* endpoint_abort(PyObject* object, PyObject*) {
  __atomic_store_n(&self_of(object)->abort, u64(1), __ATOMIC_RELEASE);
  Py_RETURN_NONE;
}

PyObject* write_wqe(PyObject*, PyObject* args) {
  u64 index, to, from;
  unsigned queue, to_key, from_key, bytes, flags;
  if (!PyArg_ParseTuple(args, "KI(KI)(KI)II", &index, &queue, &to, &to_key, &from, &from_key, &bytes, &flags))
    return nullptr;
  const mlx5::Wqe wqe = mlx5::write_wqe(index, queue, {to, to_key}, {from, from_key}, bytes, flags);
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(&wqe), sizeof wqe);
}

PyObject* write_word_wqe(PyObject*, PyObject* args) {
  u64 index, to, value;
  unsigned queue, to_key, flags;
  if (!PyArg_ParseTuple(args, "KI(KI)KI", &index, &queue, &to, &to_key, &value, &flags)) return nullptr;
  const mlx5::Wqe wqe = mlx5::write_words_wqe<1>(index, queue, {to, to_key}, {{value}}, flags);
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(&wqe), sizeof wqe);
}

// As mlx5::Channel lies in memory that this process and a GPU reach.
mlx5::Channel* channel_at(u64 address) { return reinterpret_cast<mlx5::Channel*>(std::uintptr_t(address)); }

PyObject* host_send(PyObject*, PyObject* args) {
  u64 address, bytes;
  double timeout_s;
  if (!PyArg_ParseTuple(args, "KKd", &address, &bytes, &timeout_s)) return nullptr;
  mlx5::Channel& c = *channel_at(address);
  mlx5::Bus bus;
  mlx5::Status status;
  Py_BEGIN_ALLOW_THREADS;
  const u64 tag[mlx5::kTagWords] = {};
  status = mlx5::wait_slot(bus, c, u64(timeout_s * 1e9));
  if (status == mlx5::kOk) {
    c.granted += 1;
    status = mlx5::publish(bus, c, bytes, tag);
  }
  Py_END_ALLOW_THREADS;
  return PyLong_FromLong(status);
}

PyObject* host_receive(PyObject*, PyObject* args) {
  u64 address;
  double timeout_s;
  if (!PyArg_ParseTuple(args, "Kd", &address, &timeout_s)) return nullptr;
  mlx5::Channel& c = *channel_at(address);
  mlx5::Bus bus;
  mlx5::Status status;
  Py_BEGIN_ALLOW_THREADS;
  mlx5::Header header;
  const mlx5::u8* payload;
  status = mlx5::wait_message(bus, c, u64(timeout_s * 1e9));
  if (status == mlx5::kOk) status = mlx5::take(bus, c, &header, &payload);
  if (status == mlx5::kOk) {
    mlx5::give_back(bus, c, c.received);
    status = mlx5::report_due(bus, c);
  }
  Py_END_ALLOW_THREADS;
  return PyLong_FromLong(status);
}

// A NIC over memory of the caller's, whose doorbells another process writes.
PyObject* serve_nic(PyObject*, PyObject* args) {
  u64 ring, record, completions, seen, registers, index, stop_at;
  unsigned number, blocks, cqes, alternate;
  nic_model::MemoryRegion local{0, 0, 0, nullptr, false, nullptr}, remote{0, 0, 0, nullptr, true, nullptr};
  unsigned long long local_address, local_bytes, local_at, remote_address, remote_bytes, remote_at;
  if (!PyArg_ParseTuple(args, "KKKKKIIIIK(IKKK)(IKKK)K", &ring, &record, &completions, &seen, &registers, &alternate,
                        &number, &blocks, &cqes, &index, &local.key, &local_address, &local_bytes, &local_at,
                        &remote.key, &remote_address, &remote_bytes, &remote_at, &stop_at))
    return nullptr;
  const auto at = [](u64 address) { return reinterpret_cast<std::uint8_t*>(std::uintptr_t(address)); };
  local.address = local_address, local.bytes = local_bytes, local.at = at(local_at);
  remote.address = remote_address, remote.bytes = remote_bytes, remote.at = at(remote_at);
  nic_model::Counters count;
  Py_BEGIN_ALLOW_THREADS;
  nic_model::Nic nic({at(ring), reinterpret_cast<std::uint32_t*>(at(record)), at(completions),
                      reinterpret_cast<std::uint32_t*>(at(seen)), number, blocks, cqes, alternate, index, 0, nullptr,
                      true},
                     {}, 1);
  nic.local.push_back(local);
  nic.remote.push_back(remote);
  for (const auto to : {nic_model::State::init, nic_model::State::rtr, nic_model::State::rts}) nic.modify(to);
  const auto* stop = reinterpret_cast<const u64*>(at(stop_at));
  u64 known[2] = {mlx5::kNoDoorbell, mlx5::kNoDoorbell};
  while (!__atomic_load_n(stop, __ATOMIC_ACQUIRE)) {
    for (unsigned i = 0; i < (alternate ? 2u : 1u); ++i) {
      const u64 value = __atomic_load_n(reinterpret_cast<const u64*>(at(registers) + i * alternate), __ATOMIC_ACQUIRE);
      if (value != known[i]) nic.doorbell(i * alternate, known[i] = value);
    }
    if (!nic.step()) std::this_thread::yield();
  }
  count = nic.count;
  Py_END_ALLOW_THREADS;
  return Py_BuildValue("KKK", u64(count.executed), u64(count.doorbells), u64(count.refused));
}

PyMethodDef endpoint_methods[] = {
    {"reach", endpoint_reach, METH_VARARGS, nullptr},         {"wait_slot", endpoint_wait_slot, METH_O, nullptr},
    {"grant", endpoint_grant, METH_NOARGS, nullptr},          {"publish", endpoint_publish, METH_VARARGS, nullptr},
    {"wait_message", endpoint_wait_message, METH_O, nullptr}, {"take", endpoint_take, METH_NOARGS, nullptr},
    {"release", endpoint_release, METH_NOARGS, nullptr},      {"report", endpoint_report, METH_NOARGS, nullptr},
    {"syndrome", endpoint_syndrome, METH_NOARGS, nullptr},    {"ring", endpoint_ring, METH_O, nullptr},
    {"abort", endpoint_abort, METH_NOARGS, nullptr},          {nullptr, nullptr, 0, nullptr},
};

PyType_Slot endpoint_slots[] = {{Py_tp_dealloc, slot(endpoint_dealloc)},
                                {Py_tp_new, slot(endpoint_new)},
                                {Py_tp_methods, endpoint_methods},
                                {0, nullptr}};
PyType_Spec endpoint_spec = {"soft_nic._native.Endpoint", sizeof(Endpoint), 0, Py_TPFLAGS_DEFAULT, endpoint_slots};

int module_exec(PyObject* module) {
  PyObject* type = PyType_FromModuleAndSpec(module, &endpoint_spec, nullptr);
  if (!type) return -1;
  const int failed = PyModule_AddType(module, reinterpret_cast<PyTypeObject*>(type));
  Py_DECREF(type);
  if (device::add_constants(module) || PyModule_AddIntConstant(module, "SIGNALLED", mlx5::kSignalled)) return -1;
  PyObject* address = PyLong_FromUnsignedLongLong(kInboxAddress);
  const int missing = PyModule_AddObjectRef(module, "INBOX_ADDRESS", address);
  Py_XDECREF(address);
  return failed || missing ? -1 : 0;
}

PyMethodDef module_methods[] = {{"inbox_bytes", device::inbox_bytes, METH_VARARGS, nullptr},
                                {"channel_layout", device::channel_layout<mlx5::Channel>, METH_NOARGS, nullptr},
                                {"host_send", host_send, METH_VARARGS, nullptr},
                                {"host_receive", host_receive, METH_VARARGS, nullptr},
                                {"serve_nic", serve_nic, METH_VARARGS, nullptr},
                                {"write_wqe", write_wqe, METH_VARARGS, nullptr},
                                {"write_word_wqe", write_word_wqe, METH_VARARGS, nullptr},
                                {nullptr, nullptr, 0, nullptr}};
PyModuleDef_Slot module_slots[] = {{Py_mod_exec, slot(module_exec)}, {0, nullptr}};
PyModuleDef module_def = {PyModuleDef_HEAD_INIT, "_native", nullptr, 0,      module_methods,
                          module_slots,          nullptr,   nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() { return PyModuleDef_Init(&module_def); }
