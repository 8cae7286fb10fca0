// The kernels of kernels.cu as blocks of threads that sleep at barriers, for -fsanitize=thread: one block sends, one
// receives, over many laps of a small ring. Exits with 0 if every byte arrived in order.
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

constexpr unsigned kThreads = 4;

struct Block {
  std::mutex mutex;
  std::condition_variable changed;
  unsigned waiting = 0, lap = 0;

  void meet() {
    std::unique_lock<std::mutex> lock(mutex);
    const unsigned mine = lap;
    if (++waiting == kThreads) {
      waiting = 0;
      ++lap;
      changed.notify_all();
    } else {
      changed.wait(lock, [&] { return lap != mine; });
    }
  }
};

static thread_local Block* block;
static thread_local struct {
  unsigned x;
} threadIdx;
static constexpr struct {
  unsigned x;
} blockDim{kThreads}, blockIdx{0}, gridDim{1};

#define __global__
#define __launch_bounds__(threads)
#define __device__
#define __shared__ static  // there is one block of a kind
struct uint4 {
  unsigned x, y, z, w;
};
static void __syncthreads() { block->meet(); }
template <class T>
static T __ldcg(const T* at) {
  return *at;
}
#include "netstack/kernels/kernels.cu"

namespace {

constexpr u64 kBytes = 2200;  // two laps of a copy, and more
constexpr u64 kSecondNs = 1'000'000'000;

// `messages` launches of a block, each of which begins when the one before it has ended.
template <class Launch>
void run(Block& own, u64 messages, Launch launch) {
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < kThreads; ++i)
    threads.emplace_back([&own, i, messages, launch] {
      block = &own;
      threadIdx.x = i;
      for (u64 n = 0; n < messages; ++n) {
        launch(n);
        own.meet();
      }
    });
  for (std::thread& thread : threads) thread.join();
}

u64 length(u64 n) { return n * 7 % (kBytes + 1); }

}  // namespace

int main(int argc, char** argv) {
  const u64 messages = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1000;
  const Slots slots{3, kBytes};
  std::vector<u8> there(slots.inbox_bytes()), back(slots.inbox_bytes());
  const u64 abort = 0;
  Memory a{{there.data(), back.data(), &abort, slots, slots, 0, 0, 0, 0, 0, 0, 0}, 0};
  Memory b{{back.data(), there.data(), &abort, slots, slots, 0, 0, 0, 0, 0, 0, 0}, 0};
  alignas(16) static u8 source[kBytes], target[kBytes];
  static u64 out_bytes, in_bytes, out_tag[kTagWords], in_tag[kTagWords];
  static int sent = 0, received = 0;
  Block sender, receiver;
  std::thread other([&] {
    run(receiver, messages, [&](u64 n) {
      if (n % 2) {  // as the kernels that a long message is of, each of which ends before the next one begins
        lamina_memory_receive_begin(&b, kBytes, &in_bytes, in_tag, 20 * kSecondNs, &received);
        block->meet();
        lamina_memory_receive_drain(&b, target, &in_bytes, &received);
        block->meet();
        lamina_memory_receive_end(&b, 20 * kSecondNs, &received);
      } else {
        lamina_memory_receive(&b, target, kBytes, &in_bytes, in_tag, 20 * kSecondNs, &received);
      }
      block->meet();
      if (threadIdx.x != 0) return;
      bool good = received == kOk && in_bytes == length(n) && in_tag[0] == n;
      for (u64 i = 0; good && i < in_bytes; ++i) good = target[i] == u8(n);
      if (!good) {
        std::fprintf(stderr, "message %llu is wrong, status %d\n", n, received);
        std::_Exit(1);
      }
    });
  });
  run(sender, messages, [&](u64 n) {
    if (threadIdx.x == 0) {
      out_bytes = length(n);
      out_tag[0] = n;
      std::memset(source, int(n & 0xff), kBytes);
    }
    block->meet();
    if (n % 3 == 0) return lamina_memory_send(&a, source, &out_bytes, out_tag, 20 * kSecondNs, &sent);
    lamina_memory_send_begin(&a, source, nullptr, &out_bytes, 20 * kSecondNs, &sent);
    block->meet();
    lamina_memory_send_fill(&a, source, nullptr, &out_bytes, &sent);
    block->meet();
    lamina_memory_send_end(&a, source, nullptr, &out_bytes, out_tag, 20 * kSecondNs, &sent);
  });
  other.join();
  std::printf("messages %llu status %d\n", messages, sent);
}
