// A channel over one reliable queue pair as an engine; netstack/rdma/verbs.py says how messages, credit and signs of life
// travel on it.
//
// Either role polls the completion queue, under `polling_`, and rings the other for what is the other's. What both post,
// they post under `posting_`, so that credit goes out in the order in which it was counted.
#pragma once

#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <mutex>

#include "end.h"
#include "ledger.h"
#include "netstack/sleeper.h"

namespace lamina::verbs {

constexpr std::uint64_t kLookNs = 100'000'000;  // who never waits looks at the life line this often
constexpr std::uint64_t kBeatNs = 500'000'000;  // a peer's NIC that says nothing is asked this often
constexpr std::uint64_t kLingerNs = 1'000'000'000;  // close waits so long for the peer's NIC to have what was put
constexpr int kBatch = 16;

enum Request : std::uint64_t { kDataSent = 1, kCreditSent, kBeatSent, kPieceSent };

// Most requests that are under way at once: pieces of every message out, credit for every message in, one sign of life.
inline Depth depth_of(const Slots& staging, const Slots& inbox) {
  const std::uint64_t pieces = (Slots::stride(staging.slot_bytes) + kWriteBytes - 1) / kWriteBytes;
  const std::uint64_t sends = staging.slots * pieces + inbox.slots + 1, receives = staging.slots + inbox.slots;
  return {std::uint32_t(sends), std::uint32_t(receives), std::uint32_t(sends + receives)};
}

class Verbs final : public Engine, private Teller::Client {
 public:
  // `end` is connected; `sock` is the life line to its peer. Both are owned. A peer whose NIC completes nothing for
  // `stall_ns`, though it was asked to, is given up.
  Verbs(std::unique_ptr<End> end, int sock, const Slots& staging, const Slots& inbox, std::uint64_t epoch,
        std::uint64_t spin_ns, std::uint64_t stall_ns, Teller& teller)
      : end_(std::move(end)), sock_(sock), spin_ns_(spin_ns), stall_ns_(stall_ns), books_(inbox, epoch),
        staging_(staging), in_slots_(inbox.slots), most_(depth_of(staging, inbox).completions), teller_(teller) {
    teller_.add(this);
  }
  ~Verbs() { teller_.remove(this); }

  // Prepares what wakes sleepers; false with errno.
  bool start() {
    bool woken = sides_[0].sleeper.usable() && sides_[1].sleeper.usable();
    for (const int fd : {sock_, end_->events_fd(), end_->async_fd()}) {
      epoll_event event{};
      event.events = fd == sock_ ? EPOLLIN | EPOLLRDHUP : EPOLLIN;
      woken = woken && !epoll_ctl(events_, EPOLL_CTL_ADD, fd, &event);
    }
    if (!woken) close(events_);
    return woken;
  }

  Status look(Role role) override {
    const bool is_due = now_ns() - looked_ns_.load(std::memory_order_relaxed) > kLookNs;
    if (is_due) glance();
    if (!is_due && ready(role) != Status::pending) return ready(role);
    poll();  // after the check of the life line, so that messages before a farewell are delivered
    return ready(role);
  }

  Status wait(Role role, std::uint64_t deadline_ns) override {
    report_if_scarce();
    Side& me = side(role);
    Status status = me.patience.spins() ? spin(role, deadline_ns) : ready(role);
    const std::uint64_t now = now_ns();
    if (status != Status::pending) return status;
    if (now < deadline_ns) {
      me.asleep.store(true, std::memory_order_seq_cst);
      me.sleeper.sleep(events_, POLLIN, std::min(deadline_ns, now + kBeatNs), [&] {
        arm();
        poll();
        return ready(role) != Status::pending;
      });
      me.asleep.store(false, std::memory_order_relaxed);
      // Who takes the NIC's event rings the other, who may need the next.
      if (end_->disarm()) side(role == Role::sender ? Role::receiver : Role::sender).sleeper.ring();
    }
    report_if_scarce();
    glance();
    poll();
    return ready(role);
  }

  Grant grant() override {
    const std::uint64_t n = granted_++;
    return {n % staging_.slots, staging_.payload(n)};
  }

