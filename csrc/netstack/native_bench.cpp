// Ping-pong and windows of messages over a channel without Python in between: what a native caller of the engine sees.
#include "native_channel.h"

#include <exception>
#include <vector>

namespace lamina {
namespace {

constexpr std::uint64_t kPayloads = 3;  // message n carries payload n % 3: no slot of a ring of 4 gets the same twice

struct Bench {
  Engine* engine;
  const std::uint8_t* payloads;  // kPayloads of `bytes`
  std::uint64_t bytes, patience_ns;
  const char* wrong = nullptr;

  const std::uint8_t* payload(std::uint64_t n) const { return payloads + n % kPayloads * bytes; }

  Status await(Role role) {
    Status status = engine->look(role);
    for (const std::uint64_t deadline = now_ns() + patience_ns; status == Status::pending && now_ns() < deadline;)
      status = engine->wait(role, deadline);
    return status;
  }

  Status put(std::uint64_t n) { return put(n, payload(n), bytes); }
  Status put(std::uint64_t n, const std::uint8_t* data, std::uint64_t length) {
    if (const Status status = await(Role::sender); status != Status::ready) return status;
    std::memcpy(engine->grant().data, data, length);
    std::uint8_t tag[sizeof n];
    std::memcpy(tag, &n, sizeof n);
    std::uint64_t seqno;
    Status status = engine->publish(length, tag, sizeof tag, &seqno);
    while (status == Status::pending) status = engine->resume();
    return status;
  }

  // Message n, copied to `copy` and released if there is one, else left in place.
  Status get(std::uint64_t n, std::uint64_t length, std::uint8_t* copy, const std::uint8_t** data) {
    if (const Status status = await(Role::receiver); status != Status::ready) return status;
    Message message;
    if (const Status status = engine->take(&message); status != Status::ready) return status;
    std::uint64_t said;
    std::memcpy(&said, message.tag, sizeof said);
    if (said != n || message.length != length) wrong = "a message is not the one that is due";
    *data = message.data;
    if (copy && !wrong) {
      std::memcpy(copy, message.data, length);
      engine->release();
      *data = copy;
    }
    return Status::ready;
  }

  // After the clock has stopped, or the answer has left.
  void compare(std::uint64_t n, const std::uint8_t* data) {
    if (!wrong && std::memcmp(data, payload(n), bytes)) wrong = "a payload differs from what was sent";
  }
};

// One message each way in a round.
struct Bounce : Bench {
  std::uint64_t rounds;
  bool leads;
  std::vector<std::uint8_t> copy;  // where an arrival is copied to; empty: it is not
  std::vector<std::uint64_t> times;  // of each round, for the leader

  Status run() {
    const std::uint8_t* data = nullptr;
    std::uint8_t* const to = copy.empty() ? nullptr : copy.data();
    for (std::uint64_t n = 0; n < rounds && !wrong; ++n) {
      const std::uint64_t start = now_ns();
      Status status = leads ? put(n) : get(n, bytes, to, &data);
      if (status == Status::ready) status = leads ? get(n, bytes, to, &data) : put(n);
      if (status != Status::ready) return status;
      if (leads) times[n] = now_ns() - start;
      compare(n, data);
      if (!to) engine->release();
    }
    return Status::ready;
  }
};

// A window of messages each way that there is in a round, and an answer of no bytes by the side that does not lead.
struct Flood : Bench {
  std::uint64_t first, rounds, window;
  bool leads, puts, takes;
  std::vector<std::uint8_t> copies;  // of a window
  std::vector<std::uint64_t> times;  // of each round, for the leader

  Status answer(std::uint64_t round) {
    const std::uint8_t* data = nullptr;
    std::uint8_t none;
    return leads ? get(round, 0, &none, &data) : put(round, payloads, 0);
  }

