// The send path of a ConnectX NIC (mlx5), for GPU kernels and CPU threads.
//
// HARDWARE-UNVERIFIED: proven against a software NIC (tests/soft_nic), never yet run on a ConnectX.
//
// A post is two work-queue entries (WQEs): an RDMA WRITE of the data, then an inline RDMA WRITE of its sequence number
// with two credits. One doorbell record and one 8-byte doorbell announce both.
//
// Layouts are those of the mlx5 Programmer's Reference Manual (chapters "Work Requests" and "CQE Formats"). Multi-byte
// fields in memory of the NIC are big-endian. One thread at a time posts to a queue and polls it. Nothing here takes a
// lock, spins without a bound, or traps.
#pragma once

#include "netstack/device.h"

namespace lamina::mlx5 {

using namespace device;

constexpr u32 kOpWrite = 0x08;          // RDMA WRITE
constexpr u32 kSignalled = 0x08;        // ask for a completion
constexpr u32 kInline = 0x80000000u;    // the data segment holds the data
constexpr u32 kSegments = 3;            // 16-byte segments of our WQEs: control, remote address, data
constexpr u32 kWordsSegments = 4;       // where the data is two words or three: with them, a WQE still has one block
constexpr u32 kSend = 1;                // word of the doorbell record that belongs to the send queue
constexpr u32 kCqeDone = 0x0, kCqeError = 0xd, kCqeInvalid = 0xf;
constexpr u32 kBadCompletion = 0x100;   // syndrome of our own: a completion that answers no post of ours

struct alignas(64) Wqe {
  u32 word[16];
};

struct alignas(64) Cqe {
  u64 word[8];
};

struct Remote {
  u64 address;
  u32 key;
};

struct Local {
  u64 address;
  u32 key;
};

// Indices count from 0 and do not wrap; the NIC sees their low 16 (send) or 24 (completion) bits.
struct Queue {
  // Filled by the control plane. Addresses are the poster's.
  Wqe* ring;
  u32* record;      // doorbell record
  u64* doorbell;    // register in the UAR page
  Cqe* completions;
  u32* seen;        // completions' own record: how many we have consumed
  u32 number;       // of the queue pair, 24 bits
  u32 blocks;       // WQEs in `ring`, a power of two
  u32 cqes;         // in `completions`, a power of two, >= blocks: then they cannot overrun
  u32 alternate;    // bytes between the two registers that doorbells alternate on; 0: one register
  // The poster's.
  u64 reserved;   // WQEs handed out
  u64 committed;  // WQEs that were announced to the NIC
  u64 completed;  // WQEs that are done; their blocks and sources are free
  u64 polled;     // completions consumed
  u32 doorbells;  // rung
  u32 syndrome;   // of the first error completion; 0: none
  u32 held;       // while one of several posters, who are in no order, posts or polls; see mlx5_channel.h
  // The control plane's: whether `ring`, `record` and all that is sent lie in memory of the GPU that posts.
  u32 near;
};

LAMINA_HD u32 be32(u32 x) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(x, 0, 0x0123);
#else
  return __builtin_bswap32(x);
#endif
}

LAMINA_HD u64 be64(u64 x) { return (u64(be32(u32(x))) << 32) | be32(u32(x >> 32)); }

// The control and remote-address segments, which all our WQEs begin with.
LAMINA_HD Wqe write_head(u64 index, u32 queue, Remote to, u32 flags, u32 segments) {
  Wqe wqe = {};
  wqe.word[0] = be32((u32(index) & 0xffff) << 8 | kOpWrite);
  wqe.word[1] = be32(queue << 8 | segments);
  wqe.word[2] = be32(flags);
  wqe.word[4] = be32(u32(to.address >> 32));
  wqe.word[5] = be32(u32(to.address));
  wqe.word[6] = be32(to.key);
  return wqe;
}

// RDMA WRITE of `bytes` (1 to 2^30; the format takes 0 for 2^31).
LAMINA_HD Wqe write_wqe(u64 index, u32 queue, Remote to, Local from, u32 bytes, u32 flags) {
  Wqe wqe = write_head(index, queue, to, flags, kSegments);
  wqe.word[8] = be32(bytes);
  wqe.word[9] = be32(from.key);
  wqe.word[10] = be32(u32(from.address >> 32));
  wqe.word[11] = be32(u32(from.address));
  return wqe;
}

// Up to three contiguous words at the peer.
template <u32 count>
struct Words {
  u64 word[count];
  static constexpr u32 kSegmentsOfAll = count > 1 ? kWordsSegments : kSegments;
};

