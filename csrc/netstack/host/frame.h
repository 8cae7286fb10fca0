// Frames of a byte stream: how they are written, and the decoder that trusts none of their bytes.
//
// A frame is a header of 96 bytes, then `length` bytes of payload. The header's check covers all of the header, the
// payload's check within it the payload. With a cipher all but the header's check is hidden: the payload first, then
// the header with the payload's check. A decoder copies a header out of what was read, opens the copy, checks it
// against what this side knows, and uses only the copy.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cinttypes>
#include <cstdio>
#include <vector>

#include "guard.h"
#include "netstack/engine.h"

namespace lamina {

enum Kind : std::uint16_t { kData = 1, kCredit = 2, kFarewell = 3 };

struct Frame {
  std::uint16_t kind;
  std::uint8_t unused[6];
  std::uint64_t length;
  std::uint64_t seqno;   // of the message; 0 where there is none
  std::uint64_t credit;  // newest seqno that the frame's sender has released
  std::uint8_t tag[kTagBytes];
  std::uint8_t payload_check[kCheckBytes];
  std::uint8_t header_check[kCheckBytes];  // last: it covers everything before it
};
static_assert(sizeof(Frame) == 96);
constexpr std::uint64_t kFrameBytes = sizeof(Frame);

inline std::uint8_t* bytes_of(Frame* frame) { return reinterpret_cast<std::uint8_t*>(frame); }

// Fills the header's check in, and hides what is to be hidden.
inline void close_header(Frame* frame, Guard& guard, std::uint64_t count) {
  guard.begin(kHeaderPart, count);
  guard.seal(bytes_of(frame), kFrameBytes - kCheckBytes);
  guard.seal_end(frame->header_check);
}

// Makes a frame ready to be sent, and hides its payload in place; `count`: of the frame in its direction, from 0.
inline void close_frame(Frame* frame, Guard& guard, std::uint64_t count, std::uint8_t* payload) {
  guard.begin(kPayloadPart, count);
  guard.seal(payload, frame->length);
  guard.seal_end(frame->payload_check);
  close_header(frame, guard, count);
}

// The memory of one direction: slots, each on its own cache lines.
struct Slots {
  std::uint8_t* base;
  std::uint64_t slots, slot_bytes;

  static std::uint64_t stride(std::uint64_t slot_bytes) { return (slot_bytes + kLine - 1) / kLine * kLine; }
  static std::uint64_t bytes(std::uint64_t slots, std::uint64_t slot_bytes) { return slots * stride(slot_bytes); }
  std::uint8_t* slot(std::uint64_t message) const { return base + message % slots * stride(slot_bytes); }
};

// The memory where a sender stages its messages: Slots, each after room for its frame, so that both are one piece.
struct Outbox {
  std::uint8_t* base;
  std::uint64_t slots, slot_bytes;

  static constexpr std::uint64_t kRoom = (kFrameBytes + kLine - 1) / kLine * kLine;
  static std::uint64_t stride(std::uint64_t slot_bytes) { return kRoom + Slots::stride(slot_bytes); }
  static std::uint64_t bytes(std::uint64_t slots, std::uint64_t slot_bytes) { return slots * stride(slot_bytes); }
  std::uint8_t* slot(std::uint64_t message) const { return base + message % slots * stride(slot_bytes) + kRoom; }
  Frame* frame(std::uint64_t message) const { return reinterpret_cast<Frame*>(slot(message) - kFrameBytes); }
};

// What one side knows of a channel; counts run from 0. Written by: the put, the decoder, the decoder, the release.
struct Books {
  std::uint64_t zero;  // epoch << 48, the seqno before the first message
  std::atomic<std::uint64_t> sent{0}, credited{0}, arrived{0}, released{0};
};

class Decoder {
 public:
  // `least_ahead`: payloads of fewer bytes are worth staging.
  Decoder(Books& books, const Slots& inbox, Guard guard, std::uint64_t least_ahead = 4097)
      : books_(books), inbox_(inbox), guard_(std::move(guard)), least_ahead_(least_ahead), arrivals_(inbox.slots) {}

