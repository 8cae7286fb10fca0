// A channel from the GPU's side: send and receive, to be put on a stream or into a CUDA graph between slices. What
// changes from one launch to the next (seqno, slot, length) is in device memory, so a graph can be replayed. All
// launches of a channel's direction are ordered by one stream or by edges of a graph: its counters have no lock (an
// mlx5 channel has one queue for both directions). `*status` is sticky: after the first failure every later launch
// returns at once, and the host reads why. Compiled by nvcc and, at run time, by NVRTC.
#include "netstack/memory_channel.h"
#include "netstack/mlx5_channel.h"

using namespace lamina::device;
using Mlx5 = lamina::mlx5::Channel;
using Memory = lamina::memory::Channel;

namespace {

// By all threads. The loads go to L2, where a NIC's writes land; L1 could hold what was there before.
__device__ void copy(u8* to, const u8* from, u64 bytes) {
  u64 done = 0;
  if ((reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from)) % sizeof(uint4) == 0) {
    const u64 words = bytes / sizeof(uint4);
    for (u64 i = threadIdx.x; i < words; i += blockDim.x)
      reinterpret_cast<uint4*>(to)[i] = __ldcg(reinterpret_cast<const uint4*>(from) + i);
    done = words * sizeof(uint4);
  }
  for (u64 i = done + threadIdx.x; i < bytes; i += blockDim.x) to[i] = __ldcg(from + i);
}

// Repeats what may find the ring full. `step` returns kPending until it is done.
template <class Step>
__device__ Status persist(Bus& bus, const Ends& c, u64 timeout_ns, Step step) {
  const u64 start = bus.now_ns();
  for (;;) {
    const Status status = step();
    if (status != kPending) return status;
    if (bus.load(c.abort)) return kAborted;
    if (bus.now_ns() - start >= timeout_ns) return kTimeout;
    bus.rest(32);
  }
}

__device__ void settle(int* status, Status found) {
  if (*status == kOk) *status = found;
}

// By one thread.
__device__ void reserve(Ends& c, u64 timeout_ns, int* status) {
  Bus bus;
  if (*status != kOk) return;
  const Status found = wait_slot(bus, c, timeout_ns);
  if (found == kOk) c.granted += 1;
  settle(status, found);
}

// By all threads, as are the next two.
template <class C>
__device__ void put(C& c, const u8* source, const u64* bytes, const u64* tag, u64 timeout_ns, int* status) {
  __shared__ int ready;
  if (threadIdx.x == 0) {
    if (*bytes > c.out.bytes || c.published == c.granted) settle(status, kFault);
    ready = *status == kOk;
  }
  __syncthreads();
  if (!ready) return;
  if (source) copy(payload_of(c, c.published), source, *bytes);
  __syncthreads();  // with publish's fence, all threads' stores come before the signal
  if (threadIdx.x != 0) return;
  Bus bus;
  settle(status, persist(bus, c, timeout_ns, [&] { return publish(bus, c, *bytes, tag); }));
}

// False if it failed.
__device__ bool take(Ends& c, u8* target, u64 room, u64* bytes, u64* tag, u64 timeout_ns, int* status) {
  __shared__ const u8* payload;
  __shared__ u64 length;
  if (threadIdx.x == 0) {
    Bus bus;
    payload = nullptr;
    Header header = {};
    Status found = Status(*status);
    if (found == kOk) found = wait_message(bus, c, timeout_ns);
    const u8* from = nullptr;
    if (found == kOk) found = take(bus, c, &header, &from);
    if (found == kOk && header.length > room) found = kFault;
    settle(status, found);
    if (found == kOk) {
      payload = from;
      length = *bytes = header.length;
      for (u64 i = 0; i < kTagWords; ++i) tag[i] = header.tag[i];
    }
  }
  __syncthreads();
  if (!payload) return false;
  copy(target, payload, length);
  __syncthreads();  // with report's fence, all threads' loads come before the credit
  return true;
}

template <class C>
__device__ void release(C& c, u64 timeout_ns, int* status) {
  if (threadIdx.x != 0 || *status != kOk) return;
  Bus bus;
  if (c.released == c.received) return settle(status, kFault);
  c.released += 1;
  settle(status, persist(bus, c, timeout_ns, [&] { return report(bus, c); }));
}

template <class C>
__device__ void send(C& c, const u8* source, const u64* bytes, const u64* tag, u64 timeout_ns, int* status) {
  if (threadIdx.x == 0) {
    if (*bytes > c.out.bytes) settle(status, kFault);
    reserve(c, timeout_ns, status);
  }
  put(c, source, bytes, tag, timeout_ns, status);
}

template <class C>
__device__ void receive(C& c, u8* target, u64 room, u64* bytes, u64* tag, u64 timeout_ns, int* status) {
  if (take(c, target, room, bytes, tag, timeout_ns, status)) release(c, timeout_ns, status);
}

}  // namespace

// Send `*bytes` from `source` with the four words of `tag`. A null `source`: an earlier kernel has written the payload
// to that of message `channel->published` itself.
extern "C" __global__ void lamina_mlx5_send(Mlx5* channel, const u8* source, const u64* bytes, const u64* tag,
                                            u64 timeout_ns, int* status) {
  send(*channel, source, bytes, tag, timeout_ns, status);
}

extern "C" __global__ void lamina_memory_send(Memory* channel, const u8* source, const u64* bytes, const u64* tag,
                                              u64 timeout_ns, int* status) {
  send(*channel, source, bytes, tag, timeout_ns, status);
}

// Receive the next message into `target`, which holds `room` bytes; its length and tag go to `bytes` and `tag`.
extern "C" __global__ void lamina_mlx5_receive(Mlx5* channel, u8* target, u64 room, u64* bytes, u64* tag,
                                               u64 timeout_ns, int* status) {
  receive(*channel, target, room, bytes, tag, timeout_ns, status);
}

extern "C" __global__ void lamina_memory_receive(Memory* channel, u8* target, u64 room, u64* bytes, u64* tag,
                                                 u64 timeout_ns, int* status) {
  receive(*channel, target, room, bytes, tag, timeout_ns, status);
}

// The halves of both, for a host that reserves ahead and holds what it has received. The counts are the host's, so a
// step that the host gave up may be done again.
extern "C" __global__ void lamina_memory_reserve(Memory* channel, u64 granted, u64 timeout_ns, int* status) {
  if (threadIdx.x != 0) return;
  channel->granted = granted;
  reserve(*channel, timeout_ns, status);
}

extern "C" __global__ void lamina_memory_put(Memory* channel, const u8* source, const u64* bytes, const u64* tag,
                                             u64 timeout_ns, int* status) {
  put(*channel, source, bytes, tag, timeout_ns, status);
}

extern "C" __global__ void lamina_memory_take(Memory* channel, u64 received, u8* target, u64 room, u64* bytes, u64* tag,
                                              u64 timeout_ns, int* status) {
  if (threadIdx.x == 0) channel->received = received;
  take(*channel, target, room, bytes, tag, timeout_ns, status);
}

// `released`: with the one that is released now.
extern "C" __global__ void lamina_memory_release(Memory* channel, u64 released, u64 timeout_ns, int* status) {
  if (threadIdx.x == 0) channel->released = released - 1;
  release(*channel, timeout_ns, status);
}

// The time, in nanoseconds of the GPU's clock, into the next of `times`.
extern "C" __global__ void lamina_stamp(u64* times, u64* count) {
  Bus bus;
  if (threadIdx.x == 0) times[(*count)++] = bus.now_ns();
}
