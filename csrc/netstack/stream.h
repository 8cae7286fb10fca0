// A channel over a connected stream socket as an engine: frames, credit, and reading while writing.
//
// The kernel copies between the socket and the slots; no thread of ours runs in the background. Instead every call
// that waits also reads: payloads go to inbox slots, which credit guarantees to be free, so two peers that put large
// messages to each other at once both get on. Either role reads, and a release (receiver) writes credit while a put
// (sender) writes data: `reading_` and `writing_` guard the two halves of the socket.
#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <mutex>

#include "frame.h"

namespace lamina {

constexpr std::uint64_t kLookNs = 100'000'000;  // a sender that never waits looks at the socket this often

class Stream final : public Engine {
 public:
  // Owns `sock`, non-blocking. A peer that takes no byte of a put for `stall_ns` is given up.
  Stream(int sock, const Slots& outbox, const Slots& inbox, std::uint64_t epoch, const Seal& out, const Seal& in,
         std::uint64_t spin_ns, std::uint64_t stall_ns)
      : sock_(sock),
        spin_ns_(spin_ns),
        stall_ns_(stall_ns),
        outbox_(outbox),
        in_slots_(inbox.slots),
        seal_(out),
        books_{epoch << kEpochShift},
        decoder_(books_, inbox, in) {
    for (Side& side : sides_) side.bell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  }

  bool usable() const { return sides_[0].bell >= 0 && sides_[1].bell >= 0; }

  Status look(Role role) override {
    if (role == Role::sender && now_ns() - looked_ns_.load(std::memory_order_relaxed) > kLookNs) read(role);
    return ready(role);
  }

  Status wait(Role role, std::uint64_t deadline_ns) override {
    push_credit();
    read(role);
    Status status = ready(role);
    if (status == Status::pending) status = spin(role, deadline_ns);
    if (status == Status::pending) status = sleep(role, deadline_ns);
    return status;
  }

  Grant grant() override {
    const std::uint64_t n = granted_++;
    return {n % outbox_.slots, outbox_.slot(n)};
  }

  Status publish(std::uint64_t nbytes, const std::uint8_t* tag, std::uint64_t tag_bytes, const std::uint8_t* source,
                 std::uint64_t* seqno) override {
    if (Status over = ended(); over != Status::ready) return over;
    while (writing_.test_and_set(std::memory_order_acquire)) relax();  // a release writes its credit
    const std::uint64_t n = books_.sent.load(std::memory_order_relaxed);
    *seqno = books_.zero + n + 1;
    const std::uint8_t* payload = source ? source : outbox_.slot(n);
    fill(kData, nbytes, *seqno, payload, tag, tag_bytes);
    books_.sent.store(n + 1, std::memory_order_release);
    pushed_.store(reported_.load(std::memory_order_relaxed), std::memory_order_relaxed);
    unsent_[0] = {tail_, tail_bytes_.exchange(0, std::memory_order_relaxed)};
    unsent_[1] = {&frame_, kFrameBytes};
    unsent_[2] = {const_cast<std::uint8_t*>(payload), nbytes};
    stalled_ns_ = 0;
    return resume();
  }

  Status resume() override {
    Status status = push();
    if (status == Status::pending) return status;
    writing_.clear(std::memory_order_release);
    if (status == Status::ready) report();  // what another thread released meanwhile
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
    if (ended() == Status::ready) report();
  }

  void stop(Farewell farewell, const char* reason, std::uint64_t reason_bytes) override {
    if (stopped_.exchange(true)) return;
    if (!writing_.test_and_set(std::memory_order_acquire)) {  // else the stream is inside a frame
      char text[kReasonBytes + 1];
      const int bytes = farewell == kAborted ? std::snprintf(text, sizeof text, "aborted: %.*s",
                                                             int(std::min(reason_bytes, kReasonBytes)), reason)
                                             : std::snprintf(text, sizeof text, "closed the channel");
      const auto length = std::min(std::uint64_t(bytes), kReasonBytes);
      fill(kFarewell, length, 0, reinterpret_cast<std::uint8_t*>(text), nullptr, 0);
      iovec pieces[] = {{&frame_, kFrameBytes}, {text, length}};
      if (tail_bytes_.load(std::memory_order_relaxed) == 0) send(pieces, 2, 0);
      writing_.clear(std::memory_order_release);
    }
    shutdown(sock_, SHUT_RDWR);
    ring(Role::sender);
    ring(Role::receiver);
  }

