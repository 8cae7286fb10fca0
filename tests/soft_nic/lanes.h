// Channels of two lanes: Q and O by the first, bulk from a to b by a queue pair of its own. Nothing orders the two
// NICs' work. Processors that send run together with those that receive, of which each uses both lanes.
#pragma once

#include <array>

#include "soft_nic/credits.h"

namespace lamina::nic_model {

// A lane, as one processor uses it.
struct Half {
  WeakBus& bus;
  mlx5::Channel& channel;
};

class LanedEnd {
 public:
  LanedEnd(const Shape& first, const Shape& bulk, const u64* abort, Adversary adversary, u64 seed,
           const std::function<void()>& world)
      : pairs{{first, &readers_, adversary, seed}, {bulk, &readers_, adversary, seed + 5}}, lanes{},
        sending_(&pairs[0].nic, pairs[0].registers(), seed + 1, world),
        receiving_(&pairs[0].nic, pairs[0].registers(), seed + 3, world) {
    readers_.all = {&sending_, &receiving_};
    sending_.tell(&receiving_);
    receiving_.join(sending_);
    receiving_.tell(&sending_);
    for (const u64 lane : {0, 1}) {
      const Shape& shape = lane ? bulk : first;
      mlx5::Channel& c = lanes[lane];
      inbox_[lane].resize(shape.in.inbox_bytes());
      staging_[lane].resize(shape.out.inbox_bytes());
      open_inbox(inbox_[lane].data(), shape.zero);
      static_cast<mlx5::Ends&>(c) = {
          staging_[lane].data(), inbox_[lane].data(), abort, shape.out, shape.in, shape.zero, 0, 0, 0, 0, 0, 0};
      c.queue = pairs[lane].queue();
      c.source = {End::kStagingAddress, Keys{}.staging};
      c.lane = lane ? mlx5::kBulk : mlx5::kFirst;
      pairs[lane].nic.local.push_back(
          {Keys{}.staging, End::kStagingAddress, shape.out.inbox_bytes(), staging_[lane].data(), false, nullptr});
      for (WeakBus* bus : {&sending_, &receiving_}) {
        bus->reach(&pairs[lane].nic, pairs[lane].registers());
        bus->own(staging_[lane].data(), staging_[lane].size());
        bus->own(&c, sizeof c);
        if (shape.near) pairs[lane].lie_near(bus);
      }
    }
  }
  LanedEnd(const LanedEnd&) = delete;

  // A lane's NIC knows the peer's inbox of that lane alone.
  void reach(LanedEnd& peer, u64 lane) {
    lanes[lane].peer = {kInboxB, 0xccdd00};
    std::vector<std::uint8_t>& inbox = peer.inbox_[lane];
    pairs[lane].nic.remote.push_back({0xccdd00, kInboxB, inbox.size(), inbox.data(), true, &peer.readers_});
  }

  Half sends(u64 lane) { return {sending_, lanes[lane]}; }
  Half receives(u64 lane) { return {receiving_, lanes[lane]}; }
  std::uint8_t* inbox(u64 lane) { return inbox_[lane].data(); }

 private:
  Observers readers_;
  std::vector<std::uint8_t> inbox_[2], staging_[2];

 public:
  QueuePair pairs[2];
  mlx5::Channel lanes[2];

 private:
  WeakBus sending_, receiving_;
};

constexpr u64 kUrgent = 0, kOfBulk = 1;

class LanedPair {
 public:
  // `a`, `b`: of the first lane; `bulk`: of the other one, from a to b.
  LanedPair(Shape a, Shape b, mlx5::Slots bulk, Adversary adversary, u64 seed)
      : random_{seed}, a(a, with(a, bulk, {}), &abort, adversary, seed + 10, [this] { move(); }),
        b(b, with(b, {}, bulk), &abort, adversary, seed + 20, [this] { move(); }) {
    this->a.reach(this->b, kUrgent);
    this->b.reach(this->a, kUrgent);
    this->a.reach(this->b, kOfBulk);
  }

