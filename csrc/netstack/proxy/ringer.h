// A thread that rings NICs for posters who may not map their registers: see proxy.h. One mailbox a queue, one thread for
// all queues of a NIC, on cores next to it.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "netstack/proxy/proxy.h"

namespace lamina::mlx5 {

class Ringer {
 public:
  // `cores` of the thread; none: those of who makes it.
  explicit Ringer(const std::vector<int>& cores) : thread_([this] { run(); }) {
    if (cores.empty()) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int core : cores)
      if (core >= 0 && core < CPU_SETSIZE) CPU_SET(core, &set);
    pthread_setaffinity_np(thread_.native_handle(), sizeof set, &set);  // where it is refused, others will do
  }
  ~Ringer() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      is_over_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  // Doorbells in `mailbox`, which holds kNoDoorbell, are rung at `doorbell`, whose registers are `alternate` bytes apart.
  void add(const u64* mailbox, u64* doorbell, u32 alternate) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      proxies_.push_back({mailbox, doorbell, alternate, 0, kNoDoorbell});
    }
    changed_.notify_all();
  }
  // After it returns, the thread neither reads the mailbox nor rings.
  void remove(const u64* mailbox) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto is_that = [=](const Proxy& proxy) { return proxy.mailbox == mailbox; };
    proxies_.erase(std::remove_if(proxies_.begin(), proxies_.end(), is_that), proxies_.end());
  }
  u64 rung() const { return rung_.load(std::memory_order_relaxed); }

 private:
  // A round over a few mailboxes takes some 50 ns (not measured on a host with a NIC). So it spins for about a millisecond
  // after the last doorbell, within which a decode step rings the next one. Then it polls a few thousand times a second.
  static constexpr u32 kSpins = 20000, kNapNs = 100'000;

  void run() {
    const u32 spins = std::thread::hardware_concurrency() > 1 ? kSpins : 0;
    Bus bus;
    for (u32 idle = 0;;) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return is_over_ || !proxies_.empty(); });
        if (is_over_) return;
        bool rang = false;
        for (Proxy& proxy : proxies_) {
          if (!ring_on(bus, proxy)) continue;
          rang = true;
          rung_.fetch_add(1, std::memory_order_relaxed);
        }
        idle = rang ? 0 : idle + 1;
      }
      if (idle > spins) bus.rest(kNapNs);
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Proxy> proxies_;
  std::atomic<u64> rung_{0};
  bool is_over_ = false;
  std::thread thread_;
};

}  // namespace lamina::mlx5
