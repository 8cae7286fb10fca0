// A channel in shared memory: two rings of fixed slots, one for each direction.
//
// Nothing here knows Python. The peer can write any byte of the mapping at any time. So every word that it owns is
// loaded once, and checked against what this side knows. Only the checked copy is used.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ctime>

#include "netstack/engine.h"

namespace lamina {

constexpr std::uint64_t kPage = 4096;

static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "rings need lock-free 64-bit atomics");

// An event count. A thread that changes what the sleeper waits for rings it. The sleeper reads `rings` before its check,
// and sleeps only while the number is the same, so no ring is lost. At most one thread sleeps on a bell.
struct Bell {
  std::atomic<std::uint32_t> rings;
  std::atomic<std::uint32_t> sleeping;

  void ring() {
    std::atomic_thread_fence(std::memory_order_seq_cst);  // what changed, before the look at `sleeping`
    if (sleeping.load(std::memory_order_relaxed)) shout();
  }
  void shout() {
    rings.fetch_add(1, std::memory_order_seq_cst);
    syscall(SYS_futex, &rings, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
  void sleep(std::uint32_t seen, std::uint64_t ns) {
    const timespec t{time_t(ns / 1'000'000'000), long(ns % 1'000'000'000)};
    syscall(SYS_futex, &rings, FUTEX_WAIT, seen, &t, nullptr, 0);
  }
};

struct Control {
  alignas(kLine) std::atomic<std::uint64_t> signal;    // sender: seqno of the newest message
  alignas(kLine) std::atomic<std::uint64_t> credit;    // receiver: seqno of the newest message it has released
  alignas(kLine) Bell arrival;                         // the receiver sleeps on it
  alignas(kLine) Bell space;                           // the sender sleeps on it
  alignas(kLine) std::atomic<std::uint32_t> farewell;  // sender: why it left; `reason` is written first
  char reason[kReasonBytes];
};
static_assert(sizeof(Control) <= kPage);

struct Header {
  std::atomic<std::uint64_t> seqno;
  std::atomic<std::uint64_t> length;
  std::uint8_t tag[kTagBytes];
  std::uint8_t unused[kLine - 16 - kTagBytes];
};
static_assert(sizeof(Header) == kLine);

// One direction: a control page, then `slots` slots of a header line and the payload, each on its own pages.
struct Ring {
  Control* control;
  std::uint8_t* first;
  std::uint64_t slots, slot_bytes, zero;  // zero: epoch << 48, the seqno before the first message

  static std::uint64_t stride(std::uint64_t slot_bytes) { return (kLine + slot_bytes + kPage - 1) / kPage * kPage; }
  static std::uint64_t bytes(std::uint64_t slots, std::uint64_t slot_bytes) {
    return kPage + slots * stride(slot_bytes);
  }

  Ring(std::uint8_t* base, std::uint64_t slots_, std::uint64_t slot_bytes_, std::uint64_t epoch)
      : control(reinterpret_cast<Control*>(base)), first(base + kPage), slots(slots_), slot_bytes(slot_bytes_),
        zero(epoch << kEpochShift) {}

  // Before the peer gets to see the memory: no message, no credit, in this epoch.
  void clear() const {
    control->signal.store(zero, std::memory_order_relaxed);
    control->credit.store(zero, std::memory_order_release);
  }

  std::uint64_t index(std::uint64_t message) const { return message % slots; }
  std::uint8_t* slot(std::uint64_t message) const { return first + index(message) * stride(slot_bytes); }
  Header* header(std::uint64_t message) const { return reinterpret_cast<Header*>(slot(message)); }
  std::uint8_t* payload(std::uint64_t message) const { return slot(message) + kLine; }
};

// The sending end. Counts run from 0 and never wrap: message n is in slot n % slots and has seqno zero + n + 1.
struct Sender {
  Ring ring;
  std::uint64_t granted = 0, published = 0, credited = 0;
  Patience patience;
  std::uint64_t bad = 0;  // what the peer wrote, when look() says fault

  explicit Sender(const Ring& r) : ring(r) {}

  std::uint64_t done() const { return published; }

  Status look() {
    if (granted - credited < ring.slots) return Status::ready;
    // A wrong epoch makes the difference huge, so the one comparison covers it.
    const std::uint64_t credit = ring.control->credit.load(std::memory_order_acquire) - ring.zero;
    if (credit < credited || credit > published) {
      bad = credit + ring.zero;
      return Status::fault;
    }
    credited = credit;
    return granted - credited < ring.slots ? Status::ready : Status::pending;
  }

  std::uint64_t publish(std::uint64_t nbytes, const std::uint8_t* tag, std::uint64_t tag_bytes) {
    const std::uint64_t seqno = ring.zero + published + 1;
    Header* header = ring.header(published);
    header->seqno.store(seqno, std::memory_order_relaxed);
    header->length.store(nbytes, std::memory_order_relaxed);
    std::memset(header->tag, 0, kTagBytes);
    std::memcpy(header->tag, tag, std::min(tag_bytes, kTagBytes));
    ring.control->signal.store(seqno, std::memory_order_release);
    ring.control->arrival.ring();
    ++published;
    // The receiver read these lines last: fetch them back now, before the next message needs them.
    __builtin_prefetch(ring.header(published), 1);
    __builtin_prefetch(ring.payload(published), 1);
    return seqno;
  }
};

// The receiving end.
struct Receiver {
  Ring ring;
  std::uint64_t received = 0, released = 0;
  Patience patience;
  std::uint64_t bad = 0;  // what the peer wrote, when look() says fault

  explicit Receiver(const Ring& r) : ring(r) {}

  std::uint64_t done() const { return received; }

  Status look() {
    const std::uint64_t signal = ring.control->signal.load(std::memory_order_acquire) - ring.zero;
    if (signal < received || signal > released + ring.slots) {
      bad = signal + ring.zero;
      return Status::fault;
    }
    return signal > received ? Status::ready : Status::pending;
  }

  // The next message's length and tag, copied; false if the header is not that of the next message.
  bool take(std::uint64_t* seqno, std::uint64_t* length, std::uint8_t* tag) {
    const Header* header = ring.header(received);
    *seqno = header->seqno.load(std::memory_order_relaxed);
    *length = header->length.load(std::memory_order_relaxed);
    std::memcpy(tag, header->tag, kTagBytes);
    if (*seqno != ring.zero + received + 1 || *length > ring.slot_bytes) return false;
    ++received;
    return true;
  }

  void release() {
    ++released;
    ring.control->credit.store(ring.zero + released, std::memory_order_release);
    ring.control->space.ring();
  }
};

}  // namespace lamina
