// warp.cuh on a CPU: the lanes of a warp are fibers of one thread, which change places where a GPU's lanes would meet.
//
// It is stricter than a GPU where that finds mistakes. A background copy destroys its target at once and lands as late
// as it may, at the `sync` after its `wait`. The process ends when lanes meet at different instructions, when a
// background copy is never awaited or not aligned, and when a load of global memory reads shared memory.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "attention/cuda/warp.cuh"
#include "cuda_emulation/emulated_numbers.h"

#define LAMINA_DEVICE inline
#define __global__
#define __launch_bounds__(...)

namespace lamina::attention::cuda {

// The warp that runs now.
class Warp {
 public:
  static Warp& now() {
    static Warp warp;
    return warp;
  }

  // A kernel's `blocks` blocks of one warp each, one after the other, the first one first.
  void launch(int blocks, int shared_bytes, const std::function<void()>& kernel) {
#if defined(LAMINA_FTZ)
    const Subnormals flushed(false);
#endif
    blocks_ = blocks, kernel_ = kernel;
    takers_ = 0, asked_of_ = 0;
    for (block_ = 0; block_ < blocks; ++block_) {
      shared_.assign(std::size_t(shared_bytes) / 16 + 1, Line{});
      std::memset(shared_.data(), 0xff, shared_.size() * sizeof(Line));  // NaN: nothing is zero by itself
      asked_ = 0;
      run();
    }
    if (takers_ != asked_of_) fail("numbers that nobody took");
  }

  int lane() const { return lane_; }
  int block() const { return block_; }
  int blocks() const { return blocks_; }
  bool first_is_fast = false;
  char* shared() { return reinterpret_cast<char*>(shared_.data()); }

  // All lanes meet at the place `what`; each gives `mine`, and gets what the others gave.
  template <class X>
  const X* meet(const char* what, const X& mine) {
    static_assert(sizeof(X) <= sizeof(Line) * 2);
    const int turn = turn_[lane_]++ & 1;  // the board of the last meeting may still be read
    auto* board = reinterpret_cast<X*>(boards_[turn]);
    board[lane_] = mine;
    places_[turn][lane_] = what;
    next();
    for (int i = 0; i < kLanes; ++i)
      if (places_[turn][i] != places_[turn][0] || turn_[i] - turn_[lane_] > 1) fail("lanes meet at different places");
    return board;
  }

  // As if all warps were equally fast; or, `first_is_fast`, as if the first one were done before the others begin. The
  // counter is what a GPU makes of it.
  int take(u32* counter, int of) {
    meet("take", 0);
    if (lane_) return -(1 << 30);  // which no kernel should use
    if (int(*counter) != takers_) fail("a counter that was not left at 0, or more warps that ask than were said");
    asked_of_ = of;
    const int before = takers_++;
    *counter = takers_ == of ? 0 : u32(takers_);
    return first_is_fast ? before : block_ + blocks_ * asked_++;
  }

  void check_global(const void* p) {
    if (p >= shared_.data() && p < shared_.data() + shared_.size()) fail("a global load from shared memory");
  }

  void check_pair(const void* p) {
    if (std::uintptr_t(p) % 4) fail("two numbers that are not aligned");
  }

  // Of a matrix.
  void check_row(const void* p) {
    if (p < shared_.data() || p >= shared_.data() + shared_.size()) fail("a matrix elsewhere than in shared memory");
    if (std::uintptr_t(p) % 16) fail("a matrix's row that is not aligned");
  }

  void copy(void* to, const void* from, std::size_t bytes, bool real) {
    const auto* const end = static_cast<char*>(to) + bytes;
    if (to < shared_.data() || end > shared() + shared_.size() * sizeof(Line))
      fail("a copy to elsewhere than shared memory");
    if ((std::uintptr_t(to) | std::uintptr_t(from)) % bytes) fail("a copy that is not aligned");
    std::memset(to, 0xff, bytes);
    pending_[lane_].back().push_back({to, real ? from : nullptr, bytes});
  }
  void commit() { pending_[lane_].emplace_back(); }
  void wait(int left) {
    auto& groups = pending_[lane_];
    while (int(groups.size()) - 1 > left) {
      landed_[lane_].insert(landed_[lane_].end(), groups.front().begin(), groups.front().end());
      groups.pop_front();
    }
  }
  // What this lane has awaited becomes everybody's.
  void publish() {
    for (auto& [to, from, bytes] : landed_[lane_])
      if (from)
        std::memcpy(to, from, bytes);
      else
        std::memset(to, 0, bytes);
    landed_[lane_].clear();
  }

 private:
  struct alignas(16) Line {
    char bytes[16];
  };
  struct Copy {
    void* to;
    const void* from;
    std::size_t bytes;
  };
  static constexpr std::size_t kStack = 1 << 18;

  [[noreturn]] static void fail(const char* why) {
    std::fprintf(stderr, "emulated warp: %s\n", why);
    std::abort();
  }

  void run() {
    for (int i = 0; i < kLanes; ++i) {
      if (!stacks_[i]) stacks_[i].reset(new char[kStack]);
      ucontext_t& c = contexts_[i];
      getcontext(&c);
      c.uc_stack.ss_sp = stacks_[i].get(), c.uc_stack.ss_size = kStack, c.uc_link = nullptr;
      makecontext(&c, &Warp::enter, 0);
      started_[i] = done_[i] = false, turn_[i] = 0;
      pending_[i].assign(1, {});
      landed_[i].clear();
    }
    lane_ = 0;
    started_[0] = true;
    swapcontext(&home_, &contexts_[0]);
    for (int i = 0; i < kLanes; ++i) {
      if (turn_[i] != turn_[0]) fail("a lane left before the others");
      for (auto& group : pending_[i])
        if (!group.empty()) fail("copies that nobody awaits");
      if (!landed_[i].empty()) fail("copies that nobody shares");
    }
  }

