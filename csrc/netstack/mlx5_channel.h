// A channel of device.h over one mlx5 queue pair, for kernels and CPUs alike: a sender builds header and payload in a
// staging slot and puts both with one write. The write of the signal behind it brings a credit as well, so where
// messages go both ways, credits take no work request of their own.
#pragma once

#include "netstack/mlx5.h"

namespace lamina::mlx5 {

struct Channel : Ends {
  Queue queue;
  // Filled by the control plane.
  Remote peer;  // its inbox
  Local source;  // the staging
  // By whoever holds the queue.
  u64 credits;  // work requests that brought a credit alone
};

LAMINA_HD Remote peer_at(const Channel& c, u64 at) { return {c.peer.address + at, c.peer.key}; }

// Sends and receives of a channel are in no order, but both post to its queue, and poll it: whoever does holds it. What
// of `released` was told is read and noted by whoever holds it, so that a credit never comes behind a greater one.

// Consume what has completed: kFailed once a work request of ours has failed, as the queue pair is dead from then on.
template <class B>
LAMINA_HD Status link_broken(B& bus, Channel& c) {
  Status status;
  bus.lock(&c.queue.held);
  while ((status = poll_cq(bus, c.queue)) == kOk) {
  }
  bus.unlock(&c.queue.held);
  return status == kFailed ? kFailed : kOk;
}

// Put the oldest granted message, whose payload of `bytes` is in its staging, and tell what was given back. kPending: the ring is full, try again.
template <class B>
LAMINA_HD Status publish(B& bus, Channel& c, u64 bytes, const u64* tag) {
  write_header(bus, c, bytes, tag);
  const u64 at = c.out.at(c.published);
  bus.lock(&c.queue.held);
  const u64 released = bus.acquire_near(&c.released);
  const Put put = {peer_at(c, at),
                   {c.source.address + at, c.source.key},
                   u32(sizeof(Header) + bytes),
                   peer_at(c, kSignalAt),
                   c.zero + c.published + 1,
                   c.zero + released};
  const Status status = put_signal(bus, c.queue, put);
  if (status == kOk) bus.put(&c.reported, released);
  bus.unlock(&c.queue.held);
  if (status == kOk) c.published += 1;
  return status;
}

// Tell the peer what has been released, if it was not told. kPending: the ring is full, try again.
template <class B>
LAMINA_HD Status report(B& bus, Channel& c) {
  Status status = kOk;
  bus.lock(&c.queue.held);
  if (c.reported != c.released) {
    status = put_word(bus, c.queue, peer_at(c, kCreditAt), c.zero + c.released);
    if (status == kOk) {
      bus.put(&c.reported, c.released);
      c.credits += 1;
    }
  }
  bus.unlock(&c.queue.held);
  return status;
}

// As many free slots may wait for a message of ours to tell of them. Of the 3 B + 1 of B batches in flight these are
// 2 B: as many as Q, K and V take until the first O. A peer that gets no message hears of them once there are more.
LAMINA_HD u64 untold_most(const Slots& slots) { return (2 * slots.count - 2) / 3; }

// What was told is seen late, if ever: then the peer is told once more.
template <class B>
LAMINA_HD Status report_due(B& bus, Channel& c) {
  return c.released - bus.acquire_near(&c.reported) > untold_most(c.in) ? report(bus, c) : kOk;
}

// As `wait_slot`. Whoever has to wait sends no message that could tell what was given back, and its peer may wait for
// that alone, so it is told first.
template <class B>
LAMINA_HD Status wait_slot_or_tell(B& bus, Channel& c, u64 timeout_ns) {
  if (c.granted - c.credited >= c.out.count && bus.acquire(word_at(c.inbox, kCreditAt)) == c.zero + c.credited) {
    const Status status = persist(bus, c, timeout_ns, [&] { return report(bus, c); });
    if (status != kOk) return status;
  }
  return wait_slot(bus, c, timeout_ns);
}

}  // namespace lamina::mlx5