  Status publish(std::uint64_t nbytes, const std::uint8_t* tag, std::uint64_t tag_bytes,
                 std::uint64_t* seqno) override {
    if (Status over = ended(); over != Status::ready) return over;
    const std::uint64_t n = books_.sent.load(std::memory_order_relaxed);
    Header* header = staging_.header(n);
    *seqno = books_.zero + n + 1;
    *header = {*seqno, nbytes, 0, {}, {}};
    std::memcpy(header->tag, tag, std::min(tag_bytes, kTagBytes));
    int error;
    {
      const std::lock_guard<std::mutex> lock(posting_);
      const std::uint64_t released = books_.released.load(std::memory_order_acquire);
      header->credit = books_.zero + released;
      reported_.store(released, std::memory_order_relaxed);
      books_.sent.store(n + 1, std::memory_order_release);
      error = post(n, nbytes);
    }
    if (error) return refused(error);
    report_if_scarce();  // what another thread released meanwhile
    return Status::ready;
  }

  Status take(Message* message) override {
    books_.arrival(taken_++, message);
    return Status::ready;
  }

  void release() override {
    books_.released.fetch_add(1, std::memory_order_release);
    if (ended() == Status::ready) report_if_scarce();
  }

  void stop(Farewell farewell, const char* reason, std::uint64_t reason_bytes) override {
    if (stopped_.exchange(true)) return;
    ring();
    if (farewell == kClosed) linger();
    char text[kTextBytes];
    const int most = int(std::min(reason_bytes, kReasonBytes));
    std::snprintf(text, sizeof text, farewell == kAborted ? "aborted: %.*s" : "closed the channel", most, reason);
    say(text);
  }

  bool stopped() const override { return stopped_.load(std::memory_order_acquire); }

  void shut() override {
    teller_.remove(this);
    end_->close();
    close(sock_);
    close(events_);
    for (Side& side : sides_) side.sleeper.shut();
  }

  void why(char text[kTextBytes]) const override { std::memcpy(text, why_, kTextBytes); }

 private:
  struct Side {
    Sleeper sleeper;
    std::atomic<bool> asleep{false};
    Patience patience;
  };

  Side& side(Role role) { return sides_[role == Role::sender ? 0 : 1]; }
  void ring() {
    for (Side& side : sides_) side.sleeper.ring();
  }

  Status ended() const {
    if (stopped()) return Status::stopped;
    return over_.load(std::memory_order_acquire);
  }

  // What was complete before the peer's end is still handed out.
  Status ready(Role role) const {
    const Status over = ended();
    if (over == Status::stopped) return over;
    if (role == Role::receiver && taken_ < books_.arrived.load(std::memory_order_acquire)) return Status::ready;
    if (over != Status::ready) return over;
    if (role == Role::receiver) return Status::pending;
    return books_.has_slot(granted_, staging_.slots) ? Status::ready : Status::pending;
  }

  Status spin(Role role, std::uint64_t deadline_ns) {
    return lamina::spin(side(role).patience, spin_ns_, deadline_ns, [&] {
      poll();
      return ready(role);
    });
  }

  // Header and payload of message n; all but the first piece go ahead, since the signal must come last.
  int post(std::uint64_t n, std::uint64_t nbytes) {
    const std::uint64_t total = sizeof(Header) + nbytes, at = staging_.at(n);
    for (std::uint64_t start = kWriteBytes; start < total; start += kWriteBytes) {
      ibv_sge piece = end_->staged(staging_.base + at + start, std::min(kWriteBytes, total - start));
      if (const int error = end_->write(kPieceSent, &piece, 1, at + start)) return error;
    }
    ibv_sge first = end_->staged(staging_.base + at, std::min(kWriteBytes, total));
    return end_->signal(kDataSent, &first, 1, at, std::uint32_t(n + 1) & kCount, true);
  }

  bool owes() const { return reported_.load() < books_.released.load(); }

