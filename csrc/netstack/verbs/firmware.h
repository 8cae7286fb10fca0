// A queue pair that the NIC's firmware makes by our commands (DEVX). So ring, completions and records lie in memory of the
// GPU that posts; libmlx5 puts them in host memory, and pins no other. All else is as in an End.
//
// HARDWARE-UNVERIFIED: commands equal those of rdma-core's tests, calls go to the distribution's libmlx5 over a stand-in of
// its kernel.
#pragma once

#include "mailbox.h"
#include "objects.h"

namespace lamina::verbs {

constexpr std::uint64_t kRingPage = 4096;
constexpr std::uint64_t kRecordAt = 0, kSeenAt = 64;  // in the last page of the rings, each in a line of its own

// Bytes of a ring of so many blocks, or of as many completions.
inline std::uint64_t queue_bytes(std::uint32_t blocks) {
  return (blocks * std::uint64_t(kBlockBytes) + kRingPage - 1) / kRingPage * kRingPage;
}
inline std::uint64_t rings_bytes(std::uint32_t blocks) { return 2 * queue_bytes(blocks) + kRingPage; }

class FirmwareEnd final : public End {
 public:
  ~FirmwareEnd() override { FirmwareEnd::close(); }

  // As End::open. `rings` has rings_bytes(blocks), all 0, and was exported.
  bool open(const Port& port, const Piece& staging, const Piece& inbox, const Piece& rings, std::uint32_t blocks) {
    if (!provider_.register_rings) return fail("make rings in a GPU's memory: libmlx5 is older than rdma-core 43");
    return open_domain(port, staging, inbox) && open_rings(rings, blocks) && open_page() && open_queue() &&
           open_pair() && open_events();
  }

  Layout layout() const {
    const auto there = [&](std::uint64_t at) { return static_cast<void*>(base_ + at); };
    return {there(rings_.ring),
            there(rings_.record),
            page_->reg_addr,
            there(rings_.completions),
            there(rings_.seen),
            route_.number,
            rings_.blocks,
            rings_.cqes,
            0,
            1};
  }
  int more_events_fd() const override { return events_->fd; }

  bool connect(const Route& peer, const Inbox&) override {
    mlx5::Path path = path_of(peer);
    if (is_ethernet_ && !find_station(peer, &path)) return false;
    const mlx5::Patience patience{port_.ack_timeout, kRetries, kNotReadyRetries, kNotReadyTimer};
    const std::uint32_t mtu = std::min(route_.mtu, peer.mtu);
    return change(mlx5::to_receive(route_.number, path, peer.number, peer.psn, mtu, patience),
                  "connect to the peer's") &&
           change(mlx5::to_send(route_.number, path, route_.psn, patience), "send to the peer's");
  }

  bool event(ibv_event_type* type) override {
    if (End::event(type)) return true;
    mlx5dv_devx_async_event_hdr told{};
    if (!events_ || provider_.get_event(events_, &told, sizeof told) <= 0) return false;
    for (const Told& each : kTold)
      if (each.number == told.cookie) return *type = each.type, true;
    return false;
  }

  void halt() override {
    if (pair_) change(mlx5::change(mlx5::kToError, route_.number), "halt our");
  }

  void close() override {
    if (pair_) provider_.destroy(pair_);
    if (queue_) provider_.destroy(queue_);
    if (events_) provider_.close_events(events_);
    if (page_) provider_.free_page(page_);
    if (memory_) provider_.forget_rings(memory_);
    pair_ = queue_ = nullptr, events_ = nullptr, page_ = nullptr, memory_ = nullptr;
    End::close();
  }

 private:
  static constexpr std::size_t kAnswerBytes = 16;
  // Events of the mlx5 manual, by what libibverbs calls them.
  struct Told {
    std::uint16_t number;
    ibv_event_type type;
  };
  static constexpr Told kTold[] = {{0x04, IBV_EVENT_CQ_ERR},
                                   {0x05, IBV_EVENT_QP_FATAL},
                                   {0x10, IBV_EVENT_QP_REQ_ERR},
                                   {0x11, IBV_EVENT_QP_ACCESS_ERR}};

  bool open_rings(const Piece& piece, std::uint32_t blocks) {
    base_ = piece.address;
    RingsIn asked{nullptr, piece.bytes, IBV_ACCESS_LOCAL_WRITE, ~(kRingPage - 1), kOfFile, piece.exported};
    memory_ = provider_.register_rings(context_, &asked);
    if (!memory_) return fail("register rings in a GPU's memory with %s: %s", name(), std::strerror(errno));
    const std::uint64_t records = 2 * queue_bytes(blocks);
    rings_ = {memory_->umem_id, blocks, blocks, 0, queue_bytes(blocks), records + kRecordAt, records + kSeenAt};
    return true;
  }