  bool stopped() const override { return stopped_.load(std::memory_order_acquire); }

  void shut() override {
    close(sock_);
    for (Side& side : sides_) close(side.bell);
  }

  void why(char text[kTextBytes]) const override { std::memcpy(text, why_, kTextBytes); }

 private:
  struct Side {
    int bell = -1;  // eventfd
    std::atomic<bool> asleep{false};
    Patience patience;
  };

  Side& side(Role role) { return sides_[role == Role::sender ? 0 : 1]; }

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
    Patience& patience = side(role).patience;
    std::uint64_t now = now_ns();
    if (spin_ns_ == 0 || now >= deadline_ns || !patience.spins()) return Status::pending;
    for (const std::uint64_t until = std::min(now + spin_ns_, deadline_ns); now < until; now = now_ns()) {
      read(role);
      const Status status = ready(role);
      if (status != Status::pending) return patience.caught(), status;
    }
    patience.missed();
    return Status::pending;
  }

  // Sleeps until the socket, the bell or a signal, then reads.
  Status sleep(Role role, std::uint64_t deadline_ns) {
    doze(role, tail_bytes_.load(std::memory_order_relaxed) ? POLLIN | POLLOUT : POLLIN, deadline_ns);
    push_credit();
    read(role);
    return ready(role);
  }

  // False if a signal came.
  bool doze(Role role, short events, std::uint64_t deadline_ns) {
    Side& me = side(role);
    const std::uint64_t now = now_ns();
    const std::uint64_t left = deadline_ns > now ? deadline_ns - now : 0;
    const timespec timeout{time_t(left / 1'000'000'000), long(left % 1'000'000'000)};
    pollfd fds[] = {{sock_, events, 0}, {me.bell, POLLIN, 0}};
    me.asleep.store(true, std::memory_order_seq_cst);
    const bool writes = events & POLLOUT;
    const Status status = writes ? (ended() == Status::ready ? Status::pending : ended()) : ready(role);
    const int woken = status == Status::pending ? ppoll(fds, 2, &timeout, nullptr) : 0;
    const bool interrupted = woken < 0 && errno == EINTR;
    me.asleep.store(false, std::memory_order_relaxed);
    eventfd_t rings;
    if (woken > 0 && fds[1].revents) eventfd_read(me.bell, &rings);
    return !interrupted;
  }

  void ring(Role role) {
    std::atomic_thread_fence(std::memory_order_seq_cst);  // what changed, before the look at `asleep`
    if (side(role).asleep.load(std::memory_order_seq_cst)) eventfd_write(side(role).bell, 1);
  }

  // Reads what has come, without waiting, until `role` can go on or nothing is left.
  void read(Role role) {
    const std::lock_guard<std::mutex> guard(reading_);
    looked_ns_.store(now_ns(), std::memory_order_relaxed);
    while (end_.load(std::memory_order_relaxed) == Status::ready) {
      iovec pieces[2];
      const int count = decoder_.room(pieces);
      const std::uint64_t room = pieces[0].iov_len + (count > 1 ? pieces[1].iov_len : 0);
      const ssize_t got = readv(sock_, pieces, count);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && errno == EAGAIN) return;
      if (got < 0) return broke(errno);
      if (got == 0) return lose(Status::gone, "the peer's process is gone", false);
      digest(std::uint64_t(got), role);
      if (std::uint64_t(got) < room || ready(role) != Status::pending) return;
    }
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
  void fill(Kind kind, std::uint64_t length, std::uint64_t seqno, const std::uint8_t* payload, const std::uint8_t* tag,
            std::uint64_t tag_bytes) {
    const std::uint64_t released = books_.released.load(std::memory_order_acquire);
    frame_ = {};
    frame_.kind = kind;
    frame_.length = length;
    frame_.seqno = seqno;
    frame_.credit = books_.zero + released;
    if (tag_bytes) std::memcpy(frame_.tag, tag, tag_bytes);
    close_frame(&frame_, seal_, frames_++, payload);
    reported_.store(released, std::memory_order_relaxed);
  }

