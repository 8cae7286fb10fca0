// The distribution's libmlx5 as the oracle of mlx5.h, and of the software NIC: run with fake_mlx5.cpp preloaded.
//
// libmlx5 posts to a queue pair of its own, and mlx5.h posts the same to a copy of it in plain memory. After every post
// ring, record and registers are compared, and what each makes of the completions that the NIC has written. Then mlx5.h
// drives rings that libmlx5 has made, both directions at once. Prints what differed, or "equal".
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "netstack/mlx5_channel.h"
#include "netstack/verbs/formats.h"
#include "netstack/verbs/objects.h"
#include "soft_nic/nic.h"

extern "C" {
void fake_mlx5_hostile();
void fake_mlx5_run();
void fake_mlx5_silence(std::uint32_t number);
void fake_mlx5_counters(std::uint32_t number, std::uint64_t to[5]);
}

using namespace lamina;
using mlx5::u32;
using mlx5::u64;
using nic_model::Random;

namespace {

#define CHECK(truth)                                            \
  do {                                                          \
    if (!(truth)) {                                             \
      std::printf("line %d: not true: %s\n", __LINE__, #truth); \
      std::exit(1);                                             \
    }                                                           \
  } while (0)

constexpr u64 kBytes = 1 << 14;

// A queue pair as the product opens it, with its memory.
struct Opened {
  alignas(64) std::uint8_t staging[kBytes] = {}, inbox[kBytes] = {};
  verbs::End end;
  mlx5::Queue queue{};

  explicit Opened(u32 blocks) {
    const verbs::Port port{"mlx5_0", 1, 0, 0, 0, 0};
    if (!end.open(port, {staging, kBytes}, {inbox, kBytes}, verbs::depth_of(blocks)))
      std::printf("cannot %s\n", end.fault()), std::exit(1);
    std::string fault;
    verbs::Layout at;
    if (!verbs::lay_out(end.pair(), &at, &fault)) std::printf("cannot %s\n", fault.c_str()), std::exit(1);
    queue.ring = static_cast<mlx5::Wqe*>(at.ring), queue.completions = static_cast<mlx5::Cqe*>(at.completions);
    queue.record = static_cast<u32*>(at.record), queue.seen = static_cast<u32*>(at.seen);
    queue.doorbell = static_cast<u64*>(at.doorbell), queue.alternate = at.alternate;
    queue.number = at.number, queue.blocks = at.blocks, queue.cqes = at.cqes;
  }
  void meet(const Opened& peer) { CHECK(end.connect(peer.end.route(), peer.end.inbox())); }
  mlx5::Local source() const { return {reinterpret_cast<u64>(staging), end.staged(staging, 0).lkey}; }
  mlx5::Remote open_to_peer() const { return {end.inbox().address, end.inbox().key}; }
};

// A queue pair that libmlx5 drives, and what mlx5.h makes of the same posts in memory of its own.
class Twin {
 public:
  Twin(Opened& pair, const Opened& peer)
      : pair_(pair), real_(pair.queue), to_(peer.open_to_peer()), ring_(real_.blocks), completions_(real_.cqes) {
    ours_ = real_;
    ours_.ring = ring_.data(), ours_.record = record_, ours_.doorbell = registers_;
    ours_.completions = completions_.data(), ours_.seen = seen_;
    see();
  }

  // Room for so many work requests, as libmlx5 counts them.
  bool has_room(u32 count) const { return ours_.reserved + count - ours_.completed <= ours_.blocks / 4; }

  void message(u64 offset, u32 bytes, u64 seqno) {
    const mlx5::Words<3> three{{seqno, ~seqno, seqno + 1}};
    ibv_sge data = pair_.end.staged(pair_.staging + offset, bytes), words{reinterpret_cast<u64>(&three), 24, 0};
    ibv_send_wr first = work(&data, to_.address + offset, 0), second = work(&words, to_.address, kWord);
    first.next = &second;
    post(&first);
    const mlx5::Local from{pair_.source().address + offset, pair_.source().key};
    const mlx5::Put put{{to_.address + offset, to_.key}, from, bytes, to_, three};
    CHECK(mlx5::put_signal(bus_, ours_, put) == mlx5::kOk);
    compare(2);
  }
  void credits(u64 value) {
    const mlx5::Words<2> two{{value, ~value}};
    ibv_sge piece{reinterpret_cast<u64>(&two), 16, 0};
    ibv_send_wr one = work(&piece, to_.address + 8, kWord);
    post(&one);
    CHECK(mlx5::put_words(bus_, ours_, {to_.address + 8, to_.key}, two) == mlx5::kOk);
    compare(1);
  }
  // What has completed, by both: libmlx5's words for it.
  ibv_wc_status poll() {
    see();
    ibv_wc done;
    ibv_wc_status status = IBV_WC_SUCCESS;
    for (;;) {
      const int count = ibv_poll_cq(pair_.end.pair()->send_cq, 1, &done);
      const mlx5::Status ours = mlx5::poll_cq(bus_, ours_);
      CHECK(count == 0 || count == 1);
      if (count == 0) {
        CHECK(ours == mlx5::kPending || (ours == mlx5::kFailed && status != IBV_WC_SUCCESS));
        break;
      }
      if (status == IBV_WC_SUCCESS) status = done.status;
      CHECK(done.qp_num == ours_.number);
      CHECK((done.status == IBV_WC_SUCCESS) == (ours == mlx5::kOk));
      if (done.status == IBV_WC_SUCCESS) CHECK(done.opcode == IBV_WC_RDMA_WRITE && done.wr_id + 1 == ours_.completed);
    }
    CHECK(seen_[0] == real_.seen[0]);
    return status;
  }
  u32 syndrome() const { return ours_.syndrome; }
  u64 posted() const { return ours_.committed; }

 private:
  enum Kind { kData, kWord };

  ibv_send_wr work(ibv_sge* piece, u64 at, int kind) {
    ibv_send_wr wr{};
    wr.wr_id = next_++;
    wr.sg_list = piece, wr.num_sge = 1;
    wr.opcode = IBV_WR_RDMA_WRITE;
    wr.send_flags = kind == kWord ? IBV_SEND_INLINE | IBV_SEND_SIGNALED : 0;
    wr.wr.rdma.remote_addr = at, wr.wr.rdma.rkey = to_.key;
    return wr;
  }
  void post(ibv_send_wr* first) {
    ibv_send_wr* bad;
    CHECK(ibv_post_send(pair_.end.pair(), first, &bad) == 0);
  }
  // The last `count` requests, of which libmlx5 leaves unwritten what no segment has. Also the record and both
  // registers.
  void compare(u64 count) {
    for (u64 i = ours_.committed - count; i != ours_.committed; ++i) {
      const auto &ours = ring_[i % ours_.blocks], &theirs = real_.ring[i % ours_.blocks];
      const u32 head = mlx5::be32(ours.word[8]);  // the top bit: what follows is the data
      CHECK(std::memcmp(&ours, &theirs, head >> 31 ? 36 + (head & 0x3ff) : 48) == 0);
    }
    CHECK(record_[0] == 0 && real_.record[0] == 0 && record_[1] == real_.record[1]);
    for (const u32 i : {0u, real_.alternate / 8}) CHECK(registers_[i] == real_.doorbell[i]);
  }
  // The NIC's completions are ours too.
  void see() { std::memcpy(completions_.data(), real_.completions, real_.cqes * sizeof(mlx5::Cqe)); }

  Opened& pair_;
  mlx5::Queue real_;
  const mlx5::Remote to_;
  mlx5::Queue ours_;
  mlx5::Bus bus_;
  std::vector<mlx5::Wqe> ring_;
  std::vector<mlx5::Cqe> completions_;
  u32 record_[2] = {}, seen_[2] = {};
  u64 registers_[128] = {}, next_ = 0;
};

void same_posts(u64 requests) {
  Opened a(32), b(32);
  a.meet(b), b.meet(a);
  CHECK(a.queue.blocks == 32 && a.queue.cqes >= 32 && a.queue.alternate == 256);
  Twin twin(a, b);
  Random random{3};
  while (twin.posted() < requests) {
    const u64 value = random.next(), offset = 64 + 8 * random.below(64);
    if (twin.has_room(2) && random.once_in(2)) {
      std::memcpy(a.staging + offset, &value, 8);
      twin.message(offset, u32(8 + 8 * random.below(200)), value);
    } else if (twin.has_room(1)) {
      twin.credits(value);
    }
    if (random.once_in(4)) fake_mlx5_run();
    if (random.once_in(2)) CHECK(twin.poll() == IBV_WC_SUCCESS);
  }
  fake_mlx5_run();
  CHECK(twin.poll() == IBV_WC_SUCCESS);
  std::uint64_t count[5];
  fake_mlx5_counters(a.queue.number, count);
  CHECK(count[0] == twin.posted() && count[3] == 0);
  fake_mlx5_silence(a.queue.number);
  twin.message(64, 8, 1);
  fake_mlx5_run();
  CHECK(twin.poll() == IBV_WC_RETRY_EXC_ERR && twin.syndrome() == MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR);
}

// A peer that may not write there: the same words from both.
void same_refusal() {
  Opened a(8), b(8), c(8);
  a.meet(b), b.meet(a);
  Twin twin(a, c);  // whose memory is in another domain
  twin.credits(1);
  fake_mlx5_run();
  CHECK(twin.poll() == IBV_WC_REM_ACCESS_ERR && twin.syndrome() == MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR);
}

// Channels of ours on rings of libmlx5's: two lanes, that of bulk from the first end to the second.
void traffic(u64 messages) {
  const mlx5::Slots slots{3, 200};
  const u64 abort = 0;
  Opened opened[2][2] = {{Opened(16), Opened(16)}, {Opened(16), Opened(16)}};
  mlx5::Channel channels[2][2] = {};
  for (const int end : {0, 1})
    for (const int lane : {0, 1}) {
      Opened &own = opened[end][lane], &peer = opened[1 - end][lane];
      mlx5::Channel& c = channels[end][lane];
      own.meet(peer);
      const bool sends = !lane || !end, receives = !lane || end;
      static_cast<mlx5::Ends&>(c) = {
          own.staging, own.inbox, &abort, sends ? slots : mlx5::Slots{}, receives ? slots : mlx5::Slots{}, 0, 0, 0, 0,
          0,           0,         0};
      c.queue = own.queue, c.peer = peer.open_to_peer(), c.source = own.source();
      c.lane = lane ? mlx5::kBulk : mlx5::kFirst;
    }
  mlx5::Bus bus;
  Random random{5};
  const mlx5::Channel *a = channels[0], *b = channels[1];
  for (u64 idle = 0; a[0].received < messages || b[0].received < messages || b[1].received < messages; ++idle) {
    CHECK(idle < 1000);
    mlx5::Channel& c = channels[random.below(2)][random.below(2)];
    if (c.granted < messages && mlx5::wait_slot(bus, c, 0) == mlx5::kOk) {
      const u64 n = c.granted++, tag[mlx5::kTagWords] = {n, c.lane, 3, 4};
      std::memset(mlx5::payload_of(c, n), int((n + c.lane) & 0xff), 200);
      CHECK(mlx5::publish(bus, c, n % 201, tag) == mlx5::kOk);
    }
    if (random.once_in(2)) fake_mlx5_run();
    if (mlx5::wait_message(bus, c, 0) != mlx5::kOk) continue;
    mlx5::Header header;
    const mlx5::u8* payload;
    const u64 n = c.received;
    CHECK(mlx5::take(bus, c, &header, &payload) == mlx5::kOk && header.tag[0] == n && header.length == n % 201);
    CHECK(header.tag[1] == c.lane);
    for (u64 i = 0; i < header.length; ++i) CHECK(payload[i] == ((n + c.lane) & 0xff));
    mlx5::give_back(bus, c, c.received);
    CHECK(mlx5::report_due(bus, c) == mlx5::kOk);
    idle = 0;
  }
  for (const auto& end : opened)
    for (const Opened& each : end) {
      std::uint64_t count[5];
      fake_mlx5_counters(each.queue.number, count);
      CHECK(count[3] == 0);
      CHECK(&each != &opened[1][1] || count[0] == 0);  // the first queue reports the state of bulk
    }
  CHECK(a[0].credits < messages / 2 && b[0].credits < messages && a[1].credits == 0 && b[1].credits == 0);
}

}  // namespace

int main(int argc, char** argv) {
  const u64 requests = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 70'000;
  same_posts(requests);
  same_refusal();
  fake_mlx5_hostile();
  same_posts(requests / 10);
  traffic(requests / 10);
  std::puts("equal");
}