  // For all we know the peer has a quarter of its slots left, or one. Until then credit waits for a message to ride on.
  void report_if_scarce() {
    const std::uint64_t spare = std::max(in_slots_ / 4, std::uint64_t{1});
    if (owes() && books_.arrived.load() - reported_.load() + spare >= in_slots_) report();
  }

  // Reports released messages to the peer, unless another thread is posting, which reports them or checks again after it.
  // If as many credits are in flight as fit, a completion is followed by more.
  void report() {
    while (owes() && credits_out_.load() < in_slots_) {
      const std::unique_lock<std::mutex> lock(posting_, std::try_to_lock);
      if (!lock) return;
      if (!owes() || credits_out_.load() >= in_slots_) continue;  // by another thread meanwhile
      const std::uint64_t released = books_.released.load(std::memory_order_acquire);
      reported_.store(released, std::memory_order_relaxed);
      credits_out_.fetch_add(1);
      const std::uint32_t word = kCredit | (std::uint32_t(released) & kCount);
      if (const int error = end_->signal(kCreditSent, nullptr, 0, 0, word, false)) return void(refused(error));
    }
  }

  void tell() override {
    if (!stopped() && owes()) report();
  }

  // Make `events_` readable at the next completion that a thread waits for: also credit and completed sends, if the sender
  // sleeps.
  void arm() {
    const std::lock_guard<std::mutex> lock(arming_);
    if (const int error = end_->arm(!sides_[0].asleep.load(std::memory_order_seq_cst))) refused(error);
  }

  // Takes what has completed, no more than may be under way at once: a peer that lies can send as fast as it is taken.
  // Gives a peer up whose NIC was asked for a sign of life in vain. Another thread that is polling rings; at the end it is
  // waited for.
  void poll() {
    std::unique_lock<std::mutex> lock(polling_, std::try_to_lock);
    if (!lock && over_.load(std::memory_order_acquire) == Status::ready) return;
    if (!lock) lock.lock();
    const std::uint64_t asked = now_ns();  // before the look: who was stopped for long finds what came meanwhile
    ibv_wc done[kBatch];
    int count = 0;
    for (std::uint32_t taken = 0; taken < most_ && (count = end_->poll(done, kBatch)) > 0;) {
      taken += std::uint32_t(count);
      for (int i = 0; i < count; ++i) handle(done[i]);
      heard_ns_.store(asked, std::memory_order_relaxed);
    }
    if (count < 0) return lose(Status::gone, true, "our NIC cannot say what has completed");
    const std::uint64_t since = std::max(beaten_ns_.load(), heard_ns_.load());
    if (beating_.load() && asked > since + stall_ns_)
      lose(Status::gone, true, "nothing was heard of the peer's NIC for %g s", double(stall_ns_) / 1e9);
  }

  void handle(const ibv_wc& done) {
    if (done.status != IBV_WC_SUCCESS) return broke(done.status);
    if (done.opcode == IBV_WC_RECV_RDMA_WITH_IMM) return hear(be32toh(done.imm_data));
    if (done.wr_id == kCreditSent) {
      credits_out_.fetch_sub(1);
    } else if (done.wr_id == kBeatSent) {
      beating_ = false;
    } else if (done.wr_id == kDataSent) {
      books_.completed.fetch_add(1);
      side(Role::sender).sleeper.ring();
    }
  }

  // A word of the peer.
  void hear(std::uint32_t word) {
    if (const int error = end_->receive()) return void(refused(error));
    const std::uint64_t credited = books_.credited, arrived = books_.arrived;
    if (!(word & kCredit ? books_.take_word(word & kCount) : books_.take_message(word)))
      return lose(Status::fault, true, "the peer broke the protocol: %s", books_.fault());
    if (credited != books_.credited) side(Role::sender).sleeper.ring();
    if (arrived != books_.arrived) side(Role::receiver).sleeper.ring();
  }

  void broke(ibv_wc_status status) {
    glance(false);  // a farewell says more than what it did to the NIC
    if (const char* words = words_of(status)) return lose(Status::gone, true, "the connection broke (%s)", words);
    lose(Status::gone, true, "the connection broke (status %d of the NIC)", int(status));
  }

