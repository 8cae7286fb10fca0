// One reliable queue pair of one device, and all that its peer may access. It has its own context, protection domain and
// registered memory. So keys of other peers are useless here, and every asynchronous event belongs to this pair.
#pragma once

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>

#include "library.h"

namespace lamina::verbs {

constexpr std::uint64_t kWriteBytes = 1 << 20;  // the largest single write
// The maximum. Soft-RoCE takes it for "for ever", so each wait has its own deadline. With less, Soft-RoCE breaks if 2 % of
// packets are lost: every loss costs a retry until an acknowledgement arrives, one for 64 packets.
constexpr std::uint8_t kRetries = 7;
constexpr std::uint8_t kNotReadyRetries = 6;  // receives are posted for all that an honest peer sends: none is needed
constexpr std::uint8_t kNotReadyTimer = 12, kHops = 64;

// Which port of which device, and how the network is to treat what is sent.
struct Port {
  std::string device;
  std::uint8_t number;
  int gid_index;
  std::uint16_t pkey_index;
  std::uint8_t service_level, traffic_class;
  std::uint8_t ack_timeout = 14;  // 4.096 us * 2^14 = 67 ms until a packet is sent again
};

// The address of a queue pair.
struct Route {
  std::uint8_t gid[16];
  std::uint16_t lid;
  std::uint32_t number, psn, mtu;  // mtu: of ibv_mtu
};

// Memory of the peer that this side may write to.
struct Inbox {
  std::uint32_t key;
  std::uint64_t address;
};

// Memory of the caller that a NIC accesses: the host's, or, with the file of its export (dma-buf), another device's.
// `address`: by which peers name it. A device's without a file: its driver has registered it with the kernel (peer memory).
struct Piece {
  std::uint8_t* address;
  std::uint64_t bytes;
  int exported = -1;
};

// What a caller posts, and how many of each kind are under way at most.
struct Depth {
  std::uint32_t sends, receives, completions;
};

// What snprintf does; of no values, `words` are taken as they are.
template <class... Values>
void put_words(char* to, std::size_t room, const char* words, Values... values) {
  if constexpr (sizeof...(values) == 0)
    std::snprintf(to, room, "%s", words);
  else
    std::snprintf(to, room, words, values...);
}

inline const char* words_of(ibv_wc_status status) {
  switch (status) {
    case IBV_WC_WR_FLUSH_ERR: return "the queue pair was already broken";
    case IBV_WC_LOC_PROT_ERR: return "local memory is not registered";
    case IBV_WC_REM_ACCESS_ERR: return "the peer's memory is not open to us there";
    case IBV_WC_REM_INV_REQ_ERR: return "the peer's NIC refused the request";
    case IBV_WC_RETRY_EXC_ERR: return "the peer's NIC does not answer";
    case IBV_WC_RNR_RETRY_EXC_ERR: return "the peer has no receive posted";
    default: return nullptr;
  }
}

// Whether a queue pair is of no use after an event of its own device. A port that is down may come up again before anybody
// gives up.
inline bool ends_pair(ibv_event_type type) {
  switch (type) {
    case IBV_EVENT_CQ_ERR:
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_DEVICE_FATAL: return true;
    default: return false;
  }
}

class End {
 public:
  End() = default;
  End(const End&) = delete;
  virtual ~End() { End::close(); }

  // Opens everything, up to INIT with every receive posted. `staging` and `inbox` are registered and stay the caller's;
  // either may have no bytes. False with the cause in `fault`.
  bool open(const Port& port, const Piece& staging, const Piece& inbox, const Depth& depth) {
    return open_domain(port, staging, inbox) && open_queue(depth) && open_pair(depth);
  }

