// What every link driven from a device shares: how the processor reaches memory, and a channel's slots, credit and checks.
//
// HARDWARE-UNVERIFIED on GPUs: proven on CPUs (tests/soft_nic), where the same source is compiled.
//
// Each side has one inbox, the only memory that its peer can write. It begins with a line of two sequence numbers: that
// of the newest message (signal), and that of the newest message that the peer has released (credit). Slots follow, each
// a header line and a payload. The peer can write any byte of the inbox at any time. So each word is loaded once and
// checked, and only the copy is used. Each link delivers messages in its own way: mlx5_channel.h, memory_channel.h.
#pragma once

#if !defined(__CUDACC_RTC__)
#include <time.h>
#endif

#if defined(__CUDACC__)
#define LAMINA_HD __host__ __device__ __forceinline__
#else
#define LAMINA_HD inline
#endif

namespace lamina::device {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

enum Status : int {
  kOk = 0,
  kPending = 1,  // nothing yet: the ring is full, or no completion has come
  kTimeout = 2,
  kAborted = 3,
  kFault = 4,  // the peer wrote what no honest peer writes
  kFailed = 5,  // the NIC reported an error; Queue::syndrome says which
};

// How this processor reaches memory that others, the NIC among them, read and write. The software NIC has its own.
struct Bus {
#if defined(__CUDA_ARCH__)
  static constexpr u32 kRestMostNs = 1024;
#else
  static constexpr u32 kRestMostNs = 262144;  // a CPU has other work
#endif

  // An ordinary store: visible to others after a fence, in no order before it.
  template <class T>
  LAMINA_HD void put(T* to, const T& value) {
    *to = value;
  }

  // All earlier loads and stores, of this thread and those it has synchronised with, come before all later ones.
  LAMINA_HD void fence() {
#if defined(__CUDA_ARCH__)
    __threadfence_system();
#else
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
  }

  // As `fence`, for kernels of this GPU, and for a NIC that reads its memory; what lies elsewhere may still be on its way.
  LAMINA_HD void fence_near() {
#if defined(__CUDA_ARCH__)
    __threadfence();
#else
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
  }

  // A store to a NIC register.
  LAMINA_HD void ring(u64* at, u64 value) {
#if defined(__CUDA_ARCH__)
    asm volatile("st.mmio.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
#else
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    *static_cast<volatile u64*>(at) = value;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);  // a write-combining mapping lets go of it
#endif
  }

  // What was visible to the writer of the value is visible to all later loads here.
  LAMINA_HD u64 acquire(const u64* at) {
#if defined(__CUDA_ARCH__)
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
#else
    return __atomic_load_n(at, __ATOMIC_ACQUIRE);
#endif
  }

  // A store after all earlier loads and stores, as `fence` says; it publishes what they wrote.
  LAMINA_HD void release(u64* at, u64 value) {
#if defined(__CUDA_ARCH__)
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
#else
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
#endif
  }

  // As `release` and `acquire`, among kernels of one GPU, or threads of one process.
  LAMINA_HD void release_near(u64* at, u64 value) {
#if defined(__CUDA_ARCH__)
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
#else
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
#endif
  }

  LAMINA_HD u64 acquire_near(const u64* at) {
#if defined(__CUDA_ARCH__)
    u64 value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
#else
    return __atomic_load_n(at, __ATOMIC_ACQUIRE);
#endif
  }

  // Take `*held`, which others hold for a few instructions at a time.
  LAMINA_HD void lock(u32* held) {
#if defined(__CUDA_ARCH__)
    u32 before;
    do {
      asm volatile("atom.acquire.gpu.global.exch.b32 %0, [%1], 1;" : "=r"(before) : "l"(held) : "memory");
    } while (before);
#else
    while (__atomic_exchange_n(held, 1, __ATOMIC_ACQUIRE)) rest(1000);
#endif
  }

  LAMINA_HD void unlock(u32* held) {
#if defined(__CUDA_ARCH__)
    asm volatile("st.release.gpu.global.u32 [%0], 0;" ::"l"(held) : "memory");
#else
    __atomic_store_n(held, 0, __ATOMIC_RELEASE);
#endif
  }

