// What one side knows of a channel, and what of its peer's words can be true. Knows no NIC.
#pragma once

#include <atomic>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <vector>

#include "netstack/engine.h"

namespace lamina::verbs {

constexpr std::uint32_t kCredit = 1u << 31;  // in a word: the rest counts released slots, not messages
constexpr std::uint32_t kCount = kCredit - 1;

// Before the payload in a slot.
struct Header {
  std::uint64_t seqno, length;
  std::uint64_t credit;  // seqno of the newest message that the sender has released
  std::uint8_t unused[8];
  std::uint8_t tag[kTagBytes];
};
static_assert(sizeof(Header) == kLine);

// One direction's memory: slots, each after its header.
struct Slots {
  std::uint8_t* base;
  std::uint64_t slots, slot_bytes;

  static std::uint64_t stride(std::uint64_t slot_bytes) {
    return sizeof(Header) + (slot_bytes + kLine - 1) / kLine * kLine;
  }
  static std::uint64_t bytes(std::uint64_t slots, std::uint64_t slot_bytes) { return slots * stride(slot_bytes); }
  std::uint64_t at(std::uint64_t message) const { return message % slots * stride(slot_bytes); }
  Header* header(std::uint64_t message) const { return reinterpret_cast<Header*>(base + at(message)); }
  std::uint8_t* payload(std::uint64_t message) const { return base + at(message) + sizeof(Header); }
};

// Counts run from 0. Written by: the put, our completions, the peer's words, the same, the release.
class Ledger {
 public:
  Ledger(const Slots& inbox, std::uint64_t epoch) : zero(epoch << kEpochShift), inbox_(inbox), arrivals_(inbox.slots) {}

  const std::uint64_t zero;  // the seqno before the first message
  std::atomic<std::uint64_t> sent{0}, completed{0}, credited{0}, arrived{0}, released{0};

  // Slots out of `slots` that the peer and our NIC both need no more, when so many were granted.
  bool has_slot(std::uint64_t granted, std::uint64_t slots) const {
    return granted - std::min(credited.load(std::memory_order_acquire), completed.load(std::memory_order_acquire)) <
           slots;
  }

  // A word of credit; false where no honest peer says it, with `fault`.
  bool take_word(std::uint32_t word) { return take_credit((word - std::uint32_t(credited.load())) & kCount); }

  // The word of the next message, which is in its slot; false where no honest peer says it, with `fault`.
  bool take_message(std::uint32_t word) {
    const std::uint64_t n = arrived.load(std::memory_order_relaxed), expected = zero + n + 1;
    if (n - released.load(std::memory_order_acquire) >= inbox_.slots)
      return fail("message %" PRIx64 " without credit", expected, 0);
    Header& header = arrivals_[n % inbox_.slots];
    std::memcpy(&header, inbox_.header(n), sizeof header);  // the peer can write there at any time
    if (header.seqno != expected || word != (std::uint32_t(expected) & kCount))
      return fail("seqno %" PRIx64 " in place of %" PRIx64, header.seqno, expected);
    if (header.length > inbox_.slot_bytes)
      return fail("%" PRIu64 " bytes for a slot of %" PRIu64, header.length, inbox_.slot_bytes);
    if (!take_credit(header.credit - zero - credited.load())) return false;
    arrived.store(n + 1, std::memory_order_release);
    return true;
  }

  // Arrived message n, until it is released.
  void arrival(std::uint64_t n, Message* message) const {
    const Header& header = arrivals_[n % inbox_.slots];
    message->seqno = header.seqno;
    message->length = header.length;
    std::memcpy(message->tag, header.tag, kTagBytes);
    message->data = inbox_.payload(n);
  }

  const char* fault() const { return fault_; }

 private:
  // So many more slots are free at the peer.
  bool take_credit(std::uint64_t more) {
    const std::uint64_t before = credited.load(std::memory_order_relaxed), lent = sent.load() - before;
    if (more > lent) return fail("credit for %" PRIu64 " messages when %" PRIu64 " were on loan", more, lent);
    credited.store(before + more, std::memory_order_release);
    return true;
  }

  bool fail(const char* format, std::uint64_t a, std::uint64_t b) {
    std::snprintf(fault_, sizeof fault_, format, a, b);
    return false;
  }

  const Slots inbox_;
  std::vector<Header> arrivals_;  // headers of messages that have arrived, by slot
  char fault_[96] = {};
};

}  // namespace lamina::verbs