  Status refused(int error) {
    lose(Status::gone, true, "our NIC takes no request (%s)", std::strerror(error < 0 ? -error : error));
    return ended();
  }

  // Looks at the life line and at what the device says of itself; asks the peer's NIC for a sign of life if that is due.
  void glance(bool beats = true) {
    const std::lock_guard<std::mutex> lock(looking_);
    const std::uint64_t now = now_ns();
    looked_ns_.store(now, std::memory_order_relaxed);
    if (over_.load(std::memory_order_relaxed) != Status::ready) return;
    char said[kReasonBytes];
    const ssize_t got = recv(sock_, said, sizeof said, MSG_DONTWAIT);
    if (got > 0) return lose(Status::gone, false, "the peer %.*s", int(got), said);
    if (got == 0) return lose(Status::gone, false, "the peer's process is gone");
    if (errno != EAGAIN && errno != EINTR)
      return lose(Status::gone, false, "the life line broke (%s)", std::strerror(errno));
    hear_device();
    if (beats && now > beaten_ns_.load() + kBeatNs && !beating_.load() && !stopped()) beat(now);
  }

  void hear_device() {
    ibv_event_type type;
    while (end_->event(&type))
      if (ends_pair(type)) lose(Status::gone, true, "our NIC reports: %s", end_->words(type));
  }

  void beat(std::uint64_t now) {
    const std::unique_lock<std::mutex> lock(posting_, std::try_to_lock);
    if (!lock) return;  // another thread is posting, and its completion is a sign of life
    beaten_ns_ = now;
    beating_ = true;  // in this order: another thread may be in poll
    end_->write(kBeatSent, nullptr, 0, 0);
  }

  // The peer is lost: remembers why, tells it where it does not know, wakes both roles. Only the first loss counts.
  template <class... Values>
  void lose(Status how, bool tells, const char* format, Values... values) {
    if (!losing_.exchange(true)) {
      put_words(why_, sizeof why_, format, values...);
      over_.store(how, std::memory_order_release);
      char text[kTextBytes + 16];
      std::snprintf(text, sizeof text, "aborted: %s", how == Status::fault ? "broken protocol" : why_);
      if (tells) say(text);
      end_->halt();
    }
    ring();
  }

  // The last words on the life line.
  void say(const char* text) {
    send(sock_, text, strnlen(text, kReasonBytes), MSG_NOSIGNAL | MSG_DONTWAIT);
    shutdown(sock_, SHUT_RDWR);
  }

  // Lets the NIC finish what was put.
  void linger() {
    const std::uint64_t until = now_ns() + kLingerNs;
    while (books_.completed.load() < books_.sent.load() && over_.load() == Status::ready && now_ns() < until) {
      glance(false);
      end_->arm(false);
      poll();
      if (books_.completed.load() == books_.sent.load()) break;
      pollfd event{events_, POLLIN, 0};
      ::poll(&event, 1, 10);  // another thread may take the event
      end_->disarm();
    }
  }

  const std::unique_ptr<End> end_;
  const int sock_;
  const int events_ = epoll_create1(EPOLL_CLOEXEC);  // of the NIC, the device, the life line
  const std::uint64_t spin_ns_, stall_ns_;
  Ledger books_;
  const Slots staging_;
  const std::uint64_t in_slots_;
  const std::uint32_t most_;  // completions
  Side sides_[2];
  std::uint64_t granted_ = 0;  // by the sender
  std::uint64_t taken_ = 0;  // by the receiver

  std::mutex posting_;
  std::atomic<std::uint64_t> reported_{0}, credits_out_{0};  // reported released messages; requests

  std::mutex polling_, arming_;

  std::mutex looking_;
  std::atomic<std::uint64_t> looked_ns_{now_ns()}, beaten_ns_{now_ns()}, heard_ns_{now_ns()};
  std::atomic<bool> beating_{false};

  std::atomic<bool> stopped_{false};  // by this side
  std::atomic<bool> losing_{false};  // the end is being written
  std::atomic<Status> over_{Status::ready};  // then gone or fault
  char why_[kTextBytes] = {};
  Teller& teller_;
};

}  // namespace lamina::verbs
