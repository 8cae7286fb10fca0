// A channel of device.h over mlx5 queue pairs, for kernels and CPUs alike. A sender builds header and payload in a
// staging slot and sends both with one write. The write of the signal after it carries credits, too. So if messages go
// both ways, credits take no work request of their own.
//
// A channel may have two lanes, each a queue pair with its own slots. Messages of one lane never wait for the other lane,
// and are not ordered with it: a receiver counts the messages of each. On the bulk lane, messages go one way only. So the
// first lane carries the credits of both, with its messages, or alone if it has none.
#pragma once

#include "netstack/mlx5.h"

namespace lamina::mlx5 {

enum Lane : u32 { kAlone = 0, kFirst = 1, kBulk = 2 };

struct Channel : Ends {
  Queue queue;
  // Filled by the control plane.
  Remote peer;  // its inbox
  Local source;  // the staging
  // Used by the holder of the queue.
  u64 credits;  // work requests that brought credits alone
  // The control plane's. Of two lanes, the bulk lane is the second.
  u64 lane;
};

// The lane that tells of both.
template <class C>
LAMINA_HD C& first_of(C& c) {
  return c.lane == kBulk ? *(&c - 1) : c;
}

// Null where there is none.
template <class C>
LAMINA_HD C* bulk_of(C& first) {
  return first.lane == kFirst ? &first + 1 : nullptr;
}

LAMINA_HD const u64* credit_word(const Channel& c) {
  return word_at(first_of(c).inbox, c.lane == kBulk ? kBulkCreditAt : kCreditAt);
}

LAMINA_HD Remote peer_at(const Channel& c, u64 at) { return {c.peer.address + at, c.peer.key}; }

// Sends and receives of a channel are not ordered, but both post to its queues and poll them, while they hold the queue.
// The holder of the first lane's queue reads and updates `reported` of both lanes, so credits never go back.

// Consume what has completed of one lane.
template <class B>
LAMINA_HD Status queue_broken(B& bus, Queue& q) {
  Status status;
  bus.lock(&q.held);
  while ((status = poll_cq(bus, q)) == kOk) {
  }
  bus.unlock(&q.held);
  return status == kFailed ? kFailed : kOk;
}

// For both lanes: kFailed once a work request of ours has failed. Its queue pair is dead from then on, and a waiting
// thread may wait for what it had to bring.
template <class B>
LAMINA_HD Status link_broken(B& bus, Channel& c) {
  Channel& first = first_of(c);
  Status status = queue_broken(bus, first.queue);
  if (status == kOk && bulk_of(first)) status = queue_broken(bus, bulk_of(first)->queue);
  return status;
}

// Released messages of the first and the bulk lane that will be reported next. Used by the holder of the first's queue.
struct Released {
  u64 first, bulk;
};

template <class B>
LAMINA_HD Released released_of(B& bus, Channel& first) {
  const Channel* bulk = bulk_of(first);
  return {bus.acquire_near(&first.released), bulk ? bus.acquire_near(&bulk->released) : 0};
}

LAMINA_HD bool is_news(const Channel& first, const Released& told) {
  const Channel* bulk = bulk_of(first);
  return told.first != first.reported || (bulk && told.bulk != bulk->reported);
}

// Record that they were reported.
template <class B>
LAMINA_HD void note(B& bus, Channel& first, const Released& told) {
  bus.put(&first.reported, told.first);
  if (bulk_of(first)) bus.put(&bulk_of(first)->reported, told.bulk);
}

// Put the oldest granted message, whose payload of `bytes` is in its staging, and tell what was given back. kPending: the ring is full, try again.
template <class B>
LAMINA_HD Status publish(B& bus, Channel& c, u64 bytes, const u64* tag) {
  write_header(bus, c, bytes, tag);
  const u64 at = c.out.at(c.published);
  bus.lock(&c.queue.held);
  const Released told = released_of(bus, c);
  const Put put = {peer_at(c, at),
                   {c.source.address + at, c.source.key},
                   u32(sizeof(Header) + bytes),
                   peer_at(c, kSignalAt),
                   {{c.zero + c.published + 1, c.zero + told.first, c.zero + told.bulk}}};
  const Status status = put_signal(bus, c.queue, put);
  if (status == kOk) note(bus, c, told);
  bus.unlock(&c.queue.held);
  if (status == kOk) c.published += 1;
  return status;
}

// Report released messages to the peer, unless they were reported. kPending: the ring is full, try again.
template <class B>
LAMINA_HD Status report(B& bus, Channel& c) {
  Channel& first = first_of(c);
  Status status = kOk;
  bus.lock(&first.queue.held);
  const Released told = released_of(bus, first);
  if (is_news(first, told)) {
    const Words<2> credits = {{first.zero + told.first, first.zero + told.bulk}};
    status = put_words(bus, first.queue, peer_at(first, kCreditAt), credits);
    if (status == kOk) {
      note(bus, first, told);
      first.credits += 1;
    }
  }
  bus.unlock(&first.queue.held);
  return status;
}

// As many free slots may wait for a message of ours to tell of them. Of the 3 B + 1 of B batches in flight these are
// 2 B: as many as Q, K and V take until the first O. A peer that gets no message hears of them once there are more.
LAMINA_HD u64 untold_most(const Slots& slots) { return (2 * slots.count - 2) / 3; }

// A report may be seen late or never; then it is sent once more.
template <class B>
LAMINA_HD Status report_due(B& bus, Channel& c) {
  return c.released - bus.acquire_near(&c.reported) > untold_most(c.in) ? report(bus, c) : kOk;
}

// As `wait_slot`. A waiting sender sends no message that could carry credits, and its peer may wait only for those. So it
// reports the credits of both lanes first.
template <class B>
LAMINA_HD Status wait_slot_or_tell(B& bus, Channel& c, u64 timeout_ns) {
  if (c.granted - c.credited >= c.out.count && bus.acquire(credit_word(c)) == c.zero + c.credited) {
    const Status status = persist(bus, c, timeout_ns, [&] { return report(bus, c); });
    if (status != kOk) return status;
  }
  return wait_slot(bus, c, timeout_ns);
}

// Wait until the NIC needs nothing more of what this lane has sent, and so, on the same connection, the peer's has it.
// `abort` is for this wait: those of the channel may be over.
template <class B>
LAMINA_HD Status flush(B& bus, Channel& c, const u64* abort, u64 timeout_ns) {
  Pace<B> pace(bus, abort, timeout_ns);
  for (;;) {
    Status status = link_broken(bus, c);
    if (status == kOk && bus.load(&c.queue.completed) != bus.load(&c.queue.committed)) status = pace.poll_again();
    if (status != kPending) return status;
  }
}

}  // namespace lamina::mlx5
