// Threads that work on one job at a time, beside the thread that brings it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "places.h"

namespace lamina {

// Pieces are taken one by one, so a thread that lost its core holds up the job by one piece at most. Idle threads spin
// for a moment, since the next job of a slice follows within microseconds, then they sleep and leave the core to others.
class Pool {
 public:
  using Piece = void (*)(void* job, std::size_t piece, std::size_t thread);

  // ``threads``, the caller's included. Throws std::system_error where the system has no more.
  explicit Pool(std::size_t threads) {
    try {
      for (std::size_t i = 1; i < threads; ++i) {
        threads_.emplace_back([this, i] { serve(i); });
        leave_bound_core(threads_.back());
      }
    } catch (...) {
      end();
      throw;
    }
  }

  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  ~Pool() { end(); }

  std::size_t size() const { return threads_.size() + 1; }

  // Runs pieces 0 .. count - 1; returns when all are done. Callers must take turns.
  void run(Piece piece, void* job, std::size_t count) {
    tickets_.store(generation() << 32 | 0xffffffffu);  // closed: nobody takes a piece while the job is written down
    piece_ = piece;
    job_ = job;
    done_.store(0, std::memory_order_relaxed);
    count_ = count;
    {
      // Under the lock, so that no thread can fall asleep between its last look and the notification.
      std::lock_guard<std::mutex> lock(mutex_);
      tickets_.store((generation() + 1) << 32, std::memory_order_release);
    }
    if (sleeping_.load() > 0) wake_.notify_all();
    take(generation(), 0);
    for (int i = 0; done_.load(std::memory_order_acquire) < count; ++i)
      if (i < kSpins)
        pause();
      else
        std::this_thread::yield();  // the thread that has the last piece may be waiting for this core
  }

 private:
  static constexpr int kSpins = 2000;  // some 20 to 50 us

  void end() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_.store(true);
    }
    wake_.notify_all();
    for (auto& t : threads_) t.join();
  }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  // A ticket names the job (upper half) and the piece (lower half) in one word: a thread that comes late can never
  // take a piece of another job than the one it looked at.
  std::uint64_t generation() const { return tickets_.load(std::memory_order_acquire) >> 32; }

  void take(std::uint64_t generation, std::size_t thread) {
    for (;;) {
      std::uint64_t ticket = tickets_.load(std::memory_order_acquire);
      do {
        if (ticket >> 32 != generation || (ticket & 0xffffffffu) >= count_) return;
      } while (!tickets_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel));
      piece_(job_, ticket & 0xffffffffu, thread);
      done_.fetch_add(1, std::memory_order_acq_rel);
    }
  }

  void serve(std::size_t thread) {
    std::uint64_t seen = 0;
    while (!stopping_.load()) {
      for (int i = 0; i < kSpins && generation() == seen; ++i) pause();
      if (generation() == seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        sleeping_.fetch_add(1);
        wake_.wait(lock, [&] { return generation() != seen || stopping_.load(); });
        sleeping_.fetch_sub(1);
        continue;
      }
      seen = generation();
      take(seen, thread);
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<bool> stopping_{false};
  std::atomic<int> sleeping_{0};
  alignas(64) std::atomic<std::uint64_t> tickets_{0};
  alignas(64) std::atomic<std::size_t> done_{0};
  Piece piece_ = nullptr;
  void* job_ = nullptr;
  std::atomic<std::size_t> count_{0};
  std::vector<std::thread> threads_;
};

}  // namespace lamina
