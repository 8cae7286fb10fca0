// Runs mlx5.h and mlx5_channel.h against the software NIC: prove [POSTS [SEED]]. Exit status 0 and one line of
// counters, or 1 and the first thing that was wrong. tests/netstack/nic/test_nic_model.py and the mutants run it.
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <functional>

#include "soft_nic/lanes.h"
#include "soft_nic/memory.h"

using namespace lamina;
using namespace lamina::nic_model;

namespace {

constexpr Adversary kHostile{true, true, false};

mlx5::Words<1> word(u64 value) { return {{value}}; }

// A key or address that does not fit: the NIC says so, nothing of the peer's is touched, the queue stays dead.
void fault(const char* name, u64 seed, std::uint32_t syndrome, const std::function<void(Pair&)>& spoil) {
  g_scenario = name;
  Pair pair(shape(2, 64), shape(2, 64), {}, seed);
  spoil(pair);
  const std::vector<std::uint8_t> before(pair.inbox_of_b(), pair.inbox_of_b() + pair.b.channel.in.inbox_bytes());
  CHECK(send(pair.a));
  pair.settle();
  auto& q = pair.a.channel.queue;
  CHECK(mlx5::flush(pair.a.bus, pair.a.channel, &pair.abort, kLongNs) == mlx5::kFailed);
  CHECK(q.syndrome == syndrome);
  CHECK(pair.a.nic.state() == State::error);
  CHECK(std::memcmp(before.data(), pair.inbox_of_b(), before.size()) == 0);
  CHECK(mlx5::wait_message(pair.b.bus, pair.b.channel, 1000) == mlx5::kTimeout);
  for (int i = 0; i < 20; ++i) {  // later posts are flushed, and the first cause is kept
    const Status status = mlx5::put_words(pair.a.bus, q, {kInboxB, 0xccdd00}, word(1));
    CHECK(status == mlx5::kOk || (i >= 4 && status == mlx5::kFailed));
    pair.settle();
  }
  CHECK(mlx5::poll_cq(pair.a.bus, q) == mlx5::kFailed);
  CHECK(mlx5::flush(pair.a.bus, pair.a.channel, &pair.abort, kLongNs) == mlx5::kFailed);
  CHECK(q.syndrome == syndrome);
  CHECK(std::memcmp(before.data(), pair.inbox_of_b(), before.size()) == 0);
}

void faults(u64 seed) {
  using P = Pair&;
  fault("wrong remote key", seed, kRemoteAccess, [](P p) { p.a.channel.peer.key ^= 1; });
  fault("before the remote region", seed, kRemoteAccess, [](P p) { p.a.channel.peer.address -= 8192; });
  fault("behind the remote region", seed, kRemoteAccess, [](P p) { p.a.channel.peer.address += 4096; });
  fault("remote region one byte short", seed, kRemoteAccess,
        [](P p) { p.a.nic.remote[0].bytes = mlx5::kSlotsAt + sizeof(mlx5::Header) + length(0, 64) - 1; });
  fault("remote region not writable", seed, kRemoteAccess, [](P p) { p.a.nic.remote[0].remote_write = false; });
  fault("wrong local key", seed, kLocalProtection, [](P p) { p.a.channel.source.key ^= 1; });
  fault("local region one byte short", seed, kLocalProtection,
        [](P p) { p.a.nic.local[0].bytes = mlx5::kSlotsAt + sizeof(mlx5::Header) + length(0, 64) - 1; });
  fault("nobody acknowledges", seed, kRetryExceeded, [](P p) { p.a.nic.peer_gone = true; });
}

void region_fits_exactly() {
  g_scenario = "regions of exactly the bytes needed";
  Pair pair(shape(2, 64), shape(2, 64), {}, 6);
  pair.a.nic.local[0].bytes = pair.a.nic.remote[0].bytes = mlx5::kSlotsAt + sizeof(mlx5::Header) + length(0, 64);
  CHECK(send(pair.a));
  pair.settle();
  CHECK(receive(pair.b));
  check_clean(pair.a, 0);
}

// How wait_signal ends when no honest message comes.
void waits() {
  g_scenario = "waits";
  Pair pair(shape(4, 64, 5ull << 48), shape(4, 64, 5ull << 48), {}, 7);
  auto& bus = pair.b.bus;
  u64 word = 100, value = 0;
  CHECK(mlx5::wait_signal(bus, &word, 100, 104, &pair.abort, 0, &value) == mlx5::kTimeout);
  CHECK(bus.acquires == 1 && bus.rests == 0);
  for (u64 limit : {1000ull, 100'000ull}) {
    const u64 start = bus.now_ns(), polls = bus.acquires, rests = bus.rests;
    CHECK(mlx5::wait_signal(bus, &word, 100, 104, &pair.abort, limit, &value) == mlx5::kTimeout);
    const u64 took = bus.now_ns() - start, looks = bus.rests - rests + 1;  // the last one ends it
    CHECK(took >= limit && took <= 2 * limit + 4 * WeakBus::kRestMostNs);
    CHECK(bus.acquires - polls == 64 * looks);
  }
  CHECK(bus.rests > 10 && bus.longest_rest == WeakBus::kRestMostNs);
  const u64 start = bus.now_ns();
  pair.abort = 1;
  CHECK(mlx5::wait_signal(bus, &word, 100, 104, &pair.abort, kLongNs, &value) == mlx5::kAborted);
  CHECK(mlx5::wait_message(bus, pair.b.channel, kLongNs) == mlx5::kAborted);
  CHECK(bus.now_ns() - start < kLongNs / 2);
  for (u64 ready : {101, 104}) {  // what has come is taken, aborted or not
    word = ready;
    CHECK(mlx5::wait_signal(bus, &word, 100, 104, &pair.abort, 0, &value) == mlx5::kOk && value == ready);
  }
  pair.abort = 0;
  for (u64 wrong : {99ull, 105ull, 0ull, ~0ull, 100ull + (1ull << 48)}) {
    word = wrong;
    CHECK(mlx5::wait_signal(bus, &word, 100, 104, &pair.abort, kLongNs, &value) == mlx5::kFault);
  }
  word = 1;  // across the end of the numbers
  CHECK(mlx5::wait_signal(bus, &word, ~0ull - 1, 2, &pair.abort, 0, &value) == mlx5::kOk && value == 1);
}

// A kernel that waits for what will never come hears of it from its own queue: the request failed that was to bring the
// answer, or the credit for it. A queue that works is asked as often, and answers nothing.
void broken_waits(u64 seed) {
  const auto wait_both = [](Pair& p, Status expected) {
    auto& end = p.a;
    const u64 start = end.bus.now_ns();
    CHECK(mlx5::wait_message(end.bus, end.channel, kLongNs) == expected);
    CHECK(mlx5::wait_slot(end.bus, end.channel, kLongNs) == expected);
    CHECK((end.bus.now_ns() - start < kLongNs / 2) == (expected == mlx5::kFailed));
    CHECK(mlx5::wait_message(end.bus, end.channel, 0) == expected);
  };
  for (const bool sound : {true, false}) {
    g_scenario = sound ? "waits on a queue that works" : "waits on a queue that has failed";
    Pair pair(shape(2, 64), shape(2, 64), {}, seed);
    pair.a.nic.peer_gone = !sound;
    CHECK(send(pair.a) && send(pair.a));
    wait_both(pair, sound ? mlx5::kTimeout : mlx5::kFailed);
    CHECK(pair.a.channel.queue.syndrome == (sound ? 0u : unsigned(kRetryExceeded)));
    CHECK(!sound || pair.a.channel.queue.completed == pair.a.channel.queue.committed);
  }
  g_scenario = "what has come is taken, whatever the queue says";
  Pair pair(shape(2, 64), shape(2, 64), {}, seed);
  CHECK(send(pair.b));
  pair.settle();
  pair.a.nic.peer_gone = true;
  CHECK(send(pair.a));
  pair.settle();
  CHECK(receive(pair.a));
  mlx5::Ends& ends = pair.a.channel;  // who may not poll the queue
  CHECK(mlx5::wait_message(pair.a.bus, ends, 1000) == mlx5::kTimeout);
  CHECK(mlx5::wait_message(pair.a.bus, pair.a.channel, 1000) == mlx5::kFailed);
  pair.abort = 1;
  CHECK(mlx5::wait_message(pair.a.bus, pair.a.channel, 1000) == mlx5::kAborted);
}

// A waiting end polls without a rest at first, and an abort at any time ends it before it has polled 64 times more.
void aborts() {
  g_scenario = "aborts";
  for (unsigned when = 0; when < 200; ++when) {
    u64 word = 100, value = 0, abort = 0;
    unsigned set_at = 0;
    WeakBus* self = nullptr;
    WeakBus bus(nullptr, nullptr, when, [&] {
      CHECK(self->acquires >= 64 || self->rests == 0);
      if (self->acquires < when || abort) return;
      abort = 1;
      set_at = self->acquires;
    });
    self = &bus;
    CHECK(mlx5::wait_signal(bus, &word, 100, 104, &abort, kLongNs, &value) == mlx5::kAborted);
    CHECK(abort == 1 && bus.acquires - set_at <= 64);
  }
}

// A peer that owns the key but not the manners: each lie about words and headers is a fault, never a message.
void lies() {
  const u64 zero = 9ull << 48;
  const auto lie = [&](const char* name, const std::function<void(Pair&)>& tell, bool to_sender) {
    g_scenario = name;
    Pair pair(shape(2, 64, zero), shape(2, 64, zero), {}, 8);
    CHECK(send(pair.a) && send(pair.a) && !send(pair.a));
    pair.settle();
    tell(pair);
    mlx5::Header header;
    const mlx5::u8* payload;
    if (to_sender) {
      CHECK(mlx5::wait_slot(pair.a.bus, pair.a.channel, 1000) == mlx5::kFault);
    } else if (mlx5::wait_message(pair.b.bus, pair.b.channel, 1000) == mlx5::kOk) {
      CHECK(mlx5::take(pair.b.bus, pair.b.channel, &header, &payload) == mlx5::kFault);
    }
    CHECK(pair.b.channel.received == 0 && pair.a.channel.credited == 0);
  };
  const auto set = [](std::uint8_t* at, u64 value) { std::memcpy(at, &value, 8); };
  const u64 slot = mlx5::kSlotsAt;
  for (u64 signal : {zero - 1, zero + 3, 8ull << 48 | 1})
    lie("signal", [=](Pair& p) { set(p.inbox_of_b() + mlx5::kSignalAt, signal); }, false);
  lie(
      "signal before the credit",
      [=](Pair& p) {
        auto& c = p.b.channel;
        mlx5::Header header;
        const mlx5::u8* payload;
        CHECK(mlx5::wait_message(p.b.bus, c, 0) == mlx5::kOk && mlx5::take(p.b.bus, c, &header, &payload) == mlx5::kOk);
        set(p.inbox_of_b() + mlx5::kSignalAt, zero + 3);
        CHECK(mlx5::wait_message(p.b.bus, c, 0) == mlx5::kFault);
        c.received = 0;
      },
      false);
  for (u64 seqno : {zero, zero + 2, 1ull})
    lie("header seqno", [=](Pair& p) { set(p.inbox_of_b() + slot, seqno); }, false);
  for (u64 bytes : {65ull, 1ull << 63, ~0ull})
    lie("header length", [=](Pair& p) { set(p.inbox_of_b() + slot + 8, bytes); }, false);
  for (u64 credit : {zero - 1, zero + 3, ~0ull, u64(2)})
    lie("credit", [=](Pair& p) { set(p.inbox_of_a() + mlx5::kCreditAt, credit); }, true);
}

// A peer's writes into the undefined words of a header stay in its slot.
void unused_words() {
  g_scenario = "unused words of a header";
  Pair pair(shape(2, 64), shape(2, 64), {}, 16);
  CHECK(send(pair.a));
  pair.settle();
  std::memset(pair.inbox_of_b() + mlx5::kSlotsAt + offsetof(mlx5::Header, unused), 0xff, sizeof(mlx5::Header::unused));
  mlx5::Header header = {};
  const mlx5::u8* payload;
  CHECK(mlx5::wait_message(pair.b.bus, pair.b.channel, 0) == mlx5::kOk);
  CHECK(mlx5::take(pair.b.bus, pair.b.channel, &header, &payload) == mlx5::kOk);
  CHECK(header.unused[0] == 0 && header.unused[1] == 0);
}

// A full ring says so at once, and goes on when completions come.
void full_ring() {
  g_scenario = "full ring";
  Pair pair(shape(2, 64), shape(2, 64), {}, 9);
  auto& q = pair.a.channel.queue;
  WeakBus still(&pair.a.nic, q.doorbell, 1, nullptr);  // the NIC sleeps
  for (u64 i = 0; i < q.blocks; ++i) CHECK(mlx5::put_words(still, q, {kInboxB + 512, 0xccdd00}, word(i)) == mlx5::kOk);
  u64 first = 77;
  for (u64 count : {1, 2, 8}) CHECK(mlx5::reserve(still, q, mlx5::u32(count), &first) == mlx5::kPending);
  const mlx5::Put put{{kInboxB + 4096, 0xccdd00}, pair.a.channel.source, 64, {kInboxB, 0xccdd00}, {{1}}};
  CHECK(mlx5::put_words(still, q, put.signal, word(1)) == mlx5::kPending);
  CHECK(mlx5::put_signal(still, q, put) == mlx5::kPending);
  CHECK(first == 77 && q.reserved == q.blocks && q.committed == q.blocks && q.doorbells == q.blocks);
  CHECK(still.rests == 0);
  const u64 start = still.now_ns();
  CHECK(mlx5::flush(still, pair.a.channel, &pair.abort, 1000) == mlx5::kTimeout);
  CHECK(still.now_ns() - start >= 1000 && still.now_ns() - start < 2000 && still.rests > 1);
  pair.abort = 1;
  CHECK(mlx5::flush(still, pair.a.channel, &pair.abort, kLongNs) == mlx5::kAborted);
  pair.abort = 0;
  while (q.polled == 0) {
    CHECK(pair.a.nic.step());
    if (mlx5::poll_cq(still, q) == mlx5::kOk) CHECK(q.completed == 1);
  }
  CHECK(mlx5::reserve(still, q, 1, &first) == mlx5::kOk && first == q.blocks);
  CHECK(mlx5::reserve(still, q, 1, &first) == mlx5::kPending || pair.a.nic.count.completions > 1);
  q.reserved = q.committed;
  pair.settle();
  CHECK(mlx5::flush(still, pair.a.channel, &pair.abort, 0) == mlx5::kOk);  // all that is there, however little time
}

// Credit for several slots is used slot by slot, without waiting for more.
void credit() {
  g_scenario = "credit";
  Pair pair(shape(2, 64), shape(2, 64), {}, 14);
  for (int round = 0; round < 3; ++round) {
    CHECK(send(pair.a) && send(pair.a) && !send(pair.a));
    pair.settle();
    CHECK(receive(pair.b) && receive(pair.b));
    report(pair.b);
    pair.settle();
  }
}

void layout() {
  g_scenario = "layout";
  for (u64 bytes : {0, 1, 63, 64, 65, 4096}) {
    const mlx5::Slots slots{3, bytes};
    CHECK(slots.stride() % 64 == 0 && slots.stride() >= 64 + bytes && slots.stride() < 128 + bytes);
    CHECK(slots.at(0) == 4096 && slots.at(4) == 4096 + slots.stride() && slots.at(5) == 4096 + 2 * slots.stride());
    CHECK(slots.inbox_bytes() == 4096 + 3 * slots.stride());
  }
}

// The bytes that the provider of rdma-core 59 wrote for the same two requests on the same queue pair.
void recorded_doorbell() {
  g_scenario = "recorded doorbell";
  Pair pair(shape(2, 64), shape(2, 64), {}, 15);
  auto& q = pair.a.channel.queue;
  WeakBus still(&pair.a.nic, q.doorbell, 1, nullptr);
  const mlx5::Put put{{kInboxB + 4096, 0xccdd00}, pair.a.channel.source, 64, {kInboxB, 0xccdd00}, {{1}}};
  CHECK(mlx5::put_signal(still, q, put) == mlx5::kOk);
  CHECK(big32(q.record) == 0 && big32(q.record + 1) == 2);
  const u64 rung = pair.a.nic.last_doorbell();
  CHECK(big32(&rung) == 0x00000108 && big32(reinterpret_cast<const char*>(&rung) + 4) == 0x12345604);
}

// Doorbells that no poster of ours rings: nothing happens, and later honest ones work.
void strange_doorbells() {
  g_scenario = "strange doorbells";
  Pair pair(shape(2, 64), shape(2, 64), {}, 10);
  CHECK(send(pair.a));
  pair.settle();
  auto& q = pair.a.channel.queue;
  const auto head = [&](u64 index, u64 number) {
    return u64(__builtin_bswap32(std::uint32_t(number << 8 | 3))) << 32 |
           __builtin_bswap32(std::uint32_t((index & 0xffff) << 8 | 8));
  };
  const u64 executed = pair.a.nic.count.executed;
  for (u64 index : {q.committed, q.committed + 7, q.committed - 1, u64(0)})
    pair.a.nic.doorbell(0, head(index, q.number));
  pair.a.nic.doorbell(0, head(q.committed, 0x999));
  q.record[1] = __builtin_bswap32(std::uint32_t(q.committed + 9));  // a window larger than the ring
  pair.a.nic.doorbell(0, head(q.committed + 8, q.number));
  pair.settle();
  CHECK(pair.a.nic.count.executed == executed && pair.a.nic.state() == State::rts);
  CHECK(pair.a.nic.count.refused == 4 && pair.a.nic.count.stale == 2);
  q.record[1] = __builtin_bswap32(std::uint32_t(q.committed));
  CHECK(send(pair.a));
  pair.settle();
  CHECK(receive(pair.b) && receive(pair.b));
}

// A queue that is not ready to send does nothing; once it is, the same post goes out.
void states() {
  g_scenario = "states";
  Pair pair(shape(2, 64), shape(2, 64), {}, 11);
  auto& nic = pair.a.nic;
  CHECK(!nic.modify(State::init) && nic.modify(State::reset) && !nic.modify(State::rts));
  CHECK(nic.modify(State::init) && nic.modify(State::rtr));
  CHECK(send(pair.a));
  pair.settle();
  CHECK(nic.count.executed == 0 && nic.count.refused == 1);
  CHECK(nic.modify(State::rts));
  CHECK(send(pair.a));
  pair.settle();
  CHECK(receive(pair.b) && receive(pair.b));
}

// Completions that answer nothing of ours are an error, not progress.
void bad_completions() {
  g_scenario = "bad completions";
  const auto tail = [](u64 counter, u64 opcode_owner) -> u64 {
    return __builtin_bswap64(0x123456ull << 32 | (counter & 0xffff) << 16 | opcode_owner);
  };
  const u64 index = 40;
  for (const u64 value : {tail(index + 1, 0x00), tail(index - 1, 0x00), tail(index + 0x8000, 0x00), tail(index, 0x10),
                          tail(index, 0xe0), tail(index, 0x20), tail(index, 0x00) ^ 1ull << 24}) {
    Pair pair(shape(2, 64, 0, index), shape(2, 64), {}, 12);
    auto& q = pair.a.channel.queue;
    WeakBus still(&pair.a.nic, q.doorbell, 1, nullptr);
    CHECK(mlx5::poll_cq(still, q) == mlx5::kPending);
    CHECK(mlx5::put_words(still, q, {kInboxB + 512, 0xccdd00}, word(1)) == mlx5::kOk);
    CHECK(mlx5::poll_cq(still, q) == mlx5::kPending);
    q.completions[0].word[7] = value;
    CHECK(mlx5::poll_cq(still, q) == mlx5::kFailed);
    CHECK(q.syndrome == mlx5::kBadCompletion && q.completed == index);
    CHECK(mlx5::flush(still, pair.a.channel, &pair.abort, kLongNs) == mlx5::kFailed);
  }
}

// Where writes may overtake each other, a signal comes before its data: such a network, or GPU, is none for mlx5.
void overtaking() {
  g_scenario = "writes that overtake each other";
  Pair pair(shape(2, 64), shape(2, 64), {true, false, true}, 13);
  auto& q = pair.a.channel.queue;
  auto* source = reinterpret_cast<u64*>(pair.a.channel.staging);
  u64 torn = 0, seen = 0;
  for (u64 n = 1; n <= 200; ++n) {
    for (u64 i = 0; i < 32; ++i) pair.a.bus.put(source + i, n);
    const mlx5::Put put{{kInboxB + 4096, 0xccdd00}, pair.a.channel.source, 256, {kInboxB, 0xccdd00}, {{n}}};
    CHECK(mlx5::put_signal(pair.a.bus, q, put) == mlx5::kOk);
    u64 value;
    CHECK(mlx5::wait_signal(pair.b.bus, mlx5::word_at(pair.inbox_of_b(), 0), seen, n, &pair.abort, kLongNs, &value) ==
          mlx5::kOk);
    seen = value;
    for (u64 i = 0; i < 32; ++i) torn += pair.b.bus.acquire(mlx5::word_at(pair.inbox_of_b(), 4096) + i) != n;
    CHECK(mlx5::flush(pair.a.bus, pair.a.channel, &pair.abort, kLongNs) == mlx5::kOk);
  }
  CHECK(torn > 0);
}

}  // namespace

int main(int argc, char** argv) {
  const u64 posts = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1'000'000;
  const u64 seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  waits();
  aborts();
  lies();
  unused_words();
  region_fits_exactly();
  for (u64 i = 0; i < 16; ++i) faults(i), broken_waits(i);
  full_ring();
  credit();
  layout();
  recorded_doorbell();
  strange_doorbells();
  states();
  bad_completions();
  overtaking();
  const u64 last_epoch = 65535ull << 48;
  traffic("large slots", 40, shape(3, 8192), shape(3, 8192), kHostile, seed);
  traffic("one slot of no bytes", 300, shape(1, 0), shape(1, 0), kHostile, seed);
  traffic("16-bit wrap", 300, shape(3, 64, last_epoch, 0xff80), shape(3, 64, last_epoch, 0xff81), kHostile, seed + 1);
  traffic("24-bit wrap of the completions", 300, shape(3, 64, 0, 0, 0xffff80), shape(3, 64, 0, 0, 0xffff87), kHostile,
          seed + 2);
  traffic("32-bit wrap", 300, shape(2, 136, 1, 0xffffff80, 0xffffff80), shape(2, 136, 1, 0xffffff8f, 0xffffff8f),
          kHostile, seed + 3);
  Shape proxied = shape(3, 64, 0, 0xff80);
  proxied.proxied = true;
  traffic("a proxy rings", 2000, proxied, shape(3, 64), kHostile, seed + 40);
  Shape near = shape(3, 64, last_epoch, 0xff80), far = shape(3, 64, last_epoch);
  near.near = true;
  traffic("rings in the GPU's memory", 2000, near, far, kHostile, seed + 41);
  near.proxied = true;
  traffic("rings in the GPU's memory, and a proxy", 2000, near, far, kHostile, seed + 42);
  credits(seed);
  two_lanes(seed);
  memory_lies();
  for (u64 part = 0; part < 6; ++part)
    for (const bool near : {false, true})
      memory_traffic(2000, 1 + part % 3, 24 * part, (part % 2 ? last_epoch : 0), seed + 50 + part, near);
  Counters sum;
  for (u64 part = 0; sum.doorbells < posts; ++part) {  // a post is a doorbell: a message or a credit
    const u64 slots = 1 + part % 4;
    const u64 left = posts - sum.doorbells;
    const u64 messages = 1 + (left < 400'000 ? left : 400'000) / 4;
    Shape a = shape(slots, 24 * (part % 3)), b = shape(2, 24);
    a.in = b.out;
    b.in = a.out;
    const Counters n = traffic("long run", messages, a, b, kHostile, seed + 4 + part);
    sum.doorbells += n.doorbells;
    sum.stale += n.stale;
    sum.executed += n.executed;
    sum.completions += n.completions;
  }
  std::printf("ok posts %llu wqes %llu completions %llu stale_doorbells %llu\n", u64(sum.doorbells), u64(sum.executed),
              u64(sum.completions), u64(sum.stale));
  return 0;
}