  ssize_t send(iovec* pieces, std::size_t count, int flags) {
    msghdr message{};
    message.msg_iov = pieces;
    message.msg_iovlen = count;
    return sendmsg(sock_, &message, flags | MSG_NOSIGNAL | MSG_DONTWAIT);
  }

  // Hands `unsent_` to the kernel; reads while it cannot take more. Pending: a signal came.
  Status push() {
    while (true) {
      ssize_t taken = send(unsent_, 3, 0);
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
      if (!doze(Role::sender, POLLIN | POLLOUT, stalled_ns_ + stall_ns_)) return Status::pending;
    }
  }

  void give_up_stalled() {
    char text[kTextBytes];
    std::snprintf(text, sizeof text, "the peer took no bytes for %g s", double(stall_ns_) / 1e9);
    lose(Status::gone, text, false);
  }

  // Tells the peer what was released, unless another thread is writing, which then does so afterwards.
  //
  // As long as the peer has half of its slots for all we know, the kernel may hold the frame back (MSG_MORE, at most
  // 200 ms), so that it leaves with the next message instead of waking the peer on its own.
  void report() {
    while ((tail_bytes_.load(std::memory_order_relaxed) || reported_ < books_.released) &&
           !writing_.test_and_set(std::memory_order_acquire)) {
      std::uint64_t left = tail_bytes_.load(std::memory_order_relaxed);
      if (left == 0 && reported_ < books_.released) {
        fill(kCredit, 0, 0, nullptr, nullptr, 0);
        std::memcpy(tail_, &frame_, left = kFrameBytes);
      }
      const bool urgent = scarce();
      iovec piece{tail_, left};
      const ssize_t taken = left ? send(&piece, 1, urgent ? 0 : MSG_MORE) : 0;
      const bool later = taken < 0 && errno == EAGAIN;
      if (taken > 0) std::memmove(tail_, tail_ + taken, left - std::uint64_t(taken));
      // On an error the peer has left; reading will say why.
      tail_bytes_.store(later ? left : taken < 0 ? 0 : left - std::uint64_t(taken), std::memory_order_relaxed);
      if (urgent && tail_bytes_ == 0) pushed_.store(reported_, std::memory_order_relaxed);
      writing_.clear(std::memory_order_release);
      if (later) return;  // the next call that waits goes on
    }
  }

  bool scarce() const { return 2 * (books_.arrived - pushed_) >= in_slots_; }

  // Before a wait: lets go of credit that is held back from a peer that may lack it.
  void push_credit() {
    if (tail_bytes_.load(std::memory_order_relaxed) || reported_ < books_.released) report();
    if (pushed_ >= reported_ || !scarce()) return;
    pushed_.store(reported_, std::memory_order_relaxed);
    const int on = 1;
    setsockopt(sock_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }

  const int sock_;
  const std::uint64_t spin_ns_, stall_ns_;
  const Slots outbox_;
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
  Frame frame_{};
  std::uint64_t frames_ = 0, stalled_ns_ = 0;
  iovec unsent_[3] = {};            // of the put in progress
  std::uint8_t tail_[kFrameBytes];  // of a credit frame that the kernel took in part, so many bytes:
  std::atomic<std::uint64_t> tail_bytes_{0};
  std::atomic<std::uint64_t> reported_{0}, pushed_{0};  // released messages that a frame told of, that left for sure

  std::atomic<bool> stopped_{false};        // by this side
  std::atomic<bool> ending_{false};         // the peer's end is being written
  std::atomic<Status> end_{Status::ready};  // then gone or fault
  char why_[kTextBytes] = {};
};

}  // namespace lamina