  // From here on both directions work, as soon as the peer has done the same. False with the cause in `fault`.
  virtual bool connect(const Route& peer, const Inbox& inbox) {
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_RTR;
    attr.path_mtu = static_cast<ibv_mtu>(std::min(route_.mtu, peer.mtu));
    attr.dest_qp_num = peer.number;
    attr.rq_psn = peer.psn;
    attr.min_rnr_timer = kNotReadyTimer;
    attr.ah_attr.is_global = 1;
    std::memcpy(attr.ah_attr.grh.dgid.raw, peer.gid, sizeof peer.gid);
    attr.ah_attr.grh.sgid_index = std::uint8_t(port_.gid_index);
    attr.ah_attr.grh.hop_limit = kHops;
    attr.ah_attr.grh.traffic_class = port_.traffic_class;
    attr.ah_attr.dlid = peer.lid;
    attr.ah_attr.sl = port_.service_level;
    attr.ah_attr.port_num = port_.number;
    constexpr int ready_to_receive = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    if (const int error = lib_.modify_qp(pair_, &attr, ready_to_receive))
      return fail("connect to the peer's queue pair from %s port %u: %s", name(), port_.number, text(error));
    attr.qp_state = IBV_QPS_RTS;
    attr.timeout = port_.ack_timeout;
    attr.retry_cnt = kRetries;
    attr.rnr_retry = kNotReadyRetries;
    attr.sq_psn = route_.psn;
    constexpr int ready_to_send =
        IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;
    if (const int error = lib_.modify_qp(pair_, &attr, ready_to_send))
      return fail("send to the peer's queue pair from %s port %u: %s", name(), port_.number, text(error));
    theirs_ = inbox;
    return true;
  }

  // Posts one write of `count` pieces to `at` bytes into the peer's inbox; 0, or an error number.
  int write(std::uint64_t request, ibv_sge* pieces, int count, std::uint64_t at) {
    return post(request, pieces, count, at, IBV_WR_RDMA_WRITE, 0, IBV_SEND_SIGNALED);
  }
  // One whose 32 bits complete a receive of the peer. `wakes`: also one that waits for such only.
  int signal(std::uint64_t request, ibv_sge* pieces, int count, std::uint64_t at, std::uint32_t word, bool wakes) {
    const unsigned flags = wakes ? IBV_SEND_SIGNALED | IBV_SEND_SOLICITED : IBV_SEND_SIGNALED;
    return post(request, pieces, count, at, IBV_WR_RDMA_WRITE_WITH_IMM, word, flags);
  }
  // Room for one more word of the peer; 0, or an error number.
  int receive() {
    ibv_recv_wr work{}, *bad;
    return ibv_post_recv(pair_, &work, &bad);
  }
  ibv_sge staged(const std::uint8_t* data, std::uint64_t bytes) const {
    return {reinterpret_cast<std::uintptr_t>(data), std::uint32_t(bytes), staging_key()};
  }

  // What has completed, at most `most`; negative where the device cannot say.
  int poll(ibv_wc* done, int most) { return ibv_poll_cq(queue_, most, done); }
  // Makes `events_fd` readable with the next completion, or with the next that `wakes`; 0, or an error number.
  int arm(bool wakers_only) { return ibv_req_notify_cq(queue_, wakers_only); }
  // Takes what made `events_fd` readable; whether there was something.
  bool disarm() {
    ibv_cq* queue;
    void* unused;
    bool any = false;
    for (; lib_.get_cq_event(events_, &queue, &unused) == 0; any = true) lib_.ack_cq_events(queue, 1);
    return any;
  }
  // The next asynchronous event of this pair's, its queue's, its port's or the device's; false where there is none.
  virtual bool event(ibv_event_type* type) {
    ibv_async_event event;
    if (lib_.get_async_event(context_, &event)) return false;
    *type = event.event_type;
    lib_.ack_async_event(&event);
    return true;
  }
  const char* words(ibv_event_type type) const { return lib_.event_type_str(type); }

  // Nothing is sent or written here any more; all that is under way completes with an error.
  virtual void halt() {
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_ERR;
    lib_.modify_qp(pair_, &attr, IBV_QP_STATE);
  }