  LAMINA_HD u64 load(const u64* at) { return *static_cast<const volatile u64*>(at); }

  LAMINA_HD u64 now_ns() {
#if defined(__CUDA_ARCH__)
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
#else
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return u64(t.tv_sec) * 1000000000u + u64(t.tv_nsec);
#endif
  }

  LAMINA_HD void rest(u32 ns) {
#if defined(__CUDA_ARCH__)
    __nanosleep(ns);
#else
    const timespec t{0, long(ns)};
    nanosleep(&t, nullptr);
#endif
  }
};

// A poll costs one load, often of local memory. The abort word may be across PCIe, a queue must be polled, the clock is
// slow, and a thread that sleeps notices nothing. So all of these are done once in this many polls without a result. A
// caller without time polls once.
constexpr u32 kPollsPerLook = 64;

// Of a wait whose link cannot fail by itself.
struct Sound {
  LAMINA_HD Status operator()() const { return kOk; }
};

// The pace of a wait of `timeout_ns`, which a non-zero `*abort` ends, and so does a `broken` that says other than kOk.
template <class B, class Broken = Sound>
struct Pace {
  LAMINA_HD Pace(B& bus, const u64* abort, u64 timeout_ns, Broken broken = {})
      : bus_(bus), abort_(abort), timeout_ns_(timeout_ns), start_(bus.now_ns()), broken_(broken) {
    if (timeout_ns == 0) polls_ = kPollsPerLook - 1;
  }

  // After a poll that found nothing: kPending to poll again, else kAborted, kTimeout, or what `broken` says.
  LAMINA_HD Status poll_again() {
    if (++polls_ % kPollsPerLook != 0) return kPending;
    if (bus_.load(abort_)) return kAborted;
    const Status link = broken_();
    if (link != kOk) return link;
    if (bus_.now_ns() - start_ >= timeout_ns_) return kTimeout;
    bus_.rest(pause_);
    if (pause_ < B::kRestMostNs) pause_ *= 2;
    return kPending;
  }

