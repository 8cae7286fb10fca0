// Two ends joined back to back, and what the scenarios of prove.cpp do with them.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "soft_nic/end.h"

namespace lamina::nic_model {

using mlx5::Status;
using u64 = mlx5::u64;

#define CHECK(truth)                                                            \
  do {                                                                          \
    if (!(truth)) {                                                             \
      std::printf("%s: line %d: not true: %s\n", g_scenario, __LINE__, #truth); \
      std::exit(1);                                                             \
    }                                                                           \
  } while (0)

constexpr u64 kLongNs = 20'000'000;  // of the bus's own clock
constexpr u64 kInboxA = 0x7e0000002000, kInboxB = 0xfffffffff000;  // the second one crosses 2^48

// Two ends whose NICs move whenever either processor touches memory.
class Pair {
 public:
  Pair(Shape a, Shape b, Adversary adversary, u64 seed)
      : random_{seed}, inbox_{Bytes(a.in.inbox_bytes()), Bytes(b.in.inbox_bytes())},
        staging_{Bytes(a.out.inbox_bytes()), Bytes(b.out.inbox_bytes())},
        a(a, inbox_[0].data(), staging_[0].data(), &abort, adversary, seed + 10, [this] { move(); }),
        b(b, inbox_[1].data(), staging_[1].data(), &abort, adversary, seed + 20, [this] { move(); }) {
    for (Bytes& inbox : inbox_) open_inbox(inbox.data(), a.zero);
    this->a.reach({kInboxB, 0xccdd00}, inbox_[1].data(), &this->b.readers);
    this->b.reach({kInboxA, 0xccdd00}, inbox_[0].data(), &this->a.readers);
  }

  void move() {
    if (beside) beside();
    for (u64 n = random_.below(4); n; --n) {
      End& end = random_.once_in(2) ? a : b;
      if (random_.once_in(8)) end.clerk();
      end.nic.step();
    }
  }
  void settle() {
    while (a.clerk() || b.clerk() || a.nic.step() || b.nic.step()) {
    }
  }
  std::uint8_t* inbox_of_a() { return inbox_[0].data(); }
  std::uint8_t* inbox_of_b() { return inbox_[1].data(); }

 private:
  using Bytes = std::vector<std::uint8_t>;
  Random random_;
  Bytes inbox_[2], staging_[2];

 public:
  u64 abort = 0;
  End a, b;
  std::function<void()> beside;  // what other processors do meanwhile
};

inline Shape shape(u64 slots, u64 slot_bytes, u64 zero = 0, u64 index = 0, u64 completed = 0) {
  return {{slots, slot_bytes}, {slots, slot_bytes}, 0x123456, 8, 8, zero, index, completed};
}

// The n-th payload word of a message, and its length: functions of the message alone.
inline u64 pattern(u64 message, u64 word) { return (message + 1) * 0x9e3779b97f4a7c15 + word; }
inline u64 length(u64 message, u64 slot_bytes) { return pattern(message, 77) % (slot_bytes / 8 + 1) * 8; }

// Send the next message if there is room for it now.
template <class E>
bool send(E& end) {
  auto& c = end.channel;
  Status status = mlx5::wait_slot(end.bus, c, 0);
  if (status == mlx5::kTimeout) return false;
  CHECK(status == mlx5::kOk);
  const u64 n = c.granted++, bytes = length(n, c.out.bytes);
  CHECK(c.granted - c.credited <= c.out.count);
  auto* payload = reinterpret_cast<u64*>(mlx5::payload_of(c, n));
  for (u64 i = 0; i < bytes / 8; ++i) end.bus.put(payload + i, pattern(n, i));
  const u64 tag[5] = {n, ~n, 3, 4, 0xbad};
  for (int tries = 0; (status = publish(end.bus, c, bytes, tag)) == mlx5::kPending; ++tries) {
    CHECK(tries < 100'000);
    end.bus.rest(32);
  }
  CHECK(status == mlx5::kOk);
  return true;
}

// Receive and check the next message if there is one now.
template <class E>
bool receive(E& end) {
  auto& c = end.channel;
  Status status = mlx5::wait_message(end.bus, c, 0);
  if (status == mlx5::kTimeout) return false;
  CHECK(status == mlx5::kOk);
  const u64 n = c.received;
  mlx5::Header header = {};
  const mlx5::u8* payload;
  CHECK(mlx5::take(end.bus, c, &header, &payload) == mlx5::kOk);
  CHECK(header.seqno == c.zero + n + 1 && header.length == length(n, c.in.bytes));
  CHECK(header.unused[0] == 0);
  for (const u64 at : {6, 7}) CHECK(end.bus.load(reinterpret_cast<const u64*>(payload) - 8 + at) == 0);
  CHECK(header.tag[0] == n && header.tag[1] == ~n && header.tag[2] == 3 && header.tag[3] == 4);
  const u64* words = reinterpret_cast<const u64*>(payload);
  for (u64 i = 0; i < header.length / 8; ++i) CHECK(end.bus.load(words + i) == pattern(n, i));
  give_back(end.bus, c, c.received);
  return true;
}

// Messages that were taken and not given back are reported by nothing: `told` is called once, when one of two messages
// is free.
template <class E>
void keep_one(E& from, E& to, const std::function<void()>& settle, const std::function<void()>& told) {
  CHECK(send(from) && send(from));
  settle();
  mlx5::Header header;
  const mlx5::u8* payload;
  for (int n = 0; n < 2; ++n) {
    CHECK(mlx5::wait_message(to.bus, to.channel, 0) == mlx5::kOk);
    CHECK(mlx5::take(to.bus, to.channel, &header, &payload) == mlx5::kOk);
  }
  CHECK(report(to.bus, to.channel) == mlx5::kOk && to.channel.reported == 0);
  give_back(to.bus, to.channel, 1);
  told();
  settle();
  CHECK(to.channel.released == 1 && to.channel.reported == 1);
  CHECK(send(from) && !send(from));
}

inline void report(End& end) {
  const auto& c = end.channel;
  const bool news = c.reported != c.released;
  const u64 reserved = c.queue.reserved, credits = c.credits;
  const Status status = mlx5::report(end.bus, end.channel);
  CHECK(status == mlx5::kOk || status == mlx5::kPending);
  CHECK(c.queue.reserved == reserved + (news && status == mlx5::kOk));
  CHECK(c.credits - credits == c.queue.reserved - reserved);
}

inline void check_clean(const End& end, u64 first) {
  const Counters& n = end.nic.count;
  CHECK(end.nic.state() == State::rts && !end.nic.overrun && end.channel.queue.syndrome == 0);
  CHECK(n.refused == 0);
  CHECK(n.odd == 0);
  CHECK(n.executed == end.channel.queue.committed - first);
  CHECK((end.bus.system_fences + end.receiving.system_fences == 0) == (end.channel.queue.near || n.executed == 0));
  CHECK(n.doorbells == end.channel.queue.doorbells || (end.channel.queue.alternate == 0 && n.doorbells > 0));
}

// Both directions at once, until each side has sent `messages`; everything is verified on arrival.
inline Counters traffic(const char* name, u64 messages, Shape a, Shape b, Adversary adversary, u64 seed) {
  g_scenario = name;
  Pair pair(a, b, adversary, seed);
  Random random{seed + 30};
  End* ends[] = {&pair.a, &pair.b};
  u64 idle = 0;
  while (pair.a.channel.received < messages || pair.b.channel.received < messages) {
    End& end = *ends[random.below(2)];
    bool moved = false;
    if (end.channel.granted < messages && random.once_in(2))
      moved = send(end);
    else if (end.channel.received < messages)
      moved = receive(end);
    if (random.once_in(2)) report(end);
    pair.move();
    idle = moved ? 0 : idle + 1;
    CHECK(idle < 20'000);
  }
  pair.settle();
  for (End* end : ends) {
    report(*end);
    pair.settle();
    CHECK(mlx5::flush(end->bus, end->channel, &pair.abort, kLongNs) == mlx5::kOk);
  }
  check_clean(pair.a, a.index);
  check_clean(pair.b, b.index);
  Counters sum;
  for (End* end : ends) {
    sum.doorbells += end->nic.count.doorbells;
    sum.stale += end->nic.count.stale;
    sum.executed += end->nic.count.executed;
    sum.completions += end->nic.count.completions;
  }
  return sum;
}

}  // namespace lamina::nic_model