  // The places of the next bytes of the stream; at most three pieces. Between messages these are a header, then as much
  // payload as the last message had, into the next slot. So a message of the same size takes one call.
  std::size_t room(iovec pieces[3]) {
    std::size_t n = 0;
    ahead_ = 0;
    if (left_) {
      pieces[n++] = {into_, left_};
    } else if (last_length_ >= least_ahead_ && next_is_free()) {
      ahead_ = std::min(last_length_, kAhead);
      pieces[n++] = {stage_ + staged_, kFrameBytes - staged_};
      pieces[n++] = {next_slot(), ahead_};
      pieces[n++] = {stage_ + kFrameBytes + ahead_, kStage};
      return n;
    }
    pieces[n++] = {stage_ + staged_, kStage - staged_};
    return n;
  }

  // So many bytes went there. False once they cannot come from an honest peer; `fault` then says why.
  bool took(std::uint64_t bytes) {
    const std::uint64_t direct = std::min(bytes, left_);
    absorb(direct);
    staged_ += bytes - direct;
    std::uint64_t used = 0;
    if (ahead_ && staged_ >= kFrameBytes && !took_ahead(&used)) return false;
    while (!left_ && !ended()) {
      if (open_) {
        if (!close()) return false;
        continue;
      }
      if (staged_ - used < kFrameBytes) break;
      std::memcpy(&frame_, stage_ + used, kFrameBytes);
      used += kFrameBytes;
      if (!open()) return false;
      const std::uint64_t part = std::min(left_, staged_ - used);
      if (part) std::memcpy(into_, stage_ + used, part);
      absorb(part);
      used += part;
    }
    staged_ -= used;
    if (used && staged_) std::memmove(stage_, stage_ + used, staged_);
    return true;
  }

  bool ended() const { return farewell_; }
  const char* reason() const { return reason_; }  // of the peer's farewell
  const char* fault() const { return fault_; }

  // Arrived message n, until it is released.
  const Frame& arrival(std::uint64_t n) const { return arrivals_[n % inbox_.slots]; }
  std::uint8_t* payload(std::uint64_t n) const { return inbox_.slot(n); }

 private:
  static constexpr std::uint64_t kAhead = 64 << 10;
  static constexpr std::uint64_t kStage = 4096 + 4 * kFrameBytes;

  bool next_is_free() const {
    return books_.arrived.load(std::memory_order_relaxed) - books_.released.load(std::memory_order_acquire) <
           inbox_.slots;
  }
  std::uint8_t* next_slot() const { return inbox_.slot(books_.arrived.load(std::memory_order_relaxed)); }

  // A header has arrived (never more: whole frames do not stay staged), and after it bytes that went into the next slot.
  // Bytes beyond its payload move to where they would be if all had been staged.
  bool took_ahead(std::uint64_t* used) {
    const std::uint64_t ahead = std::min(staged_ - kFrameBytes, ahead_);
    const std::uint8_t* slot = next_slot();
    std::memcpy(&frame_, stage_, kFrameBytes);
    if (!open()) return false;
    const std::uint64_t part = frame_.kind == kData ? std::min(left_, ahead) : 0;
    if (ahead > part) std::memcpy(stage_ + kFrameBytes + part, slot + part, ahead - part);
    absorb(part);
    *used = kFrameBytes + part;
    const std::uint64_t rest = std::min(left_, staged_ - *used);
    if (rest) std::memcpy(into_, stage_ + *used, rest);
    absorb(rest);
    *used += rest;
    return true;
  }

  void absorb(std::uint64_t bytes) {
    if (bytes) guard_.open(into_, bytes);
    into_ += bytes;
    left_ -= bytes;
  }

