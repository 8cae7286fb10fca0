// Runs mlx5.h and mlx5_channel.h against the software NIC: prove [POSTS [SEED]]. Exit status 0 and one line of
// counters, or 1 and the first thing that was wrong. tests/netstack/test_nic_model.py and the mutants run it.
#include <cstdio>
#include <cstdlib>

#include "netstack/nic_model/end.h"

using namespace lamina;
using namespace lamina::nic_model;
using mlx5::Status;
using u64 = mlx5::u64;

namespace {

const char* g_scenario = "";

#define CHECK(truth)                                                               \
  do {                                                                             \
    if (!(truth)) {                                                                \
      std::printf("%s: line %d: not true: %s\n", g_scenario, __LINE__, #truth);    \
      std::exit(1);                                                                \
    }                                                                              \
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
    this->a.reach({kInboxB, 0xccdd00}, inbox_[1].data(), &this->b.bus);
    this->b.reach({kInboxA, 0xccdd00}, inbox_[0].data(), &this->a.bus);
  }

  void move() {
    for (u64 n = random_.below(4); n; --n) (random_.once_in(2) ? a : b).nic.step();
  }
  void settle() {
    while (a.nic.step() || b.nic.step()) {
    }
  }
  std::uint8_t* inbox_of_a() { return inbox_[0].data(); }
  std::uint8_t* inbox_of_b() { return inbox_[1].data(); }

 private:
  using Bytes = std::vector<std::uint8_t>;
  Random random_;
  // 64-byte aligned enough: vectors of this size come from malloc at 16, and words need 8
  Bytes inbox_[2], staging_[2];

 public:
  u64 abort = 0;
  End a, b;
};

Shape shape(u64 slots, u64 slot_bytes, u64 zero = 0, u64 index = 0, u64 completed = 0) {
  return {{slots, slot_bytes}, {slots, slot_bytes}, 0x123456, 8, 8, zero, index, completed};
}

// The n-th payload word of a message, and its length: functions of the message alone.
u64 pattern(u64 message, u64 word) { return (message + 1) * 0x9e3779b97f4a7c15 + word; }
u64 length(u64 message, u64 slot_bytes) { return pattern(message, 77) % (slot_bytes / 8 + 1) * 8; }

// Send the next message if there is room for it now.
bool send(End& end) {
  auto& c = end.channel;
  Status status = mlx5::wait_slot(end.bus, c, 0);
  if (status == mlx5::kTimeout) return false;
  CHECK(status == mlx5::kOk);
  const u64 n = c.granted++, bytes = length(n, c.out.bytes);
  CHECK(c.granted - c.credited <= c.out.count);
  auto* payload = reinterpret_cast<u64*>(mlx5::payload_of(c, n));
  for (u64 i = 0; i < bytes / 8; ++i) end.bus.put(payload + i, pattern(n, i));
  const u64 tag[4] = {n, ~n, 3, 4};
  for (int tries = 0; (status = mlx5::publish(end.bus, c, bytes, tag)) == mlx5::kPending; ++tries) {
    CHECK(tries < 100'000);
    end.bus.rest(32);
  }
  CHECK(status == mlx5::kOk);
  return true;
}

// Receive and check the next message if there is one now.
bool receive(End& end) {
  auto& c = end.channel;
  Status status = mlx5::wait_message(end.bus, c, 0);
  if (status == mlx5::kTimeout) return false;
  CHECK(status == mlx5::kOk);
  const u64 n = c.received;
  mlx5::Header header;
  const mlx5::u8* payload;
  CHECK(mlx5::take(end.bus, c, &header, &payload) == mlx5::kOk);
  CHECK(header.seqno == c.zero + n + 1 && header.length == length(n, c.in.bytes));
  CHECK(header.tag[0] == n && header.tag[1] == ~n && header.tag[2] == 3 && header.tag[3] == 4);
  const u64* words = reinterpret_cast<const u64*>(payload);
  for (u64 i = 0; i < header.length / 8; ++i) CHECK(end.bus.load(words + i) == pattern(n, i));
  c.released += 1;
  return true;
}

void report(End& end) {
  const Status status = mlx5::report(end.bus, end.channel);
  CHECK(status == mlx5::kOk || status == mlx5::kPending);
}

void check_clean(const End& end, u64 first) {
  const Counters& n = end.nic.count;
  CHECK(end.nic.state() == State::rts && !end.nic.overrun && end.channel.queue.syndrome == 0);
  CHECK(n.refused == 0 && n.odd == 0);
  CHECK(n.executed == end.channel.queue.committed - first && n.doorbells == end.channel.queue.doorbells);
}

// Both directions at once, until each side has sent `messages`; everything is verified on arrival.
Counters traffic(const char* name, u64 messages, Shape a, Shape b, Adversary adversary, u64 seed) {
  g_scenario = name;
  Pair pair(a, b, adversary, seed);
  Random random{seed + 30};
  End* ends[] = {&pair.a, &pair.b};
  u64 idle = 0;
  while (pair.a.channel.received < messages || pair.b.channel.received < messages) {
    End& end = *ends[random.below(2)];
    bool moved = false;
    if (end.channel.granted < messages && random.once_in(2)) moved = send(end);
    else if (end.channel.received < messages) moved = receive(end);
    if (random.once_in(2)) report(end);
    pair.move();
    idle = moved ? 0 : idle + 1;
    CHECK(idle < 20'000);
  }
  pair.settle();
  for (End* end : ends) {
    report(*end);
    pair.settle();
    CHECK(mlx5::flush(end->bus, end->channel.queue, &pair.abort, kLongNs) == mlx5::kOk);
  }
  check_clean(pair.a, a.index);
  check_clean(pair.b, b.index);
  Counters n = pair.a.nic.count;
  n.doorbells += pair.b.nic.count.doorbells;
  n.stale += pair.b.nic.count.stale;
  n.executed += pair.b.nic.count.executed;
  n.completions += pair.b.nic.count.completions;
  return n;
}

constexpr Adversary kHostile{true, true, false};

// A key or address that does not fit: the NIC says so, nothing of the peer's is touched, the queue stays dead.
void fault(const char* name, std::uint32_t syndrome, const std::function<void(Pair&)>& spoil) {
  g_scenario = name;
  Pair pair(shape(2, 64), shape(2, 64), {}, 5);
  spoil(pair);
  const std::vector<std::uint8_t> before(pair.inbox_of_b(), pair.inbox_of_b() + pair.b.channel.in.inbox_bytes());
  CHECK(send(pair.a));
  pair.settle();
  auto& q = pair.a.channel.queue;
  CHECK(mlx5::flush(pair.a.bus, q, &pair.abort, kLongNs) == mlx5::kFailed);
  CHECK(q.syndrome == syndrome);
  CHECK(pair.a.nic.state() == State::error);
  CHECK(std::memcmp(before.data(), pair.inbox_of_b(), before.size()) == 0);
  CHECK(mlx5::wait_message(pair.b.bus, pair.b.channel, 1000) == mlx5::kTimeout);
  for (int i = 0; i < 20; ++i) {  // later posts are flushed, and the first cause is kept
    const Status status = mlx5::put_word(pair.a.bus, q, {kInboxB, 0xccdd00}, 1);
    CHECK(status == mlx5::kOk || (i >= 4 && status == mlx5::kFailed));
    pair.settle();
  }
  CHECK(mlx5::poll_cq(pair.a.bus, q) == mlx5::kFailed);
  CHECK(mlx5::flush(pair.a.bus, q, &pair.abort, kLongNs) == mlx5::kFailed);
  CHECK(q.syndrome == syndrome);
  CHECK(std::memcmp(before.data(), pair.inbox_of_b(), before.size()) == 0);
}

void faults() {
  using P = Pair&;
  fault("wrong remote key", kRemoteAccess, [](P p) { p.a.channel.peer.key ^= 1; });
  fault("before the remote region", kRemoteAccess, [](P p) { p.a.channel.peer.address -= 8192; });
  fault("behind the remote region", kRemoteAccess, [](P p) { p.a.channel.peer.address += 4096; });
  fault("remote region one byte short", kRemoteAccess, [](P p) {
    p.a.nic.remote[0].bytes = mlx5::kSlotsAt + sizeof(mlx5::Header) + length(0, 64) - 1;
  });
  fault("remote region not writable", kRemoteAccess, [](P p) { p.a.nic.remote[0].remote_write = false; });
  fault("wrong local key", kLocalProtection, [](P p) { p.a.channel.source.key ^= 1; });
  fault("local region one byte short", kLocalProtection, [](P p) {
    p.a.nic.local[0].bytes = mlx5::kSlotsAt + sizeof(mlx5::Header) + length(0, 64) - 1;
  });
  fault("nobody acknowledges", kRetryExceeded, [](P p) { p.a.nic.peer_gone = true; });
}

void region_fits_exactly() {
  g_scenario = "regions of exactly the bytes needed";
  Pair pair(shape(2, 64), shape(2, 64), {}, 6);
  pair.a.nic.local[0].bytes = pair.a.nic.remote[0].bytes =
      mlx5::kSlotsAt + sizeof(mlx5::Header) + length(0, 64);
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
  for (u64 limit : {1000ull, 100'000ull}) {
    const u64 start = bus.now_ns();
    CHECK(mlx5::wait_signal(bus, &word, 100, 104, &pair.abort, limit, &value) == mlx5::kTimeout);
    const u64 took = bus.now_ns() - start;
    CHECK(took >= limit && took <= 2 * limit + 4 * WeakBus::kRestMostNs);
  }
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
  for (u64 seqno : {zero, zero + 2, 1ull})
    lie("header seqno", [=](Pair& p) { set(p.inbox_of_b() + slot, seqno); }, false);
  for (u64 bytes : {65ull, 1ull << 63, ~0ull})
    lie("header length", [=](Pair& p) { set(p.inbox_of_b() + slot + 8, bytes); }, false);
  for (u64 credit : {zero - 1, zero + 3, ~0ull, u64(2)})
    lie("credit", [=](Pair& p) { set(p.inbox_of_a() + mlx5::kCreditAt, credit); }, true);
}

// A full ring says so at once, and goes on when completions come.
void full_ring() {
  g_scenario = "full ring";
  Pair pair(shape(2, 64), shape(2, 64), {}, 9);
  auto& q = pair.a.channel.queue;
  WeakBus still(pair.a.nic, q.doorbell, 1, nullptr);  // the NIC sleeps
  for (u64 i = 0; i < q.blocks; ++i) CHECK(mlx5::put_word(still, q, {kInboxB + 512, 0xccdd00}, i) == mlx5::kOk);
  u64 first = 77;
  for (u64 count : {1, 2, 8}) CHECK(mlx5::reserve(still, q, mlx5::u32(count), &first) == mlx5::kPending);
  CHECK(first == 77 && q.reserved == q.blocks && q.committed == q.blocks);
  CHECK(mlx5::flush(still, q, &pair.abort, 1000) == mlx5::kTimeout);
  pair.abort = 1;
  CHECK(mlx5::flush(still, q, &pair.abort, kLongNs) == mlx5::kAborted);
  pair.abort = 0;
  while (q.polled == 0) {
    CHECK(pair.a.nic.step());
    if (mlx5::poll_cq(still, q) == mlx5::kOk) CHECK(q.completed == 1);
  }
  CHECK(mlx5::reserve(still, q, 1, &first) == mlx5::kOk && first == q.blocks);
  CHECK(mlx5::reserve(still, q, 1, &first) == mlx5::kPending || pair.a.nic.count.completions > 1);
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
  for (u64 index : {q.committed, q.committed + 7, q.committed - 1, u64(0)}) pair.a.nic.doorbell(0, head(index, q.number));
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
  const auto tail = [](u64 counter, u64 opcode_owner) {
    return __builtin_bswap64(0x123456ull << 32 | (counter & 0xffff) << 16 | opcode_owner);
  };
  for (const u64 value : {tail(1, 0x00), tail(~0ull, 0x00), tail(0, 0x10), tail(0, 0xe0), tail(0, 0x20)}) {
    Pair pair(shape(2, 64), shape(2, 64), {}, 12);
    auto& q = pair.a.channel.queue;
    WeakBus still(pair.a.nic, q.doorbell, 1, nullptr);
    CHECK(mlx5::poll_cq(still, q) == mlx5::kPending);
    CHECK(mlx5::put_word(still, q, {kInboxB + 512, 0xccdd00}, 1) == mlx5::kOk);
    CHECK(mlx5::poll_cq(still, q) == mlx5::kPending);
    q.completions[0].word[7] = value;
    CHECK(mlx5::poll_cq(still, q) == mlx5::kFailed);
    CHECK(q.syndrome == mlx5::kBadCompletion && q.completed == 0);
    CHECK(mlx5::flush(still, q, &pair.abort, kLongNs) == mlx5::kFailed);
  }
}

// Where writes may overtake each other, one doorbell for both is wrong and waiting for the data is right.
u64 overtaken(bool fenced, u64 seed) {
  Pair pair(shape(2, 64), shape(2, 64), {true, false, true}, seed);
  auto& q = pair.a.channel.queue;
  auto* source = reinterpret_cast<u64*>(pair.a.channel.staging);
  u64 torn = 0, seen = 0;
  for (u64 n = 1; n <= 200; ++n) {
    for (u64 i = 0; i < 32; ++i) pair.a.bus.put(source + i, n);
    const mlx5::Put put{{kInboxB + 4096, 0xccdd00}, pair.a.channel.source, 256, {kInboxB, 0xccdd00}, n};
    const Status status = fenced ? mlx5::put_signal_fenced(pair.a.bus, q, put, &pair.abort, kLongNs)
                                 : mlx5::put_signal(pair.a.bus, q, put);
    CHECK(status == mlx5::kOk);
    u64 value;
    CHECK(mlx5::wait_signal(pair.b.bus, mlx5::word_at(pair.inbox_of_b(), 0), seen, n, &pair.abort, kLongNs, &value) ==
          mlx5::kOk);
    seen = value;
    for (u64 i = 0; i < 32; ++i) torn += pair.b.bus.load(mlx5::word_at(pair.inbox_of_b(), 4096) + i) != n;
    CHECK(mlx5::flush(pair.a.bus, q, &pair.abort, kLongNs) == mlx5::kOk);
  }
  return torn;
}

void overtaking() {
  g_scenario = "writes that overtake each other";
  CHECK(overtaken(false, 13) > 0);
  CHECK(overtaken(true, 13) == 0);
}

}  // namespace

int main(int argc, char** argv) {
  const u64 posts = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1'000'000;
  const u64 seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  waits();
  lies();
  region_fits_exactly();
  faults();
  full_ring();
  strange_doorbells();
  states();
  bad_completions();
  overtaking();
  const u64 last_epoch = 65535ull << 48;
  traffic("one slot of no bytes", 300, shape(1, 0), shape(1, 0), kHostile, seed);
  traffic("16-bit wrap", 300, shape(3, 64, last_epoch, 0xff80), shape(3, 64, last_epoch, 0xff81), kHostile, seed + 1);
  traffic("24-bit wrap of the completions", 300, shape(3, 64, 0, 0, 0xffff80), shape(3, 64, 0, 0, 0xffff87), kHostile,
          seed + 2);
  traffic("32-bit wrap", 300, shape(2, 136, 1, 0xffffff80, 0xffffff80), shape(2, 136, 1, 0xffffff8f, 0xffffff8f),
          kHostile, seed + 3);
  Counters n;
  u64 done = 0;
  for (u64 part = 0; done < posts; ++part) {  // a post is a doorbell: a message or a credit
    const u64 slots = 1 + part % 4;
    const u64 messages = 1 + (posts - done < 400'000 ? posts - done : 400'000) / 4;
    Shape a = shape(slots, 24 * (part % 3)), b = shape(2, 24);
    a.in = b.out;
    b.in = a.out;
    n = traffic("long run", messages, a, b, kHostile, seed + 4 + part);
    done += n.doorbells;
  }
  std::printf("ok posts %llu wqes_of_last_run %llu completions %llu stale %llu\n", done,
              static_cast<u64>(n.executed), static_cast<u64>(n.completions), static_cast<u64>(n.stale));
  return 0;
}