 private:
  B& bus_;
  const u64* abort_;
  const u64 timeout_ns_, start_;
  Broken broken_;
  u32 polls_ = 0, pause_ = 32;
};

// Wait until the peer has moved `*word` beyond `known`; `*value` is what it holds then. An honest peer never moves it
// back nor beyond `most`, else kFault. A non-zero `*abort` ends the wait with kAborted; `broken` as of Pace.
template <class B, class Broken = Sound>
LAMINA_HD Status wait_signal(B& bus, const u64* word, u64 known, u64 most, const u64* abort, u64 timeout_ns, u64* value,
                             Broken broken = {}) {
  Pace<B, Broken> pace(bus, abort, timeout_ns, broken);
  for (;;) {
    *value = bus.acquire(word);
    if (*value - known > most - known) return kFault;
    if (*value != known) return kOk;
    const Status status = pace.poll_again();
    if (status != kPending) return status;
  }
}

constexpr u64 kLine = 64;
// Words of an inbox, next to each other, so that one write can set them all; slots follow from the next page on. The last
// word is used by links with a bulk lane.
constexpr u64 kSignalAt = 0, kCreditAt = 8, kBulkCreditAt = 16, kSlotsAt = 4096;
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

// Both directions of a channel, as this side knows them. Message n, from 0, is in slot n % count and has seqno
// zero + n + 1.
struct Ends {
  // Filled by the control plane.
  u8* staging;  // laid out as the peer's inbox; we write messages there
  u8* inbox;  // ours; the peer writes
  const u64* abort;
  Slots out, in;
  u64 zero;  // epoch << 48
  // The sender's.
  u64 granted, published, credited;
  // The receiver's. `reported`: how much of `released` was sent to the peer, by the receiver, or by a sender's message.
  u64 received, released, reported;
};

LAMINA_HD const u64* word_at(const u8* inbox, u64 at) { return reinterpret_cast<const u64*>(inbox + at); }

// Where the peer tells what it has released.
LAMINA_HD const u64* credit_word(const Ends& c) { return word_at(c.inbox, kCreditAt); }

// How far a link without a queue can fail by itself.
template <class B>
LAMINA_HD Status link_broken(B&, const Ends&) {
  return kOk;
}

// Wait for a free slot, which the caller counts as `granted`. A link with a queue polls it meanwhile. A caller that must
// not poll it passes the link's Ends.
template <class B, class C>
LAMINA_HD Status wait_slot(B& bus, C& c, u64 timeout_ns) {
  if (c.granted - c.credited < c.out.count) return kOk;
  u64 credit;
  const Status status = wait_signal(bus, credit_word(c), c.zero + c.credited, c.zero + c.published, c.abort, timeout_ns,
                                    &credit, [&] { return link_broken(bus, c); });
  if (status == kOk) c.credited = credit - c.zero;
  return status;
}

// The staging of a granted message's payload.
LAMINA_HD u8* payload_of(const Ends& c, u64 message) { return c.staging + c.out.at(message) + sizeof(Header); }

// The oldest granted message's header, for a payload of `bytes` that is in place.
template <class B>
LAMINA_HD void write_header(B& bus, const Ends& c, u64 bytes, const u64* tag) {
  Header* header = reinterpret_cast<Header*>(c.staging + c.out.at(c.published));
  bus.put(&header->seqno, c.zero + c.published + 1);
  bus.put(&header->length, bytes);
  for (u64 i = 0; i < kTagWords; ++i) bus.put(&header->tag[i], tag[i]);
}

// Wait for the next message; `take` then takes it. A queue is looked at as in `wait_slot`. The peer may fill slots that
// are free, whether or not it can know of them already.
template <class B, class C>
LAMINA_HD Status wait_message(B& bus, C& c, u64 timeout_ns) {
  u64 newest;
  return wait_signal(bus, word_at(c.inbox, kSignalAt), c.zero + c.received, c.zero + c.released + c.in.count, c.abort,
                     timeout_ns, &newest, [&] { return link_broken(bus, c); });
}

// Of a message that has come, its payload, until it is released.
LAMINA_HD const u8* payload_in(const Ends& c, u64 message) { return c.inbox + c.in.at(message) + sizeof(Header); }

// Copy and check the next message's header. The payload, `header->length` bytes, is at `*payload` until released.
template <class B>
LAMINA_HD Status take(B& bus, Ends& c, Header* header, const u8** payload) {
  const Header* theirs = reinterpret_cast<const Header*>(c.inbox + c.in.at(c.received));
  header->seqno = bus.load(&theirs->seqno);
  header->length = bus.load(&theirs->length);
  for (u64 i = 0; i < kTagWords; ++i) header->tag[i] = bus.load(&theirs->tag[i]);
  if (header->seqno != c.zero + c.received + 1 || header->length > c.in.bytes) return kFault;
  *payload = payload_in(c, c.received);
  c.received += 1;
  return kOk;
}

// By the receiver: nothing is read any more of the first `released` messages. Then `report`, which tells the peer, or
// `report_due`, which leaves it to the next message to do so, where it can and the peer is in no need.
template <class B>
LAMINA_HD void give_back(B& bus, Ends& c, u64 released) {
  bus.release_near(&c.released, released);
}

// Of a link whose messages bring no credit.
template <class B, class C>
LAMINA_HD Status report_due(B& bus, C& c) {
  return report(bus, c);
}

// Repeats what may find a ring full. `step` returns kPending until it is done.
template <class B, class Step>
LAMINA_HD Status persist(B& bus, const Ends& c, u64 timeout_ns, Step step) {
  Pace<B> pace(bus, c.abort, timeout_ns);
  for (;;) {
    Status status = step();
    if (status == kPending) status = pace.poll_again();
    if (status != kPending) return status;
  }
}

// Of such a link the receiver tells all at once, and it alone: the sender has nothing to tell.
template <class B, class C>
LAMINA_HD Status wait_slot_or_tell(B& bus, C& c, u64 timeout_ns) {
  return wait_slot(bus, c, timeout_ns);
}

}  // namespace lamina::device
