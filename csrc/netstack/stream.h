// A channel over a connected stream socket as an engine: frames, credit, and reading while writing.
//
// The kernel copies between the socket and the slots. Every call that waits also reads: payloads go to inbox slots,
// which credit guarantees to be free, so two peers that put large messages to each other at once both get on. Either
// role reads, and a release (receiver) may write credit while a put (sender) writes data: `reading_` and `writing_`
// guard the two halves of the socket.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <mutex>

#include "frame.h"
#include "sleeper.h"

namespace lamina {

constexpr std::uint64_t kLookNs = 100'000'000;   // a sender that never waits looks at the socket this often
constexpr std::uint64_t kSleepNs = 100'000'000;  // the longest sleep in a read

class Stream final : public Engine, private Teller::Client {
 public:
  // Owns `sock`, blocking. A peer that takes no byte of a put for `stall_ns` is given up.
  Stream(int sock, const Outbox& outbox, const Slots& inbox, std::uint64_t epoch, const Seal& out, const Seal& in,
         std::uint64_t spin_ns, std::uint64_t stall_ns, Teller& teller)
      : sock_(sock),
        spin_ns_(spin_ns),
        stall_ns_(stall_ns),
        outbox_(outbox),
        in_slots_(inbox.slots),
        seal_(out),
        books_{epoch << kEpochShift},
        decoder_(books_, inbox, in),
        teller_(teller) {
    teller_.add(this);
  }
  ~Stream() { teller_.remove(this); }

  // Prepares the socket; false with errno.
  bool start() {
    const timeval timeout{0, suseconds_t(kSleepNs / 1000)};
    return sides_[0].sleeper.usable() && sides_[1].sleeper.usable() &&
           setsockopt(sock_, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout) == 0;
  }

  Status look(Role role) override {
    if (role == Role::sender && now_ns() - looked_ns_.load(std::memory_order_relaxed) > kLookNs) read(role);
    return ready(role);
  }

  Status wait(Role role, std::uint64_t deadline_ns) override {
    if (tail_bytes_ || scarce()) report();
    Side& me = side(role);
    const Status status = me.patience.spins() ? spin(role, deadline_ns) : Status::pending;
    if (status != Status::pending) return status;
    if (tail_bytes_ == 0 && deadline_ns > now_ns() + 2 * kSleepNs && read(role, 0)) return ready(role);
    const short events = tail_bytes_ ? POLLIN | POLLOUT : POLLIN;
    me.sleeper.sleep(sock_, events, deadline_ns, [&] { return ready(role) != Status::pending; });
    if (tail_bytes_ || scarce()) report();
    read(role);
    return ready(role);
  }

  Grant grant() override {
    const std::uint64_t n = granted_++;
    return {n % outbox_.slots, outbox_.slot(n)};
  }

  Status publish(std::uint64_t nbytes, const std::uint8_t* tag, std::uint64_t tag_bytes, const std::uint8_t* source,
                 std::uint64_t* seqno) override {
    if (Status over = ended(); over != Status::ready) return over;
    while (writing_.test_and_set(std::memory_order_acquire)) relax();  // credit is being written
    const std::uint64_t n = books_.sent.load(std::memory_order_relaxed);
    *seqno = books_.zero + n + 1;
    Frame* frame = outbox_.frame(n);
    const std::uint8_t* payload = source ? source : outbox_.slot(n);
    fill(frame, kData, nbytes, *seqno, payload, tag, tag_bytes);
    books_.sent.store(n + 1, std::memory_order_release);
    unsent_[0] = {tail_, tail_bytes_.exchange(0)};
    unsent_[1] = {frame, kFrameBytes + (source ? 0 : nbytes)};  // the slot lies behind its frame
    unsent_[2] = {const_cast<std::uint8_t*>(source), source ? nbytes : 0};
    stalled_ns_ = 0;
    return resume();
  }

