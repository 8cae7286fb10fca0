// The doorbells of a queue whose poster may not map the NIC's registers: it rings in ordinary memory (Queue::doorbell,
// with Queue::alternate 0), and a CPU thread rings on. Doorbells in between may get lost: the record is the truth.
#pragma once

#include "netstack/mlx5.h"

namespace lamina::mlx5 {

constexpr u64 kNoDoorbell = ~0ull;

struct Proxy {
  const u64* mailbox;  // holds kNoDoorbell until the poster's first doorbell
  u64* doorbell;       // register in the UAR page
  u32 alternate;       // as of a Queue
  u32 doorbells;       // rung
  u64 last;            // kNoDoorbell at first
};

// Ring on what has come since the last call: whether anything had. A value never comes twice in a row: it names a WQE
// by 16 bits, and the ring has fewer.
template <class B>
LAMINA_HD bool ring_on(B& bus, Proxy& p) {
  const u64 value = bus.acquire(p.mailbox);
  if (value == p.last) return false;
  bus.ring(p.doorbell + (p.doorbells & 1) * p.alternate / sizeof(u64), value);
  p.doorbells += 1;
  p.last = value;
  return true;
}

}  // namespace lamina::mlx5
