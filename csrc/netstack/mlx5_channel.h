// A channel of device.h over one mlx5 queue pair, for kernels and CPUs alike: a sender builds header and payload in a
// staging slot and puts both with one write.
#pragma once

#include "netstack/mlx5.h"

namespace lamina::mlx5 {

struct Channel : Ends {
  Queue queue;
  // Filled by the control plane.
  Remote peer;  // its inbox
  Local source;  // the staging
};

LAMINA_HD Remote peer_at(const Channel& c, u64 at) { return {c.peer.address + at, c.peer.key}; }

// Sends and receives of a channel are in no order, but both post to its queue, and poll it: whoever does holds it.

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

// Put the oldest granted message, whose payload of `bytes` is in its staging. kPending: the ring is full, try again.
template <class B>
LAMINA_HD Status publish(B& bus, Channel& c, u64 bytes, const u64* tag) {
  write_header(bus, c, bytes, tag);
  const u64 at = c.out.at(c.published);
  const Put put = {peer_at(c, at),
                   {c.source.address + at, c.source.key},
                   u32(sizeof(Header) + bytes),
                   peer_at(c, kSignalAt),
                   c.zero + c.published + 1};
  bus.lock(&c.queue.held);
  const Status status = put_signal(bus, c.queue, put);
  bus.unlock(&c.queue.held);
  if (status == kOk) c.published += 1;
  return status;
}

// Tell the peer what has been released. kPending: the ring is full, try again.
template <class B>
LAMINA_HD Status report(B& bus, Channel& c) {
  if (c.reported == c.released) return kOk;
  bus.lock(&c.queue.held);
  const Status status = put_word(bus, c.queue, peer_at(c, kCreditAt), c.zero + c.released);
  bus.unlock(&c.queue.held);
  if (status == kOk) c.reported = c.released;
  return status;
}

}  // namespace lamina::mlx5
