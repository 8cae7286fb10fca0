// A channel over one mlx5 queue pair: slots, credit and the checks of what the peer writes, for kernels and CPUs alike.
//
// Each side registers one inbox, the only memory that its peer's key covers: a line with the seqno of the newest
// message (signal), a line with the seqno of the newest message that the peer has released (credit), then slots of a
// header line and the payload. A sender builds header and payload in a staging slot and puts both with one write.
// The peer can write any byte of the inbox at any time: each word is loaded once, checked, and only the copy is used.
#pragma once

#include "netstack/mlx5.h"

namespace lamina::mlx5 {

using u8 = unsigned char;

constexpr u64 kLine = 64;
constexpr u64 kSignalAt = 0, kCreditAt = kLine, kSlotsAt = 4096;
constexpr u64 kTagWords = 4;

struct alignas(64) Header {
  u64 seqno, length;
  u64 tag[kTagWords];
  u64 unused[2];
};

// One direction's slots, the same on both sides.
struct Slots {
  u64 count, bytes;  // payload bytes of one slot

  LAMINA_HD u64 stride() const { return (sizeof(Header) + bytes + kLine - 1) / kLine * kLine; }
  LAMINA_HD u64 at(u64 message) const { return kSlotsAt + message % count * stride(); }
  LAMINA_HD u64 inbox_bytes() const { return kSlotsAt + count * stride(); }
};

// Message n, from 0, is in slot n % count and has seqno zero + n + 1.
struct Channel {
  Queue queue;
  // Filled by the control plane.
  Remote peer;  // its inbox
  u8* staging;  // ours, laid out as its inbox; we write, the NIC reads
  Local source;
  u8* inbox;  // ours; the peer writes
  const u64* abort;
  Slots out, in;
  u64 zero;  // epoch << 48
  // The sender's.
  u64 granted, published, credited;
  // The receiver's. `reported` is what of `released` the peer was told.
  u64 received, released, reported;
};

LAMINA_HD const u64* word_at(const u8* inbox, u64 at) { return reinterpret_cast<const u64*>(inbox + at); }
LAMINA_HD Remote peer_at(const Channel& c, u64 at) { return {c.peer.address + at, c.peer.key}; }

// Wait for a free slot; `grant` then takes it.
template <class B>
LAMINA_HD Status wait_slot(B& bus, Channel& c, u64 timeout_ns) {
  if (c.granted - c.credited < c.out.count) return kOk;
  u64 credit;
  const Status status = wait_signal(bus, word_at(c.inbox, kCreditAt), c.zero + c.credited, c.zero + c.published,
                                    c.abort, timeout_ns, &credit);
  if (status == kOk) c.credited = credit - c.zero;
  return status;
}

// The staging of a granted message's payload.
LAMINA_HD u8* payload_of(const Channel& c, u64 message) { return c.staging + c.out.at(message) + sizeof(Header); }

// Put the oldest granted message, whose payload of `bytes` is in its staging. kPending: the ring is full, try again.
template <class B>
LAMINA_HD Status publish(B& bus, Channel& c, u64 bytes, const u64* tag) {
  const u64 at = c.out.at(c.published);
  const u64 seqno = c.zero + c.published + 1;
  Header* header = reinterpret_cast<Header*>(c.staging + at);
  bus.put(&header->seqno, seqno);
  bus.put(&header->length, bytes);
  for (u64 i = 0; i < kTagWords; ++i) bus.put(&header->tag[i], tag[i]);
  const Status status = put_signal(bus, c.queue,
                                   {peer_at(c, at), {c.source.address + at, c.source.key},
                                    u32(sizeof(Header) + bytes), peer_at(c, kSignalAt), seqno});
  if (status == kOk) c.published += 1;
  return status;
}

// Wait for the next message; `take` then takes it.
template <class B>
LAMINA_HD Status wait_message(B& bus, Channel& c, u64 timeout_ns) {
  u64 newest;
  return wait_signal(bus, word_at(c.inbox, kSignalAt), c.zero + c.received, c.zero + c.reported + c.in.count, c.abort,
                     timeout_ns, &newest);
}

// Copy and check the next message's header. The payload, `header->length` bytes, is at `*payload` until released.
template <class B>
LAMINA_HD Status take(B& bus, Channel& c, Header* header, const u8** payload) {
  const u8* slot = c.inbox + c.in.at(c.received);
  const Header* theirs = reinterpret_cast<const Header*>(slot);
  header->seqno = bus.load(&theirs->seqno);
  header->length = bus.load(&theirs->length);
  for (u64 i = 0; i < kTagWords; ++i) header->tag[i] = bus.load(&theirs->tag[i]);
  if (header->seqno != c.zero + c.received + 1 || header->length > c.in.bytes) return kFault;
  *payload = slot + sizeof(Header);
  c.received += 1;
  return kOk;
}

// Tell the peer what has been released. kPending: the ring is full, try again.
template <class B>
LAMINA_HD Status report(B& bus, Channel& c) {
  if (c.reported == c.released) return kOk;
  const Status status = put_word(bus, c.queue, peer_at(c, kCreditAt), c.zero + c.released);
  if (status == kOk) c.reported = c.released;
  return status;
}

}  // namespace lamina::mlx5
