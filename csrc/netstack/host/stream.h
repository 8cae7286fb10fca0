// A channel over a connected stream socket as an engine: frames, credit, and reading while writing.
//
// The kernel copies between the socket and the slots. Every call that waits also reads. Payloads go to inbox slots,
// which credit guarantees to be free, so two peers that send large messages to each other cannot block each other.
// Either role reads, and a release (receiver) may write credit while a put (sender) writes data: `reading_` and the
// writer's lock guard the two halves of the socket.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <mutex>

#include "netstack/sleeper.h"
#include "writer.h"

namespace lamina {

constexpr std::uint64_t kLookNs = 100'000'000;   // a sender that never waits looks at the socket this often
constexpr std::uint64_t kSleepNs = 100'000'000;  // the longest sleep in a read
// Before the next look at the clock, as a peer that lies can send as fast as it is read. All that an honest one may have
// under way in small messages are fewer.
constexpr int kReadsMost = 1024;

class Stream final : public Engine, private Teller::Client {
 public:
  // Owns `sock`, blocking. A peer that takes no byte of a put for `stall_ns` is given up.
  Stream(int sock, const Outbox& outbox, const Slots& inbox, std::uint64_t epoch, Guard out, Guard in,
         std::uint64_t spin_ns, std::uint64_t stall_ns, Teller& teller)
      : sock_(sock), spin_ns_(spin_ns), stall_ns_(stall_ns), outbox_(outbox), books_{epoch << kEpochShift},
        decoder_(books_, inbox, std::move(in)), writer_(sock, outbox, inbox.slots, std::move(out), books_),
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
    writer_.report_if_scarce();
    Side& me = side(role);
    const Status status = me.patience.spins() ? spin(role, deadline_ns) : Status::pending;
    if (status != Status::pending) return status;
    if (!writer_.unfinished() && deadline_ns > now_ns() + 2 * kSleepNs && read(role, 0)) return ready(role);
    const short events = writer_.unfinished() ? POLLIN | POLLOUT : POLLIN;
    me.sleeper.sleep(sock_, events, deadline_ns, [&] { return ready(role) != Status::pending; });
    writer_.report_if_scarce();
    read(role);
    return ready(role);
  }

  Grant grant() override {
    const std::uint64_t n = granted_++;
    return {n % outbox_.slots, outbox_.slot(n)};
  }

  Status publish(std::uint64_t nbytes, const std::uint8_t* tag, std::uint64_t tag_bytes,
                 std::uint64_t* seqno) override {
    if (Status over = ended(); over != Status::ready) return over;
    writer_.lock();
    *seqno = writer_.begin(nbytes, tag, tag_bytes);
    stalled_ns_ = 0;
    return resume();
  }

  Status resume() override {
    Status status = push();
    if (status == Status::pending) return status;
    writer_.unlock();
    if (status == Status::ready) writer_.report_if_scarce();  // what another thread released meanwhile
    return status;
  }

  void give_up(const char* why) override {
    lose(Status::gone, why, true);
    writer_.unlock();
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
    if (ended() == Status::ready) writer_.report_if_scarce();
  }

  void stop(Farewell farewell, const char* reason, std::uint64_t reason_bytes) override {
    if (stopped_.exchange(true)) return;
    if (writer_.try_lock()) {  // else the stream is inside a frame
      writer_.farewell(farewell, reason, reason_bytes);
      writer_.unlock();
    }
    shutdown(sock_, SHUT_RDWR);
    ring(Role::sender);
    ring(Role::receiver);
  }

  bool stopped() const override { return stopped_.load(std::memory_order_acquire); }

  void shut() override {
    teller_.remove(this);
    close(sock_);
    for (Side& side : sides_) side.sleeper.shut();
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
    return lamina::spin(side(role).patience, spin_ns_, deadline_ns, [&] {
      read(role);
      return ready(role);
    });
  }

  // Reads what has come until `role` can go on or nothing is left, kReadsMost times at most; with `flags` 0 sleeps, for
  // a slice at most, until something comes. False if another thread is reading, which rings.
  bool read(Role role, int flags = MSG_DONTWAIT) {
    const std::unique_lock<std::mutex> lock(reading_, std::try_to_lock);
    if (!lock) return false;
    looked_ns_.store(now_ns(), std::memory_order_relaxed);
    if (flags == 0 && ready(role) != Status::pending) return true;
    for (int reads = 0; reads < kReadsMost && end_.load(std::memory_order_relaxed) == Status::ready; ++reads) {
      iovec pieces[3] = {};
      const std::size_t count = decoder_.room(pieces);
      const std::uint64_t room = pieces[0].iov_len + pieces[1].iov_len + pieces[2].iov_len;
      const ssize_t got = receive(pieces, count, flags);
      if (got < 0 && errno == EINTR && flags) continue;
      if (got < 0 && (errno == EAGAIN || errno == EINTR)) return true;
      if (got < 0) return broke(errno), true;
      if (got == 0 && timed_out_) return broke(ETIMEDOUT), true;
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

  // Sends what was begun; reads while the kernel cannot take more. Pending: a signal came.
  Status push() {
    while (true) {
      bool progress;
      const Writer::Push push = writer_.push(&progress);
      if (push == Writer::Push::done) return Status::ready;
      if (push == Writer::Push::interrupted) return Status::pending;
      if (push == Writer::Push::broken) {
        const int error = errno;
        timed_out_ = error == ETIMEDOUT;  // which the kernel says once: to those who read it says the end
        read(Role::sender);  // its farewell, if there is one
        broke(error);
        return ended();
      }
      const std::uint64_t now = now_ns();
      if (progress || stalled_ns_ == 0) stalled_ns_ = now;
      if (now - stalled_ns_ >= stall_ns_) give_up_stalled();
      read(Role::sender);
      if (Status over = ended(); over != Status::ready) return over;
      const auto over = [&] { return ended() != Status::ready; };
      if (!side(Role::sender).sleeper.sleep(sock_, POLLIN | POLLOUT, stalled_ns_ + stall_ns_, over))
        return Status::pending;
    }
  }

  void give_up_stalled() {
    char text[kTextBytes];
    std::snprintf(text, sizeof text, "the peer took no bytes for %g s", double(stall_ns_) / 1e9);
    lose(Status::gone, text, false);
  }

  void tell() override {
    if (!stopped() && writer_.owes()) writer_.report();
  }

  const int sock_;
  const std::uint64_t spin_ns_, stall_ns_;
  const Outbox outbox_;
  Books books_;
  Side sides_[2];
  std::uint64_t granted_ = 0;  // by the sender
  std::uint64_t taken_ = 0;  // by the receiver
  std::atomic<bool> timed_out_{false};

  std::mutex reading_;
  Decoder decoder_;
  std::atomic<std::uint64_t> looked_ns_{now_ns()};

  Writer writer_;
  std::uint64_t stalled_ns_ = 0;  // since when the kernel takes nothing of the put in progress; 0: it does

  std::atomic<bool> stopped_{false};  // by this side
  std::atomic<bool> ending_{false};  // the peer's end is being written
  std::atomic<Status> end_{Status::ready};  // then gone or fault
  char why_[kTextBytes] = {};
  Teller& teller_;
};

}  // namespace lamina