  virtual void close() {
    if (pair_) lib_.destroy_qp(pair_);
    if (queue_) lib_.destroy_cq(queue_);
    if (events_) lib_.destroy_comp_channel(events_);
    for (ibv_mr* memory : {staging_, inbox_})
      if (memory) lib_.dereg_mr(memory);
    if (domain_) lib_.dealloc_pd(domain_);
    if (context_) lib_.close_device(context_);
    pair_ = nullptr, queue_ = nullptr, events_ = nullptr, staging_ = inbox_ = nullptr, domain_ = nullptr;
    context_ = nullptr;
  }

  bool is_open() const { return context_; }
  const Route& route() const { return route_; }
  ibv_qp* pair() const { return pair_; }
  Inbox inbox() const { return {inbox_ ? inbox_->rkey : 0, at_}; }
  std::uint64_t inbox_bytes() const { return inbox_ ? inbox_->length : 0; }
  std::uint32_t staging_key() const { return staging_ ? staging_->lkey : 0; }
  int events_fd() const { return events_->fd; }
  int async_fd() const { return context_->async_fd; }
  virtual int more_events_fd() const { return -1; }
  const char* fault() const { return fault_; }

 protected:
  // Device, port and memory; no queues.
  bool open_domain(const Port& port, const Piece& staging, const Piece& inbox) {
    if (*lib_.fault) return fail("load libibverbs: %s", lib_.fault);
    port_ = port;
    at_ = reinterpret_cast<std::uintptr_t>(inbox.address);
    return open_device() && open_port() && open_memory(staging, inbox);
  }

  const char* name() const { return port_.device.c_str(); }
  // With what helps, where one thing does.
  static const char* text(int error) {
    switch (error < 0 ? -error : error) {
      case ENOMEM: return "Cannot allocate memory; is `ulimit -l` (locked memory) too low?";
      case EFAULT: return "Bad address; a GPU's takes NVIDIA's open modules (dma-buf) or `modprobe nvidia-peermem`";
    }
    return std::strerror(error < 0 ? -error : error);
  }

  template <class... Values>
  bool fail(const char* format, Values... values) {
    put_words(fault_, sizeof fault_, format, values...);
    return false;
  }

  const Library& lib_ = Library::get();
  Port port_{};
  Route route_{};
  bool is_ethernet_ = false;
  ibv_context* context_ = nullptr;
  ibv_pd* domain_ = nullptr;

 private:
  bool open_device() {
    context_ = lib_.open(name());
    if (!context_ && errno == ENODEV)
      return fail("find %s with libibverbs: is its driver of rdma-core installed?", name());
    if (!context_) return fail("open %s: %s; is /dev/infiniband/uverbs* open to this user?", name(), text(errno));
    const int flags = fcntl(async_fd(), F_GETFL);
    if (flags < 0 || fcntl(async_fd(), F_SETFL, flags | O_NONBLOCK))
      return fail("wait for events of %s: %s", name(), text(errno));
    return true;
  }

  bool open_port() {
    ibv_port_attr attr{};
    ibv_gid gid{};
    auto* const old = reinterpret_cast<_compat_ibv_port_attr*>(&attr);  // of which it is the beginning
    if (const int error = lib_.query_port(context_, port_.number, old))
      return fail("query port %u of %s: %s", port_.number, name(), text(error));
    if (attr.state != IBV_PORT_ACTIVE) return fail("use port %u of %s: it is not active", port_.number, name());
    if (attr.max_msg_sz < kWriteBytes)
      return fail("use %s: its messages have at most %" PRIu32 " bytes", name(), attr.max_msg_sz);
    if (port_.gid_index > 255 || lib_.query_gid(context_, port_.number, port_.gid_index, &gid))
      return fail("use GID %d of port %u of %s: it has none", port_.gid_index, port_.number, name());
    std::memcpy(route_.gid, gid.raw, sizeof route_.gid);
    is_ethernet_ = attr.link_layer == IBV_LINK_LAYER_ETHERNET;
    route_.lid = attr.lid;
    route_.mtu = attr.active_mtu;
    route_.psn = std::random_device{}() & 0xffffff;
    return true;
  }

