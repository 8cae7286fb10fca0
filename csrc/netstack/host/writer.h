// The writing half of a stream: messages, credit and the farewell, as frames in the order of one counter.
#pragma once

#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <cstdio>

#include "frame.h"

namespace lamina {

// Between `lock` and `unlock` the holder writes. Credit never waits for the lock: it leaves with the next write.
class Writer {
 public:
  enum class Push { done, full, interrupted, broken };

  Writer(int sock, const Outbox& outbox, std::uint64_t in_slots, Guard guard, Books& books)
      : sock_(sock), outbox_(outbox), in_slots_(in_slots), guard_(std::move(guard)), books_(books) {}

  bool try_lock() { return !writing_.test_and_set(std::memory_order_acquire); }
  void lock() {
    while (!try_lock()) relax();  // credit is being written
  }
  void unlock() { writing_.clear(std::memory_order_release); }

  // The next message of the outbox; `push` sends it.
  std::uint64_t begin(std::uint64_t nbytes, const std::uint8_t* tag, std::uint64_t tag_bytes) {
    const std::uint64_t n = books_.sent.load(std::memory_order_relaxed);
    const std::uint64_t seqno = books_.zero + n + 1;
    Frame* frame = outbox_.frame(n);
    fill(frame, kData, nbytes, seqno, outbox_.slot(n), tag, tag_bytes);
    books_.sent.store(n + 1, std::memory_order_release);
    unsent_[0] = {tail_, tail_bytes_.exchange(0)};
    unsent_[1] = {frame, kFrameBytes + nbytes};  // the slot follows its frame
    return seqno;
  }

  // Hands the kernel what it takes; `progress` says whether it took anything.
  Push push(bool* progress) {
    ssize_t taken = send_unsent();
    *progress = taken > 0;
    if (taken < 0) return errno == EINTR ? Push::interrupted : errno == EAGAIN ? Push::full : Push::broken;
    for (iovec& piece : unsent_) {
      const std::size_t part = std::min(piece.iov_len, std::size_t(taken));
      piece = {static_cast<std::uint8_t*>(piece.iov_base) + part, piece.iov_len - part};
      taken -= ssize_t(part);
    }
    return unsent_[0].iov_len + unsent_[1].iov_len ? Push::full : Push::done;
  }

  // With `lock`: tells the peer why this side leaves, if that fits right now.
  void farewell(Farewell how, const char* reason, std::uint64_t reason_bytes) {
    struct {
      Frame frame;
      char text[kReasonBytes + 1];
    } last;
    const bool aborted = how == kAborted;
    const int most = aborted ? int(std::min(reason_bytes, kReasonBytes)) : 0;
    const int bytes = std::snprintf(last.text, sizeof last.text, "%s%.*s", aborted ? "aborted: " : "closed the channel",
                                    most, reason);
    const auto length = std::min(std::uint64_t(bytes), kReasonBytes);
    auto* text = reinterpret_cast<std::uint8_t*>(last.text);
    fill(&last.frame, kFarewell, length, 0, text, nullptr, 0);
    if (tail_bytes_ == 0) send(sock_, &last, kFrameBytes + length, MSG_NOSIGNAL | MSG_DONTWAIT);
  }

  // Tells the peer what was released, unless another thread is writing, whose frame does so or which does it after.
  void report() {
    while ((tail_bytes_ || owes()) && try_lock()) {
      std::uint64_t left = tail_bytes_;
      if (left == 0 && owes()) {
        Frame frame;
        fill(&frame, kCredit, 0, 0, nullptr, nullptr, 0);
        std::memcpy(tail_, &frame, left = kFrameBytes);
      }
      const ssize_t taken = left ? send(sock_, tail_, left, MSG_NOSIGNAL | MSG_DONTWAIT) : 0;
      const bool later = taken < 0 && errno == EAGAIN;
      if (taken > 0) std::memmove(tail_, tail_ + taken, left - std::uint64_t(taken));
      // On an error the peer has left; reading will say why.
      tail_bytes_ = later ? left : taken < 0 ? 0 : left - std::uint64_t(taken);
      unlock();
      if (later) return;  // the next call that waits goes on
    }
  }

  // For all we know the peer has a quarter of its slots left, or one. Until then credit waits for a message to ride on.
  void report_if_scarce() {
    const std::uint64_t spare = std::max(in_slots_ / 4, std::uint64_t{1});
    if (tail_bytes_ || (owes() && books_.arrived - reported_ + spare >= in_slots_)) report();
  }

  bool owes() const { return reported_ < books_.released; }
  bool unfinished() const { return tail_bytes_ != 0; }  // a credit frame

 private:
  // With `lock`: the next frame, which carries the newest credit.
  void fill(Frame* frame, Kind kind, std::uint64_t length, std::uint64_t seqno, std::uint8_t* payload,
            const std::uint8_t* tag, std::uint64_t tag_bytes) {
    const std::uint64_t released = books_.released.load(std::memory_order_acquire);
    *frame = {};
    frame->kind = kind;
    frame->length = length;
    frame->seqno = seqno;
    frame->credit = books_.zero + released;
    if (tag_bytes) std::memcpy(frame->tag, tag, tag_bytes);
    close_frame(frame, guard_, frames_++, payload);
    reported_ = released;
  }

  ssize_t send_unsent() {
    if (unsent_[0].iov_len == 0)
      return send(sock_, unsent_[1].iov_base, unsent_[1].iov_len, MSG_NOSIGNAL | MSG_DONTWAIT);
    msghdr message{};
    message.msg_iov = unsent_;
    message.msg_iovlen = 2;
    return sendmsg(sock_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  }

  const int sock_;
  const Outbox outbox_;
  const std::uint64_t in_slots_;
  Guard guard_;
  Books& books_;
  std::atomic_flag writing_ = ATOMIC_FLAG_INIT;
  std::uint64_t frames_ = 0;
  iovec unsent_[2] = {};            // of the message that was begun
  std::uint8_t tail_[kFrameBytes];  // of a credit frame that the kernel took in part, so many bytes:
  std::atomic<std::uint64_t> tail_bytes_{0};
  std::atomic<std::uint64_t> reported_{0};  // released messages that a frame has reported
};

}  // namespace lamina
