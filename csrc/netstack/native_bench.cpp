// Ping-pong over a channel without Python in between: what a native caller of the engine sees.
#include "native_channel.h"

#include <new>
#include <vector>

namespace lamina {
namespace {

constexpr std::uint64_t kPayloads = 3;  // message n carries payload n % 3: no slot of a ring of 4 gets the same twice

struct Bench {
  Engine* engine;
  const std::uint8_t* payloads;  // kPayloads of `bytes`
  std::uint64_t bytes, rounds, patience_ns;
  bool leads, copies;
  std::vector<std::uint8_t> mine;  // where an arrival is copied to
  std::vector<std::uint64_t> times;  // of each round, for the leader
  const char* wrong = nullptr;

  const std::uint8_t* payload(std::uint64_t n) const { return payloads + n % kPayloads * bytes; }

  Status await(Role role) {
    Status status = engine->look(role);
    for (const std::uint64_t deadline = now_ns() + patience_ns; status == Status::pending && now_ns() < deadline;)
      status = engine->wait(role, deadline);
    return status;
  }

  Status put(std::uint64_t n) {
    if (const Status status = await(Role::sender); status != Status::ready) return status;
    engine->grant();
    std::uint8_t tag[sizeof n];
    std::memcpy(tag, &n, sizeof n);
    std::uint64_t seqno;
    Status status = engine->publish(bytes, tag, sizeof tag, payload(n), &seqno);
    while (status == Status::pending) status = engine->resume();
    return status;
  }

  Status get(std::uint64_t n, const std::uint8_t** data) {
    if (const Status status = await(Role::receiver); status != Status::ready) return status;
    Message message;
    if (const Status status = engine->take(&message); status != Status::ready) return status;
    std::uint64_t said;
    std::memcpy(&said, message.tag, sizeof said);
    if (said != n || message.length != bytes) wrong = "a message is not the one that is due";
    *data = message.data;
    if (copies && !wrong) {
      std::memcpy(mine.data(), message.data, bytes);
      engine->release();
      *data = mine.data();
    }
    return Status::ready;
  }

  // After the clock has stopped, or the answer has left.
  void check(std::uint64_t n, const std::uint8_t* data) {
    if (!wrong && std::memcmp(data, payload(n), bytes)) wrong = "a payload differs from what was sent";
    if (!copies) engine->release();
  }

  Status run() {
    const std::uint8_t* data = nullptr;
    for (std::uint64_t n = 0; n < rounds && !wrong; ++n) {
      const std::uint64_t start = now_ns();
      Status status = leads ? put(n) : get(n, &data);
      if (status == Status::ready) status = leads ? get(n, &data) : put(n);
      if (status != Status::ready) return status;
      if (leads) times[n] = now_ns() - start;
      check(n, data);
    }
    return Status::ready;
  }
};

}  // namespace

// bounce(channel, payloads, rounds, leads, copies, timeout_s); see _native.pyi.
PyObject* bounce(PyObject* module, PyObject* args) {
  auto* state = static_cast<State*>(PyModule_GetState(module));
  PyObject* object;
  const char* payloads;
  Py_ssize_t bytes;
  Number rounds;
  int leads, copies;
  double timeout_s;
  if (!PyArg_ParseTuple(args, "O!y#Kppd", state->channel_type, &object, &payloads, &bytes, &rounds, &leads, &copies,
                        &timeout_s))
    return nullptr;
  Channel* self = of(object);
  const std::uint64_t each = std::uint64_t(bytes) / kPayloads;
  if (self->granted->front() || self->arrived->front() || each > self->out.slot_bytes)
    return PyErr_Format(PyExc_ValueError, "bounce takes a channel with no slot in use and payloads that fit its slots");
  Bench bench{self->engine,
              reinterpret_cast<const std::uint8_t*>(payloads),
              each,
              rounds,
              std::uint64_t(std::min(std::max(timeout_s, 0.0), 1e9) * 1e9),
              leads != 0,
              copies != 0,
              {},
              {}};
  try {
    bench.mine.resize(each);
    bench.times.resize(leads ? rounds : 0);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
  const Call call(self);
  Status status;
  Py_BEGIN_ALLOW_THREADS;
  status = bench.run();
  Py_END_ALLOW_THREADS;
  if (bench.wrong) return PyErr_Format(PyExc_ValueError, "%U: %s", self->peer, bench.wrong);
  if (status == Status::pending) return raise_late(self, Role::receiver, timeout_s), nullptr;
  if (status != Status::ready) return raise_over(self, status, "bounce");
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(bench.times.data()),
                                   Py_ssize_t(bench.times.size() * sizeof(std::uint64_t)));
}

}  // namespace lamina