// RDMA WRITE of them, which travel in the WQE and keep this processor's byte order: each may be seen before the others.
template <u32 count>
LAMINA_HD Wqe write_words_wqe(u64 index, u32 queue, Remote to, const Words<count>& words, u32 flags) {
  Wqe wqe = write_head(index, queue, to, flags, words.kSegmentsOfAll);
  wqe.word[8] = be32(u32(sizeof words) | kInline);
  for (u32 i = 0; i < count; ++i) {
    wqe.word[9 + 2 * i] = u32(words.word[i]);
    wqe.word[10 + 2 * i] = u32(words.word[i] >> 32);
  }
  return wqe;
}

// Consume one completion: kOk if there was one, kPending if not, kFailed from the first error on.
template <class B>
LAMINA_HD Status poll_cq(B& bus, Queue& q) {
  const Cqe* cqe = q.completions + (q.polled & (q.cqes - 1));
  // Queue number, WQE counter, opcode and owner share the last word, so that one load takes them together.
  const u64 tail = be64(bus.acquire(&cqe->word[7]));
  const u32 opcode = u32(tail) >> 4 & 0xf;
  const u32 lap = (q.polled & q.cqes) != 0;
  if (opcode == kCqeInvalid || (tail & 1) != lap) return q.syndrome ? kFailed : kPending;
  q.polled += 1;
  bus.put(q.seen, be32(u32(q.polled) & 0xffffff));
  u32 bad = 0;
  const u64 done = (u32(tail >> 16) + 1 - q.completed) & 0xffff;  // WQEs, of which the counter names the last
  if (opcode == kCqeError) {
    bad = u32(be64(bus.load(&cqe->word[6]))) & 0xff;
  } else if (opcode != kCqeDone || (u32(tail >> 32) & 0xffffff) != q.number || done == 0 ||
             done > q.committed - q.completed) {
    bad = kBadCompletion;
  } else {
    q.completed += done;
  }
  if (bad && !q.syndrome) q.syndrome = bad;
  return q.syndrome ? kFailed : kOk;
}

// Take the next `count` WQEs of the ring, the first of which is `*first`. kPending when the ring is full.
template <class B>
LAMINA_HD Status reserve(B& bus, Queue& q, u32 count, u64* first) {
  while (q.reserved + count - q.completed > q.blocks) {
    const Status status = poll_cq(bus, q);
    if (status != kOk) return status;
  }
  *first = q.reserved;
  q.reserved += count;
  return kOk;
}

template <class B>
LAMINA_HD void place(B& bus, Queue& q, u64 index, const Wqe& wqe) {
  bus.put(q.ring + (index & (q.blocks - 1)), wqe);
}

// What was put comes before what is put next, for the NIC.
template <class B>
LAMINA_HD void order(B& bus, const Queue& q) {
  if (q.near) {
    bus.fence_near();
  } else {
    bus.fence();
  }
}

// Announce all reserved WQEs, which must have been placed. The last one has to be signalled, and has so many segments.
template <class B>
LAMINA_HD void commit(B& bus, Queue& q, u32 segments) {
  order(bus, q);  // the WQEs, and the data they point to, before the record that announces them
  bus.put(q.record + kSend, be32(u32(q.reserved) & 0xffff));
  order(bus, q);  // the record before the doorbell, which makes the NIC read it
  const u32 last = be32((u32(q.reserved - 1) & 0xffff) << 8 | kOpWrite);
  const u32 queue = be32(q.number << 8 | segments);
  bus.ring(q.doorbell + (q.doorbells & 1) * q.alternate / sizeof(u64), u64(queue) << 32 | last);
  q.doorbells += 1;
  q.committed = q.reserved;
}

// One message: `bytes` from `source` to `data`, then `words` to `signal`: its sequence number, and two credits.
struct Put {
  Remote data;
  Local source;
  u32 bytes;
  Remote signal;
  Words<3> words;
};

// Post both writes at once. The peer sees the data before the words as long as the connection delivers in order: one
// RC queue pair, no relaxed ordering on the region, no adaptive routing.
template <class B>
LAMINA_HD Status put_signal(B& bus, Queue& q, const Put& put) {
  u64 first;
  const Status status = reserve(bus, q, 2, &first);
  if (status != kOk) return status;
  place(bus, q, first, write_wqe(first, q.number, put.data, put.source, put.bytes, 0));
  place(bus, q, first + 1, write_words_wqe(first + 1, q.number, put.signal, put.words, kSignalled));
  commit(bus, q, put.words.kSegmentsOfAll);
  return kOk;
}

// Post words alone.
template <class B, u32 count>
LAMINA_HD Status put_words(B& bus, Queue& q, Remote to, const Words<count>& words) {
  u64 index;
  const Status status = reserve(bus, q, 1, &index);
  if (status != kOk) return status;
  place(bus, q, index, write_words_wqe(index, q.number, to, words, kSignalled));
  commit(bus, q, words.kSegmentsOfAll);
  return kOk;
}

}  // namespace lamina::mlx5