  // A header is complete.
  bool open() {
    guard_.begin(kHeaderPart, frames_);
    guard_.open(bytes_of(&frame_), kFrameBytes - kCheckBytes);
    if (!guard_.open_end(frame_.header_check)) return fail("a header was changed on its way");
    if (!plausible()) return false;
    const std::uint64_t credit = frame_.credit - books_.zero;
    if (credit > books_.credited.load(std::memory_order_relaxed))
      books_.credited.store(credit, std::memory_order_release);
    into_ = frame_.kind == kData ? inbox_.slot(books_.arrived.load(std::memory_order_relaxed))
                                 : reinterpret_cast<std::uint8_t*>(reason_);
    left_ = frame_.length;
    guard_.begin(kPayloadPart, frames_);
    return open_ = true;
  }

  // A payload is complete.
  bool close() {
    if (!guard_.open_end(frame_.payload_check)) return fail("a payload was changed on its way");
    open_ = false;
    ++frames_;
    if (frame_.kind == kFarewell) {
      reason_[frame_.length] = 0;
      farewell_ = true;
    } else if (frame_.kind == kData) {
      const std::uint64_t n = books_.arrived.load(std::memory_order_relaxed);
      arrivals_[n % inbox_.slots] = frame_;
      last_length_ = frame_.length;
      books_.arrived.store(n + 1, std::memory_order_release);
    }
    return true;
  }

  // Could an honest peer have sent this header?
  bool plausible() {
    const std::uint64_t arrived = books_.arrived.load(std::memory_order_relaxed);
    const std::uint64_t credit = frame_.credit - books_.zero;  // of a wrong epoch it is huge
    const std::uint64_t sent = books_.sent.load(std::memory_order_acquire);
    if (credit < books_.credited.load(std::memory_order_relaxed) || credit > sent)
      return fail("credit %" PRIx64 " when %" PRIx64 " was sent", frame_.credit, books_.zero + sent);
    if (frame_.kind == kData) {
      if (frame_.seqno != books_.zero + arrived + 1)
        return fail("seqno %" PRIx64 " after %" PRIx64, frame_.seqno, books_.zero + arrived);
      if (arrived - books_.released.load(std::memory_order_acquire) >= inbox_.slots)
        return fail("message %" PRIx64 " without credit", frame_.seqno);
      if (frame_.length > inbox_.slot_bytes)
        return fail("%" PRIu64 " bytes for a slot of %" PRIu64, frame_.length, inbox_.slot_bytes);
      return true;
    }
    if (frame_.seqno == 0 && frame_.kind == kCredit && frame_.length == 0) return true;
    if (frame_.seqno == 0 && frame_.kind == kFarewell && frame_.length <= kReasonBytes) return true;
    return fail("frame of kind %" PRIu64 " with %" PRIu64 " bytes", frame_.kind, frame_.length);
  }

  bool fail(const char* format, std::uint64_t a = 0, std::uint64_t b = 0) {
    std::snprintf(fault_, sizeof fault_, format, a, b);
    return false;
  }

  Books& books_;
  const Slots inbox_;
  Guard guard_;
  const std::uint64_t least_ahead_;
  std::vector<Frame> arrivals_;  // headers of messages that have arrived, by slot
  Frame frame_{};                // the header that was checked last
  bool open_ = false;            // a header without its whole payload yet
  bool farewell_ = false;
  std::uint64_t frames_ = 0, staged_ = 0, left_ = 0, last_length_ = 0;
  std::uint64_t ahead_ = 0;       // bytes of the current read, after a header, that go to the next slot
  std::uint8_t* into_ = nullptr;  // the next `left_` bytes go there
  char reason_[kReasonBytes + 1] = {};
  char fault_[96] = {};
  // What is read beyond a payload: with a small message, one read takes header and payload. The rest of a larger
  // payload goes from the kernel into its slot.
  alignas(kLine) std::uint8_t stage_[kFrameBytes + kAhead + kStage];
};

}  // namespace lamina
