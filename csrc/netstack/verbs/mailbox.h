// Commands to a NIC's firmware that make and connect a queue pair. Its ring, completions and records lie where the caller
// says. These are bytes in the layout of the mlx5 manual (chapter "Commands"). Bits count from the first one sent.
//
// HARDWARE-UNVERIFIED: equal to the bytes that rdma-core's own tests build (tests/netstack/nic/mlx5_mailbox.txt).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace lamina::mlx5 {

struct Field {
  unsigned at, bits;
};

class Mailbox {
 public:
  // The size of each command except kToError, which has 16 by the manual. Firmware ignores what follows, as Linux before
  // 4.9 relied on; UCX sends as many, too.
  static constexpr std::size_t kBytes = 272;

  explicit Mailbox(unsigned opcode) { set({0, 16}, opcode); }

  Mailbox& set(Field field, std::uint64_t value) {
    for (unsigned i = 0; i < field.bits; ++i)
      if (value >> (field.bits - 1 - i) & 1) data_[(field.at + i) / 8] |= std::uint8_t(0x80 >> (field.at + i) % 8);
    return *this;
  }
  Mailbox& set(unsigned at, const std::uint8_t* bytes, std::size_t count) {
    std::memcpy(data_.data() + at / 8, bytes, count);
    return *this;
  }
  const std::uint8_t* data() const { return data_.data(); }

 private:
  std::array<std::uint8_t, kBytes> data_{};
};

enum Opcode : unsigned {
  kCreateQueue = 0x400,
  kCreatePair = 0x500,
  kToInit = 0x502,
  kToReceive,
  kToSend,
  kToError = 0x507
};

// In one piece of memory that the firmware knows by `memory`, at these offsets; counts are powers of two.
struct Rings {
  std::uint32_t memory, blocks, cqes;
  std::uint64_t ring, completions, record, seen;
};

// Of the process's context: its page of doorbells, its events, its protection domain.
struct Owner {
  std::uint32_t page, events, domain;
};

// How packets get to the peer.
struct Path {
  std::uint8_t port, gid_index, service_level, traffic_class, hops;
  std::uint16_t pkey_index;
  bool is_ethernet;
  std::uint16_t lid;  // of InfiniBand
  std::uint8_t station[6];  // Ethernet's address of the peer, or of the router to it
  std::uint16_t udp_port;
  std::uint8_t gid[16];
};

struct Patience {
  std::uint8_t timeout, retries, not_ready_retries, not_ready_timer;
};

inline unsigned log2_of(std::uint32_t power) { return unsigned(__builtin_ctz(power)); }

inline Mailbox create_queue(const Rings& rings, const Owner& owner) {
  return Mailbox(kCreateQueue)
      .set({134, 1}, 1)  // the record lies in memory of ours
      .set({160, 32}, rings.memory)
      .set({227, 5}, log2_of(rings.cqes))
      .set({232, 24}, owner.page)
      .set({312, 8}, owner.events)
      .set({576, 64}, rings.seen)
      .set({640, 64}, rings.completions)
      .set({704, 32}, rings.memory)
      .set({736, 1}, 1);
}

// A reliable one without a receive queue.
inline Mailbox create_pair(const Rings& rings, const Owner& owner, std::uint32_t queue) {
  constexpr unsigned kMigrated = 3, kNoReceives = 3, kDefaultTime = 1;
  return Mailbox(kCreatePair)
      .set({211, 2}, kMigrated)
      .set({232, 24}, owner.domain)
      .set({273, 4}, log2_of(rings.blocks))
      .set({280, 2}, kDefaultTime)
      .set({296, 24}, owner.page)
      .set({1192, 24}, queue)
      .set({1448, 24}, queue)
      .set({1472, 64}, rings.record)
      .set({1573, 3}, kNoReceives)
      .set({1859, 1}, 1)
      .set({2016, 32}, rings.memory)
      .set({2048, 64}, rings.ring)
      .set({2112, 32}, rings.memory)
      .set({2144, 1}, 1);
}

inline Mailbox change(Opcode to, std::uint32_t pair) { return Mailbox(to).set({72, 24}, pair); }

// A peer may write.
inline Mailbox to_init(std::uint32_t pair, const Path& path) {
  return change(kToInit, pair).set({1361, 1}, 1).set({400, 16}, path.pkey_index).set({680, 8}, path.port);
}

inline Mailbox to_receive(std::uint32_t pair, const Path& path, std::uint32_t peer, std::uint32_t psn,
                          std::uint32_t mtu, const Patience& patience) {
  constexpr unsigned kLogMessageMost = 30;
  Mailbox mailbox = change(kToReceive, pair)
                        .set({256, 3}, mtu)
                        .set({259, 5}, kLogMessageMost)
                        .set({360, 24}, peer)
                        .set({1379, 5}, patience.not_ready_timer)
                        .set({1384, 24}, psn)
                        .set({400, 16}, path.pkey_index)
                        .set({456, 8}, path.gid_index)
                        .set({472, 8}, path.hops)
                        .set({484, 8}, path.traffic_class)
                        .set(512, path.gid, sizeof path.gid)
                        .set({680, 8}, path.port);
  if (!path.is_ethernet) return mailbox.set({424, 1}, 1).set({432, 16}, path.lid).set({676, 4}, path.service_level);
  return mailbox.set({650, 6}, path.traffic_class >> 2)
      .set({656, 16}, path.udp_port)
      .set({673, 3}, path.service_level)
      .set(688, path.station, sizeof path.station);
}

inline Mailbox to_send(std::uint32_t pair, const Path& path, std::uint32_t psn, const Patience& patience) {
  return change(kToSend, pair)
      .set({1101, 3}, patience.retries)
      .set({1104, 3}, patience.not_ready_retries)
      .set({1160, 24}, psn)
      .set({448, 5}, patience.timeout)
      .set({680, 8}, path.port);
}

}  // namespace lamina::mlx5
