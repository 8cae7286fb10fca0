// Where one role of a stream sleeps, and the thread that speaks for channels whose owner makes no calls.
#pragma once

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <unordered_set>

#include "engine.h"

namespace lamina {

// Wakes on events of a socket, or when another thread rings.
class Sleeper {
 public:
  ~Sleeper() { shut(); }
  bool usable() const { return bell_ >= 0; }

  // Closes the descriptor, once no thread sleeps or rings any more. Idempotent.
  void shut() {
    if (bell_ >= 0) close(bell_);
    bell_ = -1;
  }

  // After what the sleeper waits for was changed.
  void ring() {
    std::atomic_thread_fence(std::memory_order_seq_cst);  // what changed, before the look at `asleep_`
    if (asleep_.load(std::memory_order_seq_cst)) eventfd_write(bell_, 1);
  }

  // Sleeps unless `ready()`, which is asked after the promise to sleep. False if a signal came.
  template <class Ready>
  bool sleep(int sock, short events, std::uint64_t deadline_ns, Ready ready) {
    asleep_.store(true, std::memory_order_seq_cst);
    pollfd fds[] = {{sock, events, 0}, {bell_, POLLIN, 0}};
    int woken = 0;
    if (!ready()) {
      const std::uint64_t now = now_ns(), left = deadline_ns > now ? deadline_ns - now : 0;
      const timespec timeout{time_t(left / 1'000'000'000), long(left % 1'000'000'000)};
      woken = ppoll(fds, 2, &timeout, nullptr);
    }
    const bool interrupted = woken < 0 && errno == EINTR;
    asleep_.store(false, std::memory_order_relaxed);
    eventfd_t rings;
    if (woken > 0 && fds[1].revents) eventfd_read(bell_, &rings);
    return !interrupted;
  }

 private:
  int bell_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  std::atomic<bool> asleep_{false};
};

// Looks again and again for as long as it pays, and tells `patience` whether it did. ``look()`` is a Status.
template <class Look>
Status spin(Patience& patience, std::uint64_t spin_ns, std::uint64_t deadline_ns, Look look) {
  Status status = look();
  std::uint64_t now = now_ns();
  if (status != Status::pending || now >= deadline_ns) return status;
  for (const std::uint64_t until = std::min(now + spin_ns, deadline_ns); now < until; now = now_ns()) {
    status = look();
    if (status != Status::pending) return patience.caught(), status;
    relax();
  }
  patience.missed();
  return Status::pending;
}

// Credit is sent with messages. If there are none, and the owner of a channel makes no call for a while, this thread
// sends it. So the peer can soon use a released slot.
class Teller {
 public:
  class Client {
   public:
    virtual void tell() = 0;  // quick, and never waits

   protected:
    ~Client() = default;
  };

  ~Teller() {
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      over_ = true;
    }
    changed_.notify_one();
    if (thread_.joinable()) thread_.join();
  }

  void add(Client* client) {
    const std::lock_guard<std::mutex> guard(mutex_);
    clients_.insert(client);
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    changed_.notify_one();
  }

  // Afterwards the client is called no more.
  void remove(Client* client) {
    const std::lock_guard<std::mutex> guard(mutex_);
    clients_.erase(client);
  }

 private:
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!over_) {
      if (clients_.empty()) {
        changed_.wait(lock);
        continue;
      }
      changed_.wait_for(lock, std::chrono::milliseconds(100));
      for (Client* client : clients_) client->tell();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::unordered_set<Client*> clients_;
  bool over_ = false;
  std::thread thread_;
};

}  // namespace lamina
