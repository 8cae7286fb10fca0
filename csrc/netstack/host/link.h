// A channel in shared memory as an engine: both rings, the life line and this side's own stop flag.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <cinttypes>
#include <cstdio>

#include "ring.h"

namespace lamina {

constexpr std::uint64_t kSliceNs = 50'000'000;  // a sleeper looks at the life line this often

class Link final : public Engine {
 public:
  // `life_line`: a stream socket to the peer, silent after the handshake; any event on it is the peer's end. Owned.
  Link(const Ring& out, const Ring& in, int life_line, std::uint64_t spin_ns)
      : out_(out), in_(in), life_line_(life_line), spin_ns_(spin_ns) {}

  Status look(Role role) override { return role == Role::sender ? look(out_, true) : look(in_, true); }

  Status wait(Role role, std::uint64_t deadline_ns) override {
    return role == Role::sender ? wait(out_, deadline_ns) : wait(in_, deadline_ns);
  }

  Grant grant() override {
    const Grant grant{out_.ring.index(out_.granted), out_.ring.payload(out_.granted)};
    ++out_.granted;
    return grant;
  }

  Status publish(std::uint64_t nbytes, const std::uint8_t* tag, std::uint64_t tag_bytes,
                 std::uint64_t* seqno) override {
    if (Status over = ended(); over != Status::ready) return over;
    if (peer_left()) return Status::gone;
    order_streaming_stores();  // with which the caller may have filled the slot
    *seqno = out_.publish(nbytes, tag, tag_bytes);
    return Status::ready;
  }

  Status take(Message* message) override {
    message->data = in_.ring.payload(in_.received);
    if (in_.take(&message->seqno, &message->length, message->tag)) return Status::ready;
    return fault("header of message", message->seqno, in_.ring.zero + in_.received);
  }

  void release() override {
    if (!stopped()) in_.release();
  }

  void stop(Farewell farewell, const char* reason, std::uint64_t reason_bytes) override {
    if (stopped_.exchange(true)) return;
    Control* mine = out_.ring.control;
    std::memcpy(mine->reason, reason, std::min(reason_bytes, kReasonBytes));
    mine->farewell.store(farewell, std::memory_order_release);
    Control* theirs = in_.ring.control;
    for (Bell* bell : {&mine->arrival, &mine->space, &theirs->arrival, &theirs->space}) bell->shout();
  }

  bool stopped() const override { return stopped_.load(std::memory_order_acquire); }

  void shut() override { close(life_line_); }

  void why(char text[kTextBytes]) const override {
    if (faulty_.load(std::memory_order_acquire)) {
      std::snprintf(text, kTextBytes, "the peer broke the protocol: %s %" PRIx64 " after %" PRIx64, fault_.what,
                    fault_.got, fault_.after);
      return;
    }
    const Control* theirs = in_.ring.control;
    const std::uint32_t farewell = theirs->farewell.load(std::memory_order_acquire);
    if (farewell == kAborted)
      std::snprintf(text, kTextBytes, "the peer aborted: %.*s", int(kReasonBytes), theirs->reason);
    else
      std::snprintf(text, kTextBytes,
                    farewell == kStaying ? "the peer's process is gone" : "the peer closed the channel");
  }

 private:
  struct Fault {
    const char* what;
    std::uint64_t got, after;
  };

  Status ended() const {
    if (faulty_.load(std::memory_order_acquire)) return Status::fault;
    return stopped() ? Status::stopped : Status::ready;
  }

  // The peer wrote nonsense: remembered for all later calls, and this side leaves.
  Status fault(const char* what, std::uint64_t got, std::uint64_t after) {
    if (!faulting_.exchange(true)) {
      fault_ = {what, got, after};
      faulty_.store(true, std::memory_order_release);
      stop(kAborted, "broken protocol", 15);
    }
    return Status::fault;
  }

  bool peer_left() const {
    return dead_.load(std::memory_order_relaxed) ||
           in_.ring.control->farewell.load(std::memory_order_acquire) != kStaying;
  }

  // Asks the kernel, at most once a slice; a death is remembered.
  bool peer_dead() {
    const std::uint64_t now = now_ns(CLOCK_MONOTONIC_COARSE);  // to a few ms, in a fifth of the time
    if (now - looked_ns_.load(std::memory_order_relaxed) < kSliceNs) return false;
    looked_ns_.store(now, std::memory_order_relaxed);
    pollfd p{life_line_, POLLIN | POLLRDHUP, 0};
    if (poll(&p, 1, 0) > 0) dead_.store(true, std::memory_order_relaxed);
    return dead_.load(std::memory_order_relaxed);
  }

  // What was complete before the peer's end is still handed out.
  Status look(Receiver& receiver, bool ask) {
    if (Status over = ended(); over != Status::ready) return over;
    Status status = receiver.look();
    if (status == Status::pending && (peer_left() || (ask && peer_dead()))) {
      status = receiver.look();
      if (status == Status::pending) return Status::gone;
    }
    return status == Status::fault ? fault("signal", receiver.bad, receiver.ring.zero + receiver.received) : status;
  }

  Status look(Sender& sender, bool ask) {
    if (Status over = ended(); over != Status::ready) return over;
    if (peer_left() || (ask && peer_dead())) return Status::gone;
    const Status status = sender.look();
    return status == Status::fault ? fault("credit", sender.bad, sender.ring.zero + sender.published) : status;
  }

  Bell& bell(const Receiver& receiver) { return receiver.ring.control->arrival; }
  Bell& bell(const Sender& sender) { return sender.ring.control->space; }

  template <class End>
  Status wait(End& end, std::uint64_t deadline_ns) {
    const Status status = spin(end, deadline_ns);
    return status == Status::pending ? sleep(end, deadline_ns) : status;
  }

  template <class End>
  Status spin(End& end, std::uint64_t deadline_ns) {
    std::uint64_t now = now_ns();
    if (spin_ns_ == 0 || deadline_ns <= now || !end.patience.spins()) return Status::pending;
    for (const std::uint64_t until = std::min(now + spin_ns_, deadline_ns); now < until; now = now_ns()) {
      for (int i = 0; i < 32; ++i) {
        const Status status = look(end, false);
        if (status != Status::pending) return end.patience.caught(), status;
        relax();
      }
    }
    end.patience.missed();
    return Status::pending;
  }

  // For at most one slice.
  template <class End>
  Status sleep(End& end, std::uint64_t deadline_ns) {
    const std::uint64_t now = now_ns();
    const std::uint32_t seen = bell(end).rings.load(std::memory_order_seq_cst);
    bell(end).sleeping.store(1, std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // the promise to sleep, before the last look
    Status status = look(end, true);
    if (status == Status::pending && now < deadline_ns) {
      bell(end).sleep(seen, std::min(deadline_ns - now, kSliceNs));
      status = look(end, true);
    }
    bell(end).sleeping.store(0, std::memory_order_relaxed);
    return status;
  }

  Sender out_;
  Receiver in_;
  const int life_line_;
  const std::uint64_t spin_ns_;
  std::atomic<bool> stopped_{false};  // by this side
  std::atomic<bool> dead_{false};     // the peer, by its life line
  std::atomic<std::uint64_t> looked_ns_{0};
  std::atomic<bool> faulting_{false}, faulty_{false};  // fault_ is being written, is written
  Fault fault_{};
};

}  // namespace lamina