  Status resume() override {
    Status status = push();
    if (status == Status::pending) return status;
    writing_.clear(std::memory_order_release);
    if (status == Status::ready && scarce()) report();  // what another thread released meanwhile
    return status;
  }

  void give_up(const char* why) override {
    lose(Status::gone, why, true);
    writing_.clear(std::memory_order_release);
  }

  Status take(Message* message) override {
    const Frame& frame = decoder_.arrival(taken_);
    message->seqno = frame.seqno;
    message->length = frame.length;
    std::memcpy(message->tag, frame.tag, kTagBytes);
    message->data = decoder_.payload(taken_++);
    return Status::ready;
  }

  void release() override {
    books_.released.fetch_add(1, std::memory_order_release);
    if (ended() == Status::ready && scarce()) report();
  }

  void stop(Farewell farewell, const char* reason, std::uint64_t reason_bytes) override {
    if (stopped_.exchange(true)) return;
    if (!writing_.test_and_set(std::memory_order_acquire)) {  // else the stream is inside a frame
      struct {
        Frame frame;
        char text[kReasonBytes + 1];
      } last;
      const int aborted = farewell == kAborted;
      const int most = aborted ? int(std::min(reason_bytes, kReasonBytes)) : 0;
      const int bytes = std::snprintf(last.text, sizeof last.text, "%s%.*s",
                                      aborted ? "aborted: " : "closed the channel", most, reason);
      const auto length = std::min(std::uint64_t(bytes), kReasonBytes);
      fill(&last.frame, kFarewell, length, 0, reinterpret_cast<std::uint8_t*>(last.text), nullptr, 0);
      if (tail_bytes_ == 0) send(sock_, &last, kFrameBytes + length, MSG_NOSIGNAL | MSG_DONTWAIT);
      writing_.clear(std::memory_order_release);
    }
    shutdown(sock_, SHUT_RDWR);
    ring(Role::sender);
    ring(Role::receiver);
  }

  bool stopped() const override { return stopped_.load(std::memory_order_acquire); }

  void shut() override {
    teller_.remove(this);
    close(sock_);
  }

  void why(char text[kTextBytes]) const override { std::memcpy(text, why_, kTextBytes); }

 private:
  struct Side {
    Sleeper sleeper;
    Patience patience;
  };

  Side& side(Role role) { return sides_[role == Role::sender ? 0 : 1]; }
  void ring(Role role) { side(role).sleeper.ring(); }

  Status ended() const {
    if (stopped()) return Status::stopped;
    return end_.load(std::memory_order_acquire);
  }

  // What was complete before the peer's end is still handed out.
  Status ready(Role role) const {
    const Status over = ended();
    if (over == Status::stopped) return over;
    if (role == Role::receiver && taken_ < books_.arrived.load(std::memory_order_acquire)) return Status::ready;
    if (over != Status::ready) return over;
    if (role == Role::receiver) return Status::pending;
    return granted_ - books_.credited.load(std::memory_order_acquire) < outbox_.slots ? Status::ready : Status::pending;
  }

  Status spin(Role role, std::uint64_t deadline_ns) {
    read(role);
    Status status = ready(role);
    std::uint64_t now = now_ns();
    if (status != Status::pending || now >= deadline_ns) return status;
    for (const std::uint64_t until = std::min(now + spin_ns_, deadline_ns); now < until; now = now_ns()) {
      read(role);
      status = ready(role);
      if (status != Status::pending) return side(role).patience.caught(), status;
    }
    side(role).patience.missed();
    return Status::pending;
  }

