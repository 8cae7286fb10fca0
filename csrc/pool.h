// A thread pool that works on one job at a time, together with the thread that brings it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#include "places.h"

namespace lamina {

// Looks at a job's state before a thread sleeps: some 20 to 50 us. Linear layers follow each other within microseconds.
constexpr int kSpins = 2000;

// Pieces are taken one by one, so a thread that lost its core holds up the job by one piece at most. An idle thread spins
// for a moment, then it sleeps and leaves the core to others; so does the caller when other threads have the last pieces.
class Pool {
 public:
  using Piece = void (*)(void* job, std::size_t piece, std::size_t thread);

  // ``threads``, the caller's included; ``spins`` as kSpins. Throws std::system_error where the system has no more.
  explicit Pool(std::size_t threads = 1, int spins = kSpins) : spins_(spins) {
    try {
      grow(threads);
    } catch (...) {
      end();
      throw;
    }
  }

  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  ~Pool() { end(); }

  // Of threads, the caller's included.
  std::size_t size() const { return helpers_.size() + 1; }

  // Starts threads until there are ``threads``. Throws std::system_error where the system has no more; those that were
  // started stay. Not during a job.
  void grow(std::size_t threads) {
    while (size() < threads) {
      helpers_.push_back(std::make_unique<Helper>());
      Helper& helper = *helpers_.back();
      try {
        helper.thread = std::thread([this, &helper, number = helpers_.size()] { serve(helper, number); });
      } catch (...) {
        helpers_.pop_back();
        throw;
      }
      leave_bound_core(helper.thread);
    }
  }

  // Runs pieces 0 .. count - 1 on at most ``threads`` threads, whose numbers begin with the caller's, 0; returns when all
  // are done. Callers must take turns.
  void run(Piece piece, void* job, std::size_t count, std::size_t threads = SIZE_MAX) {
    if (threads > size()) threads = size();
    if (threads < 2 || count < 2) {
      for (std::size_t i = 0; i < count; ++i) piece(job, i, 0);
      return;
    }
    open(piece, job, count, threads);
    take(generation(), 0);
    for (int i = 0; done_.load(std::memory_order_acquire) < count; ++i) {
      if (i < spins_) {
        pause();
        continue;
      }
      std::unique_lock<std::mutex> lock(mutex_);
      waiting_.store(true);
      finished_.wait(lock, [&] { return done_.load() == count; });
      waiting_.store(false);
    }
  }

  // The same for ``work(piece, thread)``.
  template <class Work>
  void each(std::size_t count, std::size_t threads, Work&& work) {
    const Piece piece = [](void* job, std::size_t i, std::size_t thread) {
      (*static_cast<std::remove_reference_t<Work>*>(job))(i, thread);
    };
    run(piece, &work, count, threads);
  }

 private:
  struct Helper {
    std::thread thread;
    std::condition_variable wake;
    std::atomic<bool> sleeps{false};
  };

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  void open(Piece piece, void* job, std::size_t count, std::size_t threads) {
    tickets_.store(generation() << 32 | 0xffffffffu);  // closed: no thread takes a piece while the job is being set
    piece_ = piece;
    job_ = job;
    done_.store(0, std::memory_order_relaxed);
    count_ = count;
    threads_ = threads;
    {
      // Under the lock, so that no thread can fall asleep between its last look and the notification.
      std::lock_guard<std::mutex> lock(mutex_);
      tickets_.store((generation() + 1) << 32, std::memory_order_release);
    }
    for (std::size_t i = 1; i < threads; ++i)
      if (helpers_[i - 1]->sleeps.load()) helpers_[i - 1]->wake.notify_one();
  }

  void end() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_.store(true);
    }
    for (auto& helper : helpers_) helper->wake.notify_one();
    for (auto& helper : helpers_) helper->thread.join();
  }

  // A ticket is one word with the job (upper half) and the piece (lower half). So a late thread cannot take a piece of
  // another job than the one that it read.
  std::uint64_t generation() const { return tickets_.load(std::memory_order_acquire) >> 32; }

  void take(std::uint64_t generation, std::size_t thread) {
    for (;;) {
      std::uint64_t ticket = tickets_.load(std::memory_order_acquire);
      do {
        if (ticket >> 32 != generation || (ticket & 0xffffffffu) >= count_ || thread >= threads_) return;
      } while (!tickets_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel));
      const std::size_t count = count_;  // until this piece is done the job stays
      piece_(job_, ticket & 0xffffffffu, thread);
      if (done_.fetch_add(1) + 1 < count || !waiting_.load()) continue;
      std::lock_guard<std::mutex> lock(mutex_);
      finished_.notify_one();
    }
  }

  void serve(Helper& me, std::size_t thread) {
    std::uint64_t seen = 0;
    while (!stopping_.load()) {
      for (int i = 0; i < spins_ && generation() == seen; ++i) pause();
      if (generation() == seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        me.sleeps.store(true);
        me.wake.wait(lock, [&] { return (generation() != seen && thread < threads_) || stopping_.load(); });
        me.sleeps.store(false);
        continue;
      }
      seen = generation();
      take(seen, thread);
    }
  }

  const int spins_;
  std::mutex mutex_;
  std::condition_variable finished_;
  std::atomic<bool> stopping_{false}, waiting_{false};
  alignas(64) std::atomic<std::uint64_t> tickets_{0};
  alignas(64) std::atomic<std::size_t> done_{0};
  Piece piece_ = nullptr;
  void* job_ = nullptr;
  std::atomic<std::size_t> count_{0}, threads_{0};
  std::vector<std::unique_ptr<Helper>> helpers_;
};

}  // namespace lamina
