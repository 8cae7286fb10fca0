// Kernels of kernels.cu that put by a stand-in of NCCL's device API, which does later puts first: many messages on their
// way in both directions. Exits with 0 if every byte has come in order.
//
//     gin_order MESSAGES
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#define __global__
#define __launch_bounds__(threads)
#define __device__
#define __noinline__
#define __shared__ static thread_local
struct uint4 {
  unsigned x, y, z, w;
};
static constexpr struct {
  unsigned x;
} threadIdx{0}, blockDim{1}, blockIdx{0}, gridDim{1};
static inline void __syncthreads() {}
template <class T>
static inline T __ldcg(const T* at) {
  return *at;
}
#define LAMINA_GIN
#include "fake_nccl.cpp"
#include "netstack/kernels/kernels.cu"

namespace {

constexpr u64 kBytes = 300, kWaitNs = 60'000'000'000;

u64 length(u64 n, int of) { return (n * 7 + u64(of)) % (kBytes + 1); }

struct Side {
  Gin channel;
  int rank;

  void send(u64 messages) {
    u8 source[kBytes];
    int status = kOk;
    for (u64 n = 0; n < messages && status == kOk; ++n) {
      const u64 bytes = length(n, rank), tag[kTagWords] = {n};
      std::memset(source, int(n + u64(rank)), bytes);
      lamina_gin_send(&channel, source, &bytes, tag, kWaitNs, &status);
    }
    check(status == kOk, "a send failed");
  }
  void receive(u64 messages) {
    u8 target[kBytes];
    int status = kOk;
    for (u64 n = 0; n < messages; ++n) {
      u64 bytes = 0, tag[kTagWords] = {};
      lamina_gin_receive(&channel, target, kBytes, &bytes, tag, kWaitNs, &status);
      check(status == kOk && tag[0] == n && bytes == length(n, 1 - rank), "a message came out of its order");
      for (u64 i = 0; i < bytes; ++i) check(target[i] == u8(n + u64(1 - rank)), "a byte came wrong");
    }
  }
  static void check(bool good, const char* what) {
    if (good) return;
    std::printf("%s\n", what);
    std::fflush(stdout);
    std::_Exit(1);
  }
};

}  // namespace

int main(int, char** arguments) {
  const u64 messages = std::strtoull(arguments[1], nullptr, 10), abort = 0;
  const Slots slots{7, kBytes};
  fake_nccl::held_back = std::chrono::milliseconds(2);
  const u64 back = (slots.inbox_bytes() + 4095) / 4096 * 4096, bytes = back + slots.inbox_bytes();
  u8* memory[2] = {new u8[bytes](), new u8[bytes]()};
  ncclWindow_vidmem window{{memory[0], memory[1]}, bytes};
  fake_nccl::Network networks[2];
  ncclDevComm communicators[2];
  Side sides[2];
  for (int rank = 0; rank < 2; ++rank) {
    communicators[rank] = {0, 0, rank, 2, 1, {&networks[rank]}};
    const u64 to = rank ? back : 0, from = rank ? 0 : back;
    Gin& c = sides[rank].channel;
    c = {};
    c.staging = memory[rank] + to, c.inbox = memory[rank] + from, c.abort = &abort, c.out = c.in = slots;
    c.communicator = reinterpret_cast<u64>(&communicators[rank]), c.window = reinterpret_cast<u64>(&window);
    c.peer = u64(1 - rank), c.to = to, c.from = from;
    sides[rank].rank = rank;
  }
  std::thread others[] = {std::thread([&] { sides[0].send(messages); }), std::thread([&] { sides[1].send(messages); }),
                          std::thread([&] { sides[1].receive(messages); })};
  sides[0].receive(messages);
  for (std::thread& other : others) other.join();
  std::printf("messages %llu\n", messages);
}