  // A peer may write to the inbox, and nothing else; nothing may be read.
  bool open_memory(const Piece& staging, const Piece& inbox) {
    domain_ = lib_.alloc_pd(context_);
    if (!domain_) return fail("make a protection domain on %s: %s", name(), text(errno));
    constexpr int open_to_writes = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
    return (!staging.bytes || (staging_ = add(staging, 0))) && (!inbox.bytes || (inbox_ = add(inbox, open_to_writes)));
  }

  // Null with the cause in `fault`.
  ibv_mr* add(const Piece& piece, int access) {
    const auto address = reinterpret_cast<std::uintptr_t>(piece.address);
    ibv_mr* memory = nullptr;
    const char* refused = "";  // a dma-buf, by an old rdma-core, kernel or driver: peer memory may do
    if (piece.exported >= 0 && lib_.reg_dmabuf_mr) {
      memory = lib_.reg_dmabuf_mr(domain_, 0, piece.bytes, address, piece.exported, access);
      if (!memory) refused = text(errno);
    } else if (piece.exported >= 0) {
      refused = "rdma-core is older than 34";
    }
    if (!memory) memory = lib_.reg_mr(domain_, piece.address, piece.bytes, access);
    if (!memory)
      fail("register %" PRIu64 " bytes with %s: %s%s%s", piece.bytes, name(), text(errno),
           *refused ? "; its dma-buf: " : "", refused);
    return memory;
  }

  bool open_queue(const Depth& depth) {
    events_ = lib_.create_comp_channel(context_);
    if (events_) queue_ = lib_.create_cq(context_, int(depth.completions), nullptr, events_, 0);
    if (!queue_)
      return fail("make a queue of %" PRIu32 " completions on %s: %s", depth.completions, name(), text(errno));
    const int flags = fcntl(events_fd(), F_GETFL);
    if (flags < 0 || fcntl(events_fd(), F_SETFL, flags | O_NONBLOCK))
      return fail("wait for events of %s: %s", name(), text(errno));
    return true;
  }

  bool open_pair(const Depth& depth) {
    ibv_qp_init_attr wanted{};
    wanted.send_cq = wanted.recv_cq = queue_;
    wanted.cap = {depth.sends, depth.receives, 2, 1, 0};
    wanted.qp_type = IBV_QPT_RC;
    pair_ = lib_.create_qp(domain_, &wanted);
    if (!pair_)
      return fail("make a queue pair of %" PRIu32 " + %" PRIu32 " requests on %s: %s", depth.sends, depth.receives,
                  name(), text(errno));
    route_.number = pair_->qp_num;
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_INIT;
    attr.pkey_index = port_.pkey_index;
    attr.port_num = port_.number;
    attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
    constexpr int init = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    int error = lib_.modify_qp(pair_, &attr, init);
    for (std::uint32_t n = 0; n < depth.receives && !error; ++n) error = receive();
    return !error || fail("prepare a queue pair on %s: %s", name(), text(error));
  }

  int post(std::uint64_t request, ibv_sge* pieces, int count, std::uint64_t at, ibv_wr_opcode opcode,
           std::uint32_t word, unsigned flags) {
    ibv_send_wr work{}, *bad;
    work.wr_id = request;
    work.sg_list = pieces;
    work.num_sge = count;
    work.opcode = opcode;
    work.send_flags = flags;
    work.imm_data = htobe32(word);
    work.wr.rdma.remote_addr = theirs_.address + at;
    work.wr.rdma.rkey = theirs_.key;
    return ibv_post_send(pair_, &work, &bad);
  }

  Inbox theirs_{};
  std::uint64_t at_ = 0;  // our inbox
  ibv_mr *staging_ = nullptr, *inbox_ = nullptr;
  ibv_comp_channel* events_ = nullptr;
  ibv_cq* queue_ = nullptr;
  ibv_qp* pair_ = nullptr;
  char fault_[384] = {};
};

}  // namespace lamina::verbs