  void move() {
    if (beside) beside();
    for (u64 n = random_.below(4); n; --n) {
      QueuePair& one = (random_.once_in(2) ? a : b).pairs[random_.below(2)];
      if (&one.nic != still) one.nic.step();
    }
  }
  void settle() {
    for (bool moves = true; moves;) {
      moves = false;
      for (LanedEnd* end : {&a, &b})
        for (QueuePair& one : end->pairs) moves = (&one.nic != still && one.nic.step()) || moves;
    }
  }
  // All that NICs have executed, by end and lane: {a, bulk of a, b, bulk of b}.
  std::array<u64, 4> executed() const {
    return {a.pairs[0].nic.count.executed, a.pairs[1].nic.count.executed, b.pairs[0].nic.count.executed,
            b.pairs[1].nic.count.executed};
  }

 private:
  static Shape with(Shape shape, mlx5::Slots out, mlx5::Slots in) {
    shape.out = out, shape.in = in, shape.number ^= 0x777;
    return shape;
  }
  Random random_;

 public:
  u64 abort = 0;
  const Nic* still = nullptr;  // which does nothing
  std::function<void()> beside;  // what other processors do meanwhile
  LanedEnd a, b;
};

inline void check_clean(const LanedEnd& end, u64 first) {
  for (const u64 lane : {0, 1}) {
    const Counters& n = end.pairs[lane].nic.count;
    const mlx5::Queue& q = end.lanes[lane].queue;
    CHECK(end.pairs[lane].nic.state() == State::rts && !end.pairs[lane].nic.overrun && q.syndrome == 0);
    CHECK(n.refused == 0 && n.odd == 0 && n.executed == q.committed - first && n.doorbells == q.doorbells);
  }
}

// As `steps` of credits.h: a layer takes the same six work requests, two of them by the other queue, and no seventh. K and
// V are waited for by their own count, so it does not matter which NIC is faster.
inline void laned_steps(u64 batches, u64 layers, Shape x, u64 seed) {
  g_scenario = "the work requests of a layer by two queues";
  LanedPair pair(x, x, {x.out.count, 40}, {true, true, false}, seed);
  for (u64 layer = 0; layer < layers; ++layer) {
    for (u64 n = 0; n < batches; ++n) {
      send_due(pair, pair.a.sends(kUrgent));
      send_due(pair, pair.a.sends(kOfBulk));
    }
    for (u64 n = 0; n < batches; ++n) {
      receive_due(pair, pair.b.receives(kUrgent));
      receive_due(pair, pair.b.receives(kOfBulk));
    }
    for (u64 n = 0; n < batches; ++n) send_due(pair, pair.b.sends(kUrgent));
    for (u64 n = 0; n < batches; ++n) receive_due(pair, pair.a.receives(kUrgent));
  }
  pair.settle();
  const u64 each = 2 * batches * layers;
  CHECK((pair.executed() == std::array<u64, 4>{each, each, each, 0}));
  CHECK(pair.a.lanes[0].credits + pair.b.lanes[0].credits == 0);
  check_clean(pair.a, x.index);
  check_clean(pair.b, x.index);
}

inline bool can_send(Half half) { return send(half); }
inline bool can_receive(Half half) { return receive(half); }

// A queue that stands still holds up its own messages alone, however many go by the other; then all of its own come.
inline void lane_held_up(u64 still, u64 seed) {
  g_scenario = "a lane that is held up";
  LanedPair pair(shape(3, 64), shape(3, 64), {3, 40}, {true, true, false}, seed);
  pair.still = &pair.a.pairs[still].nic;
  for (int n = 0; n < 3; ++n) CHECK(can_send(pair.a.sends(still)));
  CHECK(!can_send(pair.a.sends(still)));
  for (int n = 0; n < 40; ++n) {
    send_due(pair, pair.a.sends(1 - still));
    receive_due(pair, pair.b.receives(1 - still));
    CHECK(!can_receive(pair.b.receives(still)));
  }
  pair.still = nullptr;
  for (int n = 0; n < 3; ++n) receive_due(pair, pair.b.receives(still));
  CHECK(!can_receive(pair.b.receives(still)));
}

// Bulk to a peer that sends nothing: its credits go by the first lane's queue, in as few requests as by one_way.
inline void bulk_alone(u64 slots, u64 seed) {
  g_scenario = "credits of bulk where nothing goes back";
  LanedPair pair(shape(2, 64), shape(2, 64), {slots, 40}, {true, true, false}, seed);
  mlx5::Channel *first = pair.b.lanes, *bulk = pair.b.lanes + 1;
  const u64 messages = 20 * slots, most = mlx5::untold_most(bulk->in);
  for (u64 n = 0; n < messages; ++n) {
    for (u64 tries = 0; !can_send(pair.a.sends(kOfBulk)); ++tries) {
      CHECK(tries < 10'000);
      pair.move();
      if (bulk->received < n) receive_due(pair, pair.b.receives(kOfBulk));
    }
    CHECK(bulk->released - bulk->reported <= most);
  }
  while (bulk->received < messages) receive_due(pair, pair.b.receives(kOfBulk));
  pair.settle();
  const u64 credits = messages / (most + 1);
  CHECK((pair.executed() == std::array<u64, 4>{0, 2 * messages, credits, 0}));
  CHECK(first->credits == credits && bulk->credits == 0 && first->reported == 0);
  // An end that goes on by other means gets the rest at once, whichever lane that is about.
  Half rest = pair.b.receives(seed % 2);
  CHECK(report(rest.bus, rest.channel) == mlx5::kOk && bulk->reported == messages);
  CHECK(first->credits == credits + (messages % (most + 1) != 0));
  pair.settle();
  for (u64 n = 0; n < slots; ++n) CHECK(can_send(pair.a.sends(kOfBulk)));
  CHECK(!can_send(pair.a.sends(kOfBulk)));
  pair.settle();
  check_clean(pair.a, 0);
}

// A message of the first lane brings both credits, each of which frees slots of its own lane, once.
inline void ridden_lanes(u64 seed) {
  g_scenario = "two credits on a message";
  LanedPair pair(shape(4, 64, 3ull << 48), shape(4, 64, 3ull << 48), {4, 40}, {}, seed);
  for (const u64 lane : {kUrgent, kOfBulk}) {
    for (int n = 0; n < 4; ++n) CHECK(can_send(pair.a.sends(lane)));
    CHECK(!can_send(pair.a.sends(lane)));
  }
  pair.settle();
  receive_due(pair, pair.b.receives(kUrgent));
  for (int n = 0; n < 2; ++n) receive_due(pair, pair.b.receives(kOfBulk));
  CHECK(can_send(pair.b.sends(kUrgent)) && pair.b.lanes[0].credits == 0);
  CHECK(pair.b.lanes[0].reported == 1 && pair.b.lanes[1].reported == 2);
  pair.settle();
  CHECK(can_send(pair.a.sends(kUrgent)) && !can_send(pair.a.sends(kUrgent)));
  CHECK(can_send(pair.a.sends(kOfBulk)) && can_send(pair.a.sends(kOfBulk)) && !can_send(pair.a.sends(kOfBulk)));
  for (const u64 lane : {kUrgent, kOfBulk}) {  // nothing is new
    Half half = pair.b.receives(lane);
    CHECK(report(half.bus, half.channel) == mlx5::kOk && pair.b.lanes[0].credits == 0);
  }
}

// An end that waits for a slot of either lane has reported what it gave back of both: its peer may wait for that alone.
inline void lanes_wait(u64 seed) {
  g_scenario = "who waits for a slot of one lane tells of both";
  LanedPair pair(shape(4, 64), shape(4, 64), {4, 40}, {true, true, false}, seed);
  Half urgent = pair.a.sends(kUrgent), bulk = pair.a.sends(kOfBulk), back = pair.b.sends(kUrgent);
  const u64 &told_a = pair.a.lanes[0].credits, &told_b = pair.b.lanes[0].credits;
  for (int n = 0; n < 4; ++n) CHECK(send(back) && send(bulk));
  CHECK(!send(back) && !send(bulk));
  pair.settle();
  for (int n = 0; n < 2; ++n) receive_due(pair, pair.a.receives(kUrgent));
  CHECK(told_a == 0);
  CHECK(wait_slot_or_tell(bulk.bus, bulk.channel, 1000) == mlx5::kTimeout && told_a == 1);
  pair.settle();
  CHECK(send(back) && send(back) && !send(back));
  for (int n = 0; n < 2; ++n) receive_due(pair, pair.b.receives(kOfBulk));
  CHECK(told_b == 0);
  CHECK(wait_slot_or_tell(back.bus, back.channel, 1000) == mlx5::kTimeout && told_b == 1);
  pair.settle();
  CHECK(wait_slot_or_tell(bulk.bus, bulk.channel, kLongNs) == mlx5::kOk && told_a == 1);  // a free one is known
  CHECK(send(bulk) && send(bulk) && !send(bulk));
  CHECK(wait_slot_or_tell(urgent.bus, urgent.channel, kLongNs) == mlx5::kOk && told_a == 1);
}

// An end that waits by one lane hears of the other's failure: the answer to what was lost there never comes.
inline void lane_fails(u64 dead, u64 seed) {
  g_scenario = dead ? "bulk that cannot be delivered" : "a first lane that is dead";
  LanedPair pair(shape(2, 64), shape(2, 64), {2, 40}, {}, seed);
  pair.a.pairs[dead].nic.peer_gone = true;
  for (const u64 lane : {kUrgent, kOfBulk})
    for (int n = 0; n < 2; ++n) CHECK(can_send(pair.a.sends(lane)));
  Half answer = pair.a.receives(kUrgent);
  const u64 start = answer.bus.now_ns();
  CHECK(mlx5::wait_message(answer.bus, answer.channel, kLongNs) == mlx5::kFailed);
  CHECK(answer.bus.now_ns() - start < kLongNs / 2);
  for (const u64 lane : {kUrgent, kOfBulk}) {
    Half next = pair.a.sends(lane);
    CHECK(mlx5::wait_slot(next.bus, next.channel, kLongNs) == mlx5::kFailed);
    CHECK(wait_slot_or_tell(next.bus, next.channel, kLongNs) == mlx5::kFailed);
    CHECK(pair.a.lanes[lane].queue.syndrome == (lane == dead ? unsigned(kRetryExceeded) : 0u));
  }
  pair.settle();
  CHECK(mlx5::wait_message(pair.b.receives(1 - dead).bus, pair.b.lanes[1 - dead], 0) == mlx5::kOk);
}

// A lie about one lane's credit is a fault of that lane alone; none makes a slot of the other free.
inline void lane_lies() {
  const u64 zero = 9ull << 48;
  for (const u64 lane : {kUrgent, kOfBulk})
    for (const u64 credit : {zero - 1, zero + 3, ~0ull, u64(2)}) {
      g_scenario = "a credit of one lane";
      LanedPair pair(shape(2, 64, zero), shape(2, 64, zero), {2, 40}, {}, 8);
      for (const u64 each : {kUrgent, kOfBulk})
        for (int n = 0; n < 2; ++n) CHECK(can_send(pair.a.sends(each)));
      pair.settle();
      std::memcpy(pair.a.inbox(kUrgent) + (lane ? mlx5::kBulkCreditAt : mlx5::kCreditAt), &credit, sizeof credit);
      for (const u64 each : {kUrgent, kOfBulk}) {
        Half half = pair.a.sends(each);
        CHECK(mlx5::wait_slot(half.bus, half.channel, 1000) == (each == lane ? mlx5::kFault : mlx5::kTimeout));
        CHECK(half.channel.credited == 0);
      }
    }
  g_scenario = "bulk against its way";
  LanedPair pair(shape(2, 64, zero), shape(2, 64, zero), {2, 40}, {}, 8);
  Half back = pair.b.sends(kOfBulk), there = pair.a.receives(kOfBulk);
  CHECK(mlx5::wait_slot(back.bus, back.channel, 1000) == mlx5::kTimeout);
  CHECK(mlx5::wait_message(there.bus, there.channel, 1000) == mlx5::kTimeout);
}

// Kernels of both directions at once, at both ends, by both lanes: each message is what it has to be, of its lane.
inline void lanes_beside(u64 messages, Shape a, Shape b, mlx5::Slots bulk, u64 seed) {
  g_scenario = "kernels of two lanes, beside each other";
  LanedPair pair(a, b, bulk, {true, true, false}, seed);
  Random random{seed + 60};
  bool busy = false;
  const auto is_over = [=](const mlx5::Channel& c) { return c.received == messages; };
  const auto turn = [&](Half half) {  // of who receives, which leaves a queue alone while who sends holds it
    struct {
      WeakBus& bus;
      mlx5::Ends& channel;
    } ends{half.bus, half.channel};
    if (ends.channel.received < messages) receive(ends);
    if (first_of(half.channel).queue.held || random.once_in(4)) return;
    const Status status = report_due(half.bus, half.channel);
    CHECK(status == mlx5::kOk || status == mlx5::kPending);
  };
  const auto received = [&] { return pair.b.lanes[0].received + pair.b.lanes[1].received + pair.a.lanes[0].received; };
  Half halves[] = {pair.a.receives(kUrgent), pair.b.receives(kUrgent), pair.b.receives(kOfBulk)};
  pair.beside = [&] {
    if (busy || !random.once_in(4)) return;
    busy = true;
    turn(halves[random.below(3)]);
    busy = false;
  };
  Half senders[] = {pair.a.sends(kUrgent), pair.a.sends(kOfBulk), pair.b.sends(kUrgent)};
  for (u64 idle = 0; !is_over(pair.a.lanes[0]) || !is_over(pair.b.lanes[0]) || !is_over(pair.b.lanes[1]);) {
    Half& half = senders[random.below(3)];
    const u64 before = received();
    const bool moved = half.channel.granted < messages && send(half);
    pair.move();
    idle = moved || before != received() ? 0 : idle + 1;
    CHECK(idle < 20'000);
  }
  pair.settle();
  check_clean(pair.a, a.index);
  check_clean(pair.b, b.index);
  const u64 by_a = pair.a.lanes[0].credits, by_b = pair.b.lanes[0].credits, each = 2 * messages;
  CHECK((pair.executed() == std::array<u64, 4>{each + by_a, each, each + by_b, 0}));
}

inline void two_lanes(u64 seed) {
  ridden_lanes(seed);
  lane_lies();
  for (const u64 lane : {kUrgent, kOfBulk}) lane_fails(lane, seed);
  for (u64 part = 0; part < 8; ++part) lanes_wait(seed + part), lane_held_up(part % 2, seed + part);
  for (u64 slots = 1; slots <= 7; ++slots) bulk_alone(slots, seed + slots);
  for (u64 batches = 1; batches <= 3; ++batches) {
    Shape x = shape(3 * batches + 1, 64, 65535ull << 48, 0xff80, 0xff80);
    x.blocks = x.cqes = 64;
    laned_steps(batches, 40, x, seed + batches);
  }
  for (u64 part = 0; part < 6; ++part) {
    Shape a = shape(1 + part, 24 * part, 0, 0xff80), b = shape(1 + part, 24 * part, 0, 0xffc0);
    a.near = part % 2, b.near = part % 3 == 0;
    lanes_beside(300, a, b, {1 + part % 3, 40}, seed + 80 + part);
  }
}

}  // namespace lamina::nic_model