  Status step(std::uint64_t round) {
    const std::uint64_t begin = round * window;
    const std::uint8_t* data = nullptr;
    Status status = Status::ready;
    for (std::uint64_t i = 0; puts && i < window && status == Status::ready; ++i) status = put(begin + i);
    for (std::uint64_t i = 0; takes && i < window && status == Status::ready && !wrong; ++i)
      status = get(begin + i, bytes, copies.data() + i * bytes, &data);
    return status == Status::ready && !wrong ? answer(round) : status;
  }

  Status run() {
    for (std::uint64_t n = 0; n < rounds && !wrong; ++n) {
      const std::uint64_t start = now_ns();
      if (const Status status = step(first + n); status != Status::ready) return status;
      if (leads) times[n] = now_ns() - start;
      for (std::uint64_t i = 0; takes && i < window; ++i) compare((first + n) * window + i, copies.data() + i * bytes);
    }
    return Status::ready;
  }
};

// Whether the bench may have the channel for itself: it fits and none of its slots is in use; else a ValueError.
bool usable(Channel* self, std::uint64_t bytes, const char* name) {
  if (!self->granted->front() && !self->arrived->front() && bytes <= self->out.slot_bytes) return true;
  PyErr_Format(PyExc_ValueError, "%s takes a channel with no slot in use and payloads that fit its slots", name);
  return false;
}

// The times of its rounds, or an exception.
template <class Rounds>
PyObject* times_of(Channel* self, Rounds& rounds, double timeout_s, const char* name) {
  const Call call(self);
  Status status;
  Py_BEGIN_ALLOW_THREADS;
  status = rounds.run();
  Py_END_ALLOW_THREADS;
  if (rounds.wrong) return PyErr_Format(PyExc_ValueError, "%U: %s", self->peer, rounds.wrong);
  if (status == Status::pending) return raise_late(self, Role::receiver, timeout_s), nullptr;
  if (status != Status::ready) return raise_over(self, status, name);
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(rounds.times.data()),
                                   Py_ssize_t(rounds.times.size() * sizeof(std::uint64_t)));
}

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
  if (!usable(self, each, "bounce")) return nullptr;
  Bounce bench{{self->engine, reinterpret_cast<const std::uint8_t*>(payloads), each, nanoseconds(timeout_s)},
               rounds,
               leads != 0,
               {},
               {}};
  try {
    bench.copy.resize(copies ? each : 0);
    bench.times.resize(leads ? rounds : 0);
  } catch (const std::exception&) {  // no memory, or more than any has
    return PyErr_NoMemory();
  }
  return times_of(self, bench, timeout_s, "bounce");
}

// flood(channel, payloads, first, rounds, window, leads, both, timeout_s); see _native.pyi.
PyObject* flood(PyObject* module, PyObject* args) {
  auto* state = static_cast<State*>(PyModule_GetState(module));
  PyObject* object;
  const char* payloads;
  Py_ssize_t bytes;
  Number first, rounds, window;
  int leads, both;
  double timeout_s;
  if (!PyArg_ParseTuple(args, "O!y#KKKppd", state->channel_type, &object, &payloads, &bytes, &first, &rounds, &window,
                        &leads, &both, &timeout_s))
    return nullptr;
  Channel* self = of(object);
  const std::uint64_t each = std::uint64_t(bytes) / kPayloads;
  if (!usable(self, each, "flood")) return nullptr;
  Flood bench{{self->engine, reinterpret_cast<const std::uint8_t*>(payloads), each, nanoseconds(timeout_s)},
              first,
              rounds,
              window,
              leads != 0,
              leads || both,
              !leads || both,
              {},
              {}};
  try {
    bench.copies.resize(bench.takes ? window * each : 0);
    bench.times.resize(leads ? rounds : 0);
  } catch (const std::exception&) {  // no memory, or more than any has
    return PyErr_NoMemory();
  }
  return times_of(self, bench, timeout_s, "flood");
}

}  // namespace lamina