  // Reads what has come until `role` can go on or nothing is left; with `flags` 0 sleeps, for a slice at most, until
  // something comes. False if another thread is reading, which rings.
  bool read(Role role, int flags = MSG_DONTWAIT) {
    const std::unique_lock<std::mutex> lock(reading_, std::try_to_lock);
    if (!lock) return false;
    looked_ns_.store(now_ns(), std::memory_order_relaxed);
    if (flags == 0 && ready(role) != Status::pending) return true;
    while (end_.load(std::memory_order_relaxed) == Status::ready) {
      iovec pieces[2] = {};
      const std::size_t count = decoder_.room(pieces);
      const std::uint64_t room = pieces[0].iov_len + pieces[1].iov_len;
      const ssize_t got = receive(pieces, count, flags);
      if (got < 0 && errno == EINTR && flags) continue;
      if (got < 0 && (errno == EAGAIN || errno == EINTR)) return true;
      if (got < 0) return broke(errno), true;
      if (got == 0) return lose(Status::gone, "the peer's process is gone", false), true;
      digest(std::uint64_t(got), role);
      if (std::uint64_t(got) < room || ready(role) != Status::pending) return true;
      flags = MSG_DONTWAIT;
    }
    return true;
  }

  ssize_t receive(iovec* pieces, std::size_t count, int flags) {
    if (count == 1) return recv(sock_, pieces[0].iov_base, pieces[0].iov_len, flags);
    msghdr message{};
    message.msg_iov = pieces;
    message.msg_iovlen = count;
    return recvmsg(sock_, &message, flags);
  }

  void digest(std::uint64_t bytes, Role role) {
    const std::uint64_t credited = books_.credited, arrived = books_.arrived;
    if (!decoder_.took(bytes)) {
      char text[kTextBytes];
      std::snprintf(text, sizeof text, "the peer broke the protocol: %s", decoder_.fault());
      return lose(Status::fault, text, true);
    }
    if (role != Role::sender && credited != books_.credited) ring(Role::sender);
    if (role != Role::receiver && arrived != books_.arrived) ring(Role::receiver);
    if (decoder_.ended()) {
      char text[kTextBytes];
      std::snprintf(text, sizeof text, "the peer %s", decoder_.reason());
      lose(Status::gone, text, false);
    }
  }

  void broke(int error) {
    char text[kTextBytes];
    std::snprintf(text, sizeof text, "the connection broke (%s)", std::strerror(error));
    lose(Status::gone, text, false);
  }

  // The peer is lost: remembers why, wakes both roles. Only the first loss counts.
  void lose(Status how, const char* why, bool shut) {
    if (!ending_.exchange(true)) {
      std::snprintf(why_, sizeof why_, "%s", why);
      end_.store(how, std::memory_order_release);
    }
    if (shut) shutdown(sock_, SHUT_RDWR);
    ring(Role::sender);
    ring(Role::receiver);
  }

  // With `writing_` held: the next frame, which carries the newest credit.
  void fill(Frame* frame, Kind kind, std::uint64_t length, std::uint64_t seqno, const std::uint8_t* payload,
            const std::uint8_t* tag, std::uint64_t tag_bytes) {
    const std::uint64_t released = books_.released.load(std::memory_order_acquire);
    *frame = {};
    frame->kind = kind;
    frame->length = length;
    frame->seqno = seqno;
    frame->credit = books_.zero + released;
    if (tag_bytes) std::memcpy(frame->tag, tag, tag_bytes);
    close_frame(frame, seal_, frames_++, payload);
    reported_ = released;
  }

