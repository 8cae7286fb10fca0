// Send and receive on a stream, or in a CUDA graph between two slices: no CPU takes part in a message.
//
// HARDWARE-UNVERIFIED: compiled for every architecture we support, not yet run with a NIC. One block each. What
// changes from one launch to the next (seqno, slot, length) is in device memory, so a graph can be replayed. All
// launches of a channel are ordered by one stream or by edges of a graph: its counters have no lock. `*status` is
// sticky: after the first failure every later launch returns at once, and the host reads why. Compiled by nvcc and,
// at run time, by NVRTC.
#include "netstack/mlx5_channel.h"

using namespace lamina::mlx5;

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
__device__ Status persist(Bus& bus, const Channel& c, u64 timeout_ns, Step step) {
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

}  // namespace

// Send `*bytes` from `source` with the four words of `tag`. A null `source`: an earlier kernel has written the payload
// to the staging of message `channel->granted` itself.
extern "C" __global__ void lamina_mlx5_send(Channel* channel, const u8* source, const u64* bytes, const u64* tag,
                                            u64 timeout_ns, int* status) {
  __shared__ int ready;
  Bus bus;
  Channel& c = *channel;
  if (threadIdx.x == 0) {
    Status found = Status(*status);
    if (found == kOk && *bytes > c.out.bytes) found = kFault;
    if (found == kOk) found = wait_slot(bus, c, timeout_ns);
    settle(status, found);
    ready = found == kOk;
  }
  __syncthreads();
  if (!ready) return;
  if (source) copy(payload_of(c, c.granted), source, *bytes);
  __syncthreads();  // with commit's fence, all threads' stores come before the doorbell
  if (threadIdx.x != 0) return;
  c.granted += 1;
  settle(status, persist(bus, c, timeout_ns, [&] { return publish(bus, c, *bytes, tag); }));
}

// Receive the next message into `target`, which holds `room` bytes; its length and tag go to `bytes` and `tag`.
extern "C" __global__ void lamina_mlx5_receive(Channel* channel, u8* target, u64 room, u64* bytes, u64* tag,
                                               u64 timeout_ns, int* status) {
  __shared__ const u8* payload;
  __shared__ u64 length;
  Bus bus;
  Channel& c = *channel;
  if (threadIdx.x == 0) {
    payload = nullptr;
    Header header;
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
  if (!payload) return;
  copy(target, payload, length);
  __syncthreads();  // with commit's fence, all threads' loads come before the credit
  if (threadIdx.x != 0) return;
  c.released += 1;
  settle(status, persist(bus, c, timeout_ns, [&] { return report(bus, c); }));
}
