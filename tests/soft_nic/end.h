// One end of a channel over the software NIC, with all memory that a control plane would set up.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "netstack/mlx5_channel.h"
#include "netstack/proxy/proxy.h"
#include "soft_nic/bus.h"

namespace lamina::nic_model {

struct Shape {
  mlx5::Slots out, in;
  std::uint32_t number, blocks, cqes;
  std::uint64_t zero = 0;       // epoch << 48
  std::uint64_t index = 0;      // first WQE
  std::uint64_t completed = 0;  // first completion
  bool proxied = false;         // another thread rings: see clerk()
  bool near = false;            // ring and records are in the poster's GPU, as staging and channel always are
};

struct Keys {
  std::uint32_t staging = 0x00aabb00, inbox = 0x00ccdd00;
};

// What of an inbox both sides must agree on before the first message.
inline void open_inbox(std::uint8_t* inbox, std::uint64_t zero) {
  for (const std::uint64_t at : {mlx5::kSignalAt, mlx5::kCreditAt, mlx5::kBulkCreditAt})
    std::memcpy(inbox + at, &zero, sizeof zero);
}

// Several processors that read the same memory.
struct Observers final : Observer {
  std::vector<Observer*> all;

  void before_write(const void* at, std::uint64_t bytes) override {
    for (Observer* each : all) each->before_write(at, bytes);
  }
};

// A queue pair: what its NIC and who posts to it share.
class QueuePair {
 public:
  static constexpr std::uint32_t kAlternate = 256;

  // `readers` poll its completions.
  QueuePair(const Shape& shape, Observer* readers, Adversary adversary, std::uint64_t seed)
      : shape_(shape), ring_(shape.blocks), completions_(shape.cqes), nic(setup(readers), adversary, seed) {
    for (auto& cqe : completions_) cqe.word[7] = 0xf1ull << 56;  // byte 63: invalid, as after creation
    seen_[0] = __builtin_bswap32(std::uint32_t(shape.completed) & 0xffffff);
    record_[1] = __builtin_bswap32(std::uint32_t(shape.index) & 0xffff);
    for (State to : {State::init, State::rtr, State::rts}) nic.modify(to);
  }
  QueuePair(const QueuePair&) = delete;

  mlx5::Queue queue() {
    const Shape& s = shape_;
    return {ring_.data(), record_, registers_, completions_.data(), seen_, s.number, s.blocks, s.cqes, kAlternate,
            s.index,      s.index, s.index,    s.completed,         0,     0,        0,        s.near};
  }
  mlx5::u64* registers() { return registers_; }

  // Ring and records are in the GPU of which that is a processor.
  void lie_near(WeakBus* bus) const {
    bus->own(ring_.data(), ring_.size() * sizeof ring_[0]);
    bus->own(record_, sizeof record_);
    bus->own(seen_, sizeof seen_);
  }

 private:
  Setup setup(Observer* readers) {
    const Shape& s = shape_;
    return {reinterpret_cast<const std::uint8_t*>(ring_.data()),
            record_,
            reinterpret_cast<std::uint8_t*>(completions_.data()),
            seen_,
            s.number,
            s.blocks,
            s.cqes,
            kAlternate,
            s.index,
            s.completed,
            readers,
            s.proxied};
  }

  const Shape shape_;
  std::vector<mlx5::Wqe> ring_;
  std::vector<mlx5::Cqe> completions_;
  std::uint32_t record_[2] = {}, seen_[2] = {};
  mlx5::u64 registers_[2 * kAlternate / 8] = {};

 public:
  Nic nic;
};

class End {
 public:
  static constexpr std::uint64_t kStagingAddress = 0x7f0000001000;

  // `inbox` and `staging` stay the caller's; `inbox_address` is how the peer's requests name our inbox.
  End(const Shape& shape, std::uint8_t* inbox, std::uint8_t* staging, const mlx5::u64* abort, Adversary adversary,
      std::uint64_t seed, std::function<void()> world)
      : pair_(shape, &readers, adversary, seed), nic(pair_.nic),
        bus(shape.proxied ? nullptr : &nic, pair_.registers(), seed + 1, world),
        receiving(shape.proxied ? nullptr : &nic, pair_.registers(), seed + 3, std::move(world)),
        clerk_(&nic, pair_.registers(), seed + 2, nullptr), channel{} {
    readers.all = {&bus};
    for (WeakBus* each : {&bus, &receiving}) {
      each->own(staging, shape.out.inbox_bytes());
      each->own(&channel, sizeof channel);
      if (shape.near) pair_.lie_near(each);
    }
    channel.queue = pair_.queue();
    proxy_ = {&mailbox_, pair_.registers(), QueuePair::kAlternate, 0, mlx5::kNoDoorbell};
    if (shape.proxied) {
      channel.queue.doorbell = &mailbox_;
      channel.queue.alternate = 0;
    }
    channel.staging = staging;
    channel.source = {kStagingAddress, keys.staging};
    channel.inbox = inbox;
    channel.abort = abort;
    channel.out = shape.out;
    channel.in = shape.in;
    channel.zero = shape.zero;
    nic.local.push_back({keys.staging, kStagingAddress, shape.out.inbox_bytes(), staging, false, nullptr});
  }
  End(const End&) = delete;

  // `receiving` is used together with `bus` from here on.
  void split() {
    readers.all = {&bus, &receiving};
    bus.tell(&receiving);
    receiving.join(bus);
    receiving.tell(&bus);
  }

  // What the thread does that rings for a proxied poster: whether there was a doorbell.
  bool clerk() { return mlx5::ring_on(clerk_, proxy_); }
  const mlx5::u64* mailbox() const { return &mailbox_; }
  mlx5::u64 rung() const { return proxy_.last; }

  // The peer's inbox: what its requests name it, and where it is for us.
  void reach(mlx5::Remote peer, std::uint8_t* at, Observer* observer) {
    channel.peer = peer;
    nic.remote.push_back({peer.key, peer.address, channel.out.inbox_bytes(), at, true, observer});
  }

 private:
  mlx5::u64 mailbox_ = mlx5::kNoDoorbell;
  mlx5::Proxy proxy_;

 public:
  Keys keys;
  Observers readers;  // the two below

 private:
  QueuePair pair_;

 public:
  Nic& nic;
  WeakBus bus, receiving;  // of the processor that sends, or does all; of the one that receives at the same time

 private:
  WeakBus clerk_;

 public:
  mlx5::Channel channel;
};

}  // namespace lamina::nic_model
