// Threads that help with one job after the other, and sleep in between.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "places.h"

namespace lamina::attention {

class Pool {
 public:
  Pool() = default;
  Pool(const Pool&) = delete;
  ~Pool() {
    {
      std::lock_guard lock(mutex_);
      ending_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  // work(0) here and, at the same time, work(1) .. work(helpers) on threads that wake up before it is over here: it must
  // share out what there is to do as it goes, so that nobody waits for a thread that gets no core.
  template <class F>
  void run(int helpers, F&& work) {
    if (helpers < 1) return work(0);
    {
      std::lock_guard lock(mutex_);
      start(helpers);
      work_ = [](void* f, int number) { (*static_cast<std::remove_reference_t<F>*>(f))(number); };
      argument_ = &work, open_ = helpers, next_ = 1;
    }
    for (int i = 0; i < helpers; ++i) wake_.notify_one();
    work(0);
    std::unique_lock lock(mutex_);
    open_ = 0;
    idle_.wait(lock, [&] { return active_ == 0; });
  }

 private:
  void start(int helpers) {
    try {
      while (int(threads_.size()) < helpers) {
        threads_.emplace_back([this] { loop(); });
        leave_bound_core(threads_.back());
      }
    } catch (const std::system_error&) {
      // no more threads: those that exist do the work
    }
  }

  void loop() {
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return open_ > 0 || ending_; });
      if (ending_) return;
      --open_, ++active_;
      const int number = next_++;
      lock.unlock();
      work_(argument_, number);
      lock.lock();
      if (--active_ == 0) idle_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::vector<std::thread> threads_;
  void (*work_)(void*, int) = nullptr;
  void* argument_ = nullptr;
  int open_ = 0, active_ = 0, next_ = 0;  // places left in the job, threads in it, number of the next one
  bool ending_ = false;
};

}  // namespace lamina::attention