  static void enter() {
    Warp& w = now();
    w.kernel_();
    w.done_[w.lane_] = true;
    w.next();
  }

  // To the next lane that is not done; home when all are.
  void next() {
    const int from = lane_;
    int to = (from + 1) % kLanes;
    for (int i = 0; done_[to] && i < kLanes; ++i) to = (to + 1) % kLanes;
    if (done_[to]) setcontext(&home_);
    if (to == from) return;
    if (!done_[from] && _setjmp(jumps_[from])) return;
    lane_ = to;
    if (!started_[to]) {
      started_[to] = true;
      setcontext(&contexts_[to]);
    }
    _longjmp(jumps_[to], 1);
  }

  int lane_ = 0, block_ = 0, blocks_ = 0;
  int takers_ = 0, asked_of_ = 0, asked_ = 0;  // of a launch; of the block
  std::function<void()> kernel_;
  std::vector<Line> shared_;
  std::unique_ptr<char[]> stacks_[kLanes];
  ucontext_t home_, contexts_[kLanes];
  jmp_buf jumps_[kLanes];
  bool started_[kLanes], done_[kLanes];
  int turn_[kLanes];
  alignas(16) char boards_[2][kLanes * sizeof(Line) * 2];
  const char* places_[2][kLanes];
  std::deque<std::vector<Copy>> pending_[kLanes];  // by commit, the open one last
  std::vector<Copy> landed_[kLanes];
};

inline int lane() { return Warp::now().lane(); }
inline int block() { return Warp::now().block(); }
inline int blocks() { return Warp::now().blocks(); }
inline char* shared_memory() { return Warp::now().shared(); }

inline void sync() {
  Warp::now().publish();
  Warp::now().meet("sync", 0);
}
template <class X>
inline X shuffle(X x, int from) {
  return Warp::now().meet("shuffle", x)[from];
}
template <class X>
inline X shuffle_xor(X x, int mask) {
  const int at = lane() ^ mask;
  return Warp::now().meet("shuffle_xor", x)[at];
}

template <int kBytes>
inline void copy(void* to, const void* from, bool real) {
  static_assert(kBytes == 16 || kBytes == 8 || kBytes == 4);
  Warp::now().copy(to, from, kBytes, real);
}
inline void commit() { Warp::now().commit(); }
template <int N>
inline void wait() {
  Warp::now().wait(N);
}

inline void load(u32 (&x)[4], const void* row, bool transposed) {
  Warp::now().check_row(row);
  const auto* rows = Warp::now().meet(transposed ? "load_transposed" : "load_matrices", static_cast<const u16*>(row));
  const int g = lane() / 4, t = lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const u16* const* m = rows + 8 * i;
    const u16 low = transposed ? m[2 * t][g] : m[g][2 * t], high = transposed ? m[2 * t + 1][g] : m[g][2 * t + 1];
    x[i] = u32(low) | u32(high) << 16;
  }
}
inline void load_matrices(u32 (&x)[4], const void* row) { load(x, row, false); }
inline void load_transposed(u32 (&x)[4], const void* row) { load(x, row, true); }
inline u32 transpose(u32 x) {
  const int g = lane() / 4, t = lane() % 4;
  const u32* all = Warp::now().meet("transpose", x);  // (row, columns 2c..) is with lane 4 row + c
  const u32 low = all[8 * t + g / 2], high = all[8 * t + 4 + g / 2];
  return (low >> 16 * (g % 2) & 0xffff) | (high >> 16 * (g % 2) & 0xffff) << 16;
}

template <class T>
inline void multiply(float& c0, float& c1, float& c2, float& c3, const u32 (&a)[4], const u32 (&b)[2]) {
  struct Mine {
    u32 a[4], b[2];
  };
  const Mine* all = Warp::now().meet("multiply", Mine{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}});
  const int g = lane() / 4, t = lane() % 4;
  const Subnormals kept(true);
  float* const c[4] = {&c0, &c1, &c2, &c3};
  for (int i = 0; i < 4; ++i) {
    const int row = g + 8 * (i / 2), column = 2 * t + i % 2;
    double sum = *c[i];
    for (int k = 0; k < 16; ++k) {
      const u32 x = all[row % 8 * 4 + k % 8 / 2].a[row / 8 + 2 * (k / 8)];
      const u32 y = all[column * 4 + k % 8 / 2].b[k / 8];
      sum += double(half_of<T>(x, k % 2)) * half_of<T>(y, k % 2);
    }
    *c[i] = float(sum);
  }
}

inline float load_own(const float* p) { return *p; }
inline float load_fresh(const float* p) {
  Warp::now().check_global(p);
  return *p;
}
inline int take(u32* counter, int of) { return Warp::now().take(counter, of); }
inline u32 load_pair(const void* p) {
  Warp::now().check_pair(p);
  u32 x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline bool second_to(u32* counter) {
  Warp::now().meet("second_to", 0);  // what the lanes have written is there
  u32 before = 0;
  if (lane() == 0) before = *counter, *counter ^= 1;
  return shuffle(int(before), 0) != 0;
}

}  // namespace lamina::attention::cuda
