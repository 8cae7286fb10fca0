// Credits that ride on messages, and those that have to go by themselves: counted, and with kernels that receive while
// others send.
#pragma once

#include "soft_nic/pair.h"

namespace lamina::nic_model {

// Receives what must be there soon, and gives it back as kernels do.
template <class P, class E>
void receive_due(P& pair, E&& end) {
  for (u64 tries = 0; !receive(end); ++tries) {
    CHECK(tries < 10'000);
    pair.move();
  }
  Status status;
  while ((status = report_due(end.bus, end.channel)) == mlx5::kPending) pair.move();
  CHECK(status == mlx5::kOk);
}

template <class P, class E>
void send_due(P& pair, E&& end) {
  for (u64 tries = 0; !send(end); ++tries) {
    CHECK(tries < 10'000);
    pair.move();
  }
}

// Layers of a decode step, over the slots that so many batches are given: a memory worker takes Q, K and V of all, then
// it sends its first O. A layer of a batch takes the six work requests of its three messages, and no seventh.
inline void steps(u64 batches, u64 layers, Shape a, Shape b, u64 seed) {
  g_scenario = "the work requests of a layer";
  Pair pair(a, b, {true, true, false}, seed);
  for (u64 layer = 0; layer < layers; ++layer) {
    for (u64 n = 0; n < 2 * batches; ++n) send_due(pair, pair.a);
    for (u64 n = 0; n < 2 * batches; ++n) receive_due(pair, pair.b);
    for (u64 n = 0; n < batches; ++n) send_due(pair, pair.b);
    for (u64 n = 0; n < batches; ++n) receive_due(pair, pair.a);
  }
  pair.settle();
  CHECK(pair.a.nic.count.executed == 4 * batches * layers && pair.b.nic.count.executed == 2 * batches * layers);
  CHECK(pair.a.channel.credits == 0 && pair.b.channel.credits == 0);
  check_clean(pair.a, a.index);
  check_clean(pair.b, b.index);
}

// A peer to which nothing is sent: its credits go in as few requests as it needs in order never to wait for long.
inline void one_way(u64 slots, u64 seed) {
  g_scenario = "credits where nothing goes back";
  Pair pair(shape(slots, 64, 7ull << 48, 0xffc0), shape(slots, 64, 7ull << 48, 0xffc0), {true, true, false}, seed);
  const u64 messages = 40 * slots, most = mlx5::untold_most(pair.b.channel.in);
  CHECK(most < slots && (slots < 3 || most > 0));
  for (u64 n = 0; n < messages; ++n) {
    if (n % 3 == 0 && pair.b.channel.received < n) receive_due(pair, pair.b);
    for (u64 tries = 0; !send(pair.a); ++tries) {  // full: what is there is taken until it is heard of
      CHECK(tries < 10'000);
      pair.move();
      if (pair.b.channel.received < n) receive_due(pair, pair.b);
    }
    CHECK(pair.b.channel.released - pair.b.channel.reported <= most);
  }
  while (pair.b.channel.received < messages) receive_due(pair, pair.b);
  pair.settle();
  CHECK(pair.b.channel.credits == messages / (most + 1) && pair.b.nic.count.executed == pair.b.channel.credits);
  CHECK(pair.a.nic.count.executed == 2 * messages && pair.a.channel.credits == 0);
  // An end that goes on by other means, such as a host, gets the rest at once.
  report(pair.b);
  pair.settle();
  for (u64 n = 0; n < slots; ++n) CHECK(send(pair.a));
  CHECK(!send(pair.a));
  pair.settle();
  check_clean(pair.a, 0xffc0);
  check_clean(pair.b, 0xffc0);
}

// The credit that a message brings is the peer's, whatever the message: it frees a slot, once.
inline void ridden() {
  g_scenario = "a credit on a message";
  Pair pair(shape(4, 64, 3ull << 48), shape(4, 64, 3ull << 48), {}, 5);
  for (int n = 0; n < 4; ++n) CHECK(send(pair.a));
  CHECK(!send(pair.a));
  pair.settle();
  CHECK(receive(pair.b) && receive(pair.b));
  CHECK(report_due(pair.b.bus, pair.b.channel) == mlx5::kOk && pair.b.channel.credits == 0);
  CHECK(send(pair.b));
  CHECK(pair.b.channel.reported == 2 && pair.b.channel.credits == 0);
  pair.settle();
  CHECK(send(pair.a) && send(pair.a) && !send(pair.a));
  CHECK(report(pair.b.bus, pair.b.channel) == mlx5::kOk && pair.b.channel.credits == 0);  // nothing is new
  CHECK(receive(pair.a));
}

// By each way to tell it.
inline void kept() {
  g_scenario = "a message that is still read";
  for (int way = 0; way < 3; ++way) {
    Pair pair(shape(2, 64), shape(2, 64), {}, 8);
    keep_one<End>(
        pair.a, pair.b, [&] { pair.settle(); },
        [&] {
          CHECK(way == 2 ? send(pair.b)
                         : (way ? report_due(pair.b.bus, pair.b.channel) : mlx5::report(pair.b.bus, pair.b.channel)) ==
                               mlx5::kOk);
        });
    CHECK(pair.b.channel.credits == (way < 2));
  }
  Pair pair(shape(3, 64), shape(3, 64), {}, 8);  // of which one may be left to a message, given back or not
  CHECK(send(pair.a) && send(pair.a));
  pair.settle();
  CHECK(receive(pair.b));
  pair.b.channel.received += 1;
  CHECK(report_due(pair.b.bus, pair.b.channel) == mlx5::kOk && pair.b.channel.credits == 0);
}

// Two ends that both wait for a slot, which the other one has given back without a report.
inline void both_wait(u64 seed) {
  g_scenario = "both ends wait for a slot";
  const u64 zero = 3ull << 48;
  Pair pair(shape(4, 64, zero), shape(4, 64, zero), {}, seed);
  End* ends[] = {&pair.a, &pair.b};
  for (int n = 0; n < 4; ++n) CHECK(send(pair.a) && send(pair.b));
  pair.settle();
  for (End* end : ends) {
    for (int n = 0; n < 4; ++n) CHECK(receive(*end));
    report(*end);
  }
  pair.settle();
  const u64 &a = pair.a.channel.credits, &b = pair.b.channel.credits;
  CHECK(a == 1 && b == 1);
  CHECK(send(pair.a) && send(pair.b));
  pair.settle();
  for (End* end : ends) receive_due(pair, *end);
  CHECK(wait_slot_or_tell(pair.a.bus, pair.a.channel, kLongNs) == mlx5::kOk && a == 1);  // a free one is known
  for (int n = 0; n < 3; ++n) CHECK(send(pair.a));
  pair.settle();
  for (int n = 0; n < 3; ++n) CHECK(send(pair.b));
  pair.settle();
  CHECK(send(pair.a) && !send(pair.a));  // b has reported the first one
  pair.settle();
  for (End* end : ends) receive_due(pair, *end);
  CHECK(mlx5::wait_slot(pair.a.bus, pair.a.channel, 1000) == mlx5::kTimeout);
  CHECK(wait_slot_or_tell(pair.a.bus, pair.a.channel, 1000) == mlx5::kTimeout && a == 2);
  pair.settle();
  CHECK(wait_slot_or_tell(pair.b.bus, pair.b.channel, kLongNs) == mlx5::kOk && b == 1);
  CHECK(send(pair.b) && send(pair.b) && !send(pair.b));
  pair.settle();
  CHECK(wait_slot_or_tell(pair.a.bus, pair.a.channel, kLongNs) == mlx5::kOk && a == 2);
  pair.abort = 1;
  CHECK(wait_slot_or_tell(pair.b.bus, pair.b.channel, kLongNs) == mlx5::kAborted);
}

// A credit that is about to ride finds the queue dead, and so does one that goes by itself; none is noted as sent.
inline void dead(bool rides) {
  g_scenario = rides ? "a credit on a message of a dead queue" : "a credit for a dead queue";
  Pair pair(shape(1, 64), shape(1, 64), {}, 6);
  auto& c = pair.b.channel;
  pair.b.nic.peer_gone = true;
  CHECK(send(pair.b));
  pair.settle();
  CHECK(send(pair.a));
  pair.settle();
  CHECK(receive(pair.b));
  CHECK(mlx5::wait_slot(pair.b.bus, c, kLongNs) == mlx5::kFailed);
  while (c.queue.reserved - c.queue.completed < c.queue.blocks) c.queue.reserved += 1;  // a ring that is full
  const u64 tag[mlx5::kTagWords] = {};
  CHECK((rides ? publish(pair.b.bus, c, 0, tag) : report_due(pair.b.bus, c)) == mlx5::kFailed);
  CHECK(wait_slot_or_tell(pair.b.bus, c, kLongNs) == mlx5::kFailed);
  CHECK(c.reported == 0 && c.credits == 0 && c.published == 1);
}

// Kernels of both directions at once, at both ends: what a receive does may come at any moment of a send.
inline void beside(u64 messages, Shape a, Shape b, u64 seed) {
  g_scenario = "kernels that receive beside kernels that send";
  Pair pair(a, b, {true, true, false}, seed);
  for (End* end : {&pair.a, &pair.b}) end->split();
  Random random{seed + 60};
  bool busy = false;
  const auto turn = [&](End& end) {  // of the receiver, which leaves the queue alone while the sender holds it
    struct {
      WeakBus& bus;
      mlx5::Ends& channel;
    } half{end.receiving, end.channel};
    if (half.channel.received < messages) receive(half);
    if (end.channel.queue.held || random.once_in(4)) return;
    const Status status = report_due(half.bus, end.channel);
    CHECK(status == mlx5::kOk || status == mlx5::kPending);
  };
  pair.beside = [&] {
    if (busy || !random.once_in(4)) return;
    busy = true;
    turn(random.once_in(2) ? pair.a : pair.b);
    busy = false;
  };
  u64 idle = 0;
  while (pair.a.channel.received < messages || pair.b.channel.received < messages) {
    End& end = random.once_in(2) ? pair.a : pair.b;
    const u64 before = pair.a.channel.received + pair.b.channel.received;
    const bool moved = end.channel.granted < messages && send(end);
    pair.move();
    idle = moved || before != pair.a.channel.received + pair.b.channel.received ? 0 : idle + 1;
    CHECK(idle < 20'000);
  }
  pair.settle();
  check_clean(pair.a, a.index);
  check_clean(pair.b, b.index);
  for (const End* end : {&pair.a, &pair.b}) {
    CHECK(end->nic.count.executed == 2 * messages + end->channel.credits);
    CHECK(end->channel.credits < messages);
  }
}

inline void credits(u64 seed) {
  ridden();
  for (u64 part = 0; part < 16; ++part) both_wait(seed + part);
  kept();
  for (const bool rides : {false, true}) dead(rides);
  for (u64 slots = 1; slots <= 9; ++slots) one_way(slots, seed + slots);
  for (u64 batches = 1; batches <= 3; ++batches) {
    const u64 slots = 3 * batches + 1;
    for (const u64 index : {u64(0), u64(0xff80), u64(0xffffff80)}) {
      Shape x = shape(slots, 64, 65535ull << 48, index, index);
      x.blocks = x.cqes = 64;
      steps(batches, 60, x, x, seed + batches);
    }
  }
  for (u64 part = 0; part < 6; ++part)
    beside(400, shape(1 + part, 24 * part, 0, 0xff80), shape(1 + part, 24 * part, 0, 0xffc0), seed + 70 + part);
}

}  // namespace lamina::nic_model