  bool open_page() {
    page_ = provider_.take_page(context_, kPlainPage);
    if (!page_) return fail("have a page of doorbells of %s: %s", name(), std::strerror(errno));
    mlx5dv_pd domain{};
    mlx5dv_obj objects{};
    objects.pd = {domain_, &domain};
    if (provider_.query_events(context_, 0, &owner_.events) || provider_.init_obj(&objects, MLX5DV_OBJ_PD))
      return fail("ask %s for its events: %s", name(), std::strerror(errno));
    owner_.page = page_->page_id, owner_.domain = domain.pdn;
    return true;
  }

  bool open_queue() { return create(mlx5::create_queue(rings_, owner_), "a queue of completions", &queue_, &number_); }

  bool open_pair() {
    return create(mlx5::create_pair(rings_, owner_, number_), "a queue pair", &pair_, &route_.number) &&
           change(mlx5::to_init(route_.number, path_of({})), "prepare our");
  }

  bool open_events() {
    events_ = provider_.open_events(context_, MLX5DV_DEVX_CREATE_EVENT_CHANNEL_FLAGS_OMIT_EV_DATA);
    if (!events_) return fail("hear of events of %s: %s", name(), std::strerror(errno));
    for (const Told& each : kTold) {
      std::uint16_t number = each.number;
      mlx5dv_devx_obj* const whose = each.type == IBV_EVENT_CQ_ERR ? queue_ : pair_;
      if (provider_.subscribe(events_, whose, sizeof number, &number, each.number))
        return fail("hear of events of %s: %s", name(), std::strerror(errno));
    }
    const int flags = fcntl(events_->fd, F_GETFL);
    return (flags >= 0 && !fcntl(events_->fd, F_SETFL, flags | O_NONBLOCK)) ||
           fail("hear of events of %s: %s", name(), std::strerror(errno));
  }

  mlx5::Path path_of(const Route& peer) const {
    mlx5::Path path{};
    path.port = port_.number, path.gid_index = std::uint8_t(port_.gid_index), path.pkey_index = port_.pkey_index;
    path.service_level = port_.service_level, path.traffic_class = port_.traffic_class, path.hops = kHops;
    path.is_ethernet = is_ethernet_, path.lid = peer.lid;
    std::memcpy(path.gid, peer.gid, sizeof path.gid);
    return path;
  }

  // The Ethernet address by which the peer is reached, as the kernel or libibverbs resolves it.
  bool find_station(const Route& peer, mlx5::Path* path) {
    ibv_ah_attr attr{};
    attr.is_global = 1;
    std::memcpy(attr.grh.dgid.raw, peer.gid, sizeof peer.gid);
    attr.grh.sgid_index = std::uint8_t(port_.gid_index);
    attr.grh.hop_limit = kHops;
    attr.grh.traffic_class = port_.traffic_class;
    attr.sl = port_.service_level;
    attr.port_num = port_.number;
    ibv_ah* const handle = lib_.create_ah(domain_, &attr);
    if (!handle) return fail("find the peer's Ethernet address from %s: %s", name(), std::strerror(errno));
    mlx5dv_ah address{};
    mlx5dv_obj objects{};
    objects.ah = {handle, &address};
    const int error = provider_.init_obj(&objects, MLX5DV_OBJ_AH);
    if (!error) std::memcpy(path->station, address.av->rmac, sizeof path->station);
    if (!error) path->udp_port = be16toh(address.av->rlid);
    lib_.destroy_ah(handle);
    return !error || fail("find the peer's Ethernet address from %s: %s", name(), std::strerror(error));
  }

  // Makes what `mailbox` says; `*number` is what the firmware calls it.
  bool create(const mlx5::Mailbox& mailbox, const char* what, mlx5dv_devx_obj** made, std::uint32_t* number) {
    std::uint8_t answer[kAnswerBytes] = {};
    *made = provider_.create(context_, mailbox.data(), mlx5::Mailbox::kBytes, answer, sizeof answer);
    if (!*made)
      return fail("make %s on %s by its firmware: %s, syndrome %#x", what, name(), std::strerror(errno),
                  word(answer + 4));
    *number = word(answer + 8) & 0xffffff;
    return true;
  }

  bool change(const mlx5::Mailbox& mailbox, const char* what) {
    std::uint8_t answer[kAnswerBytes] = {};
    if (!provider_.modify(pair_, mailbox.data(), mlx5::Mailbox::kBytes, answer, sizeof answer)) return true;
    return fail("%s queue pair on %s by its firmware: %s, syndrome %#x", what, name(), std::strerror(errno),
                word(answer + 4));
  }

  static std::uint32_t word(const std::uint8_t* at) {
    std::uint32_t value;
    std::memcpy(&value, at, sizeof value);
    return be32toh(value);
  }

  const Provider& provider_ = Provider::get();
  std::uint8_t* base_ = nullptr;
  mlx5::Rings rings_{};
  mlx5::Owner owner_{};
  std::uint32_t number_ = 0;  // of the queue of completions
  mlx5dv_devx_umem* memory_ = nullptr;
  mlx5dv_devx_uar* page_ = nullptr;
  mlx5dv_devx_obj *queue_ = nullptr, *pair_ = nullptr;
  mlx5dv_devx_event_channel* events_ = nullptr;
};

}  // namespace lamina::verbs