  ssize_t send_unsent() {
    if (unsent_[0].iov_len + unsent_[2].iov_len == 0)
      return send(sock_, unsent_[1].iov_base, unsent_[1].iov_len, MSG_NOSIGNAL | MSG_DONTWAIT);
    msghdr message{};
    message.msg_iov = unsent_;
    message.msg_iovlen = 3;
    return sendmsg(sock_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  }

  // Hands `unsent_` to the kernel; reads while it cannot take more. Pending: a signal came.
  Status push() {
    while (true) {
      ssize_t taken = send_unsent();
      if (taken < 0 && errno == EINTR) return Status::pending;
      if (taken < 0 && errno != EAGAIN) {
        const int error = errno;
        read(Role::sender);  // its farewell, if there is one
        broke(error);
        return ended();
      }
      if (taken > 0) stalled_ns_ = 0;
      for (iovec& piece : unsent_) {
        const std::size_t part = std::min(piece.iov_len, std::size_t(std::max(taken, ssize_t(0))));
        piece = {static_cast<std::uint8_t*>(piece.iov_base) + part, piece.iov_len - part};
        taken -= ssize_t(part);
      }
      if (unsent_[0].iov_len + unsent_[1].iov_len + unsent_[2].iov_len == 0) return Status::ready;
      const std::uint64_t now = now_ns();
      if (stalled_ns_ == 0) stalled_ns_ = now;
      if (now - stalled_ns_ >= stall_ns_) give_up_stalled();
      read(Role::sender);
      if (Status over = ended(); over != Status::ready) return over;
      if (!side(Role::sender).sleeper.sleep(sock_, POLLIN | POLLOUT, stalled_ns_ + stall_ns_, [&] {
            return ended() != Status::ready;
          }))
        return Status::pending;
    }
  }

  void give_up_stalled() {
    char text[kTextBytes];
    std::snprintf(text, sizeof text, "the peer took no bytes for %g s", double(stall_ns_) / 1e9);
    lose(Status::gone, text, false);
  }

  // Tells the peer what was released, unless another thread is writing, whose frame does so or which does it after.
  void report() {
    while ((tail_bytes_ || reported_ < books_.released) && !writing_.test_and_set(std::memory_order_acquire)) {
      std::uint64_t left = tail_bytes_;
      if (left == 0 && reported_ < books_.released) {
        Frame frame;
        fill(&frame, kCredit, 0, 0, nullptr, nullptr, 0);
        std::memcpy(tail_, &frame, left = kFrameBytes);
      }
      const ssize_t taken = left ? send(sock_, tail_, left, MSG_NOSIGNAL | MSG_DONTWAIT) : 0;
      const bool later = taken < 0 && errno == EAGAIN;
      if (taken > 0) std::memmove(tail_, tail_ + taken, left - std::uint64_t(taken));
      // On an error the peer has left; reading will say why.
      tail_bytes_ = later ? left : taken < 0 ? 0 : left - std::uint64_t(taken);
      writing_.clear(std::memory_order_release);
      if (later) return;  // the next call that waits goes on
    }
  }

  void tell() override {
    if (!stopped() && reported_ < books_.released) report();
  }

  // For all we know the peer has a quarter of its slots left, or one. Until then credit waits for a message to ride on.
  bool scarce() const {
    const std::uint64_t spare = std::max(in_slots_ / 4, std::uint64_t{1});
    return reported_ < books_.released && books_.arrived - reported_ + spare >= in_slots_;
  }

  const int sock_;
  const std::uint64_t spin_ns_, stall_ns_;
  const Outbox outbox_;
  const std::uint64_t in_slots_;
  const Seal seal_;
  Books books_;
  Side sides_[2];
  std::uint64_t granted_ = 0;  // by the sender
  std::uint64_t taken_ = 0;    // by the receiver

  std::mutex reading_;
  Decoder decoder_;
  std::atomic<std::uint64_t> looked_ns_{now_ns()};

  std::atomic_flag writing_ = ATOMIC_FLAG_INIT;
  std::uint64_t frames_ = 0, stalled_ns_ = 0;
  iovec unsent_[3] = {};            // of the put in progress
  std::uint8_t tail_[kFrameBytes];  // of a credit frame that the kernel took in part, so many bytes:
  std::atomic<std::uint64_t> tail_bytes_{0};
  std::atomic<std::uint64_t> reported_{0};  // released messages that a frame told of

  std::atomic<bool> stopped_{false};        // by this side
  std::atomic<bool> ending_{false};         // the peer's end is being written
  std::atomic<Status> end_{Status::ready};  // then gone or fault
  char why_[kTextBytes] = {};
  Teller& teller_;
};

}  // namespace lamina
