// A channel from the GPU's side: send and receive, to be put on a stream or into a CUDA graph between slices. What
// changes from one launch to the next (seqno, slot, length) is in device memory, so a graph can be replayed. All
// launches of a channel's direction are ordered by one stream or by edges of a graph: its counters have no lock.
// `*status` is sticky: after the first failure every later launch returns at once, and the host reads why. Compiled by
// NVRTC at run time, and by nvcc; with -DLAMINA_GIN, which adds links of NCCL's device API, by nvcc alone.
#include "netstack/gin_channel.h"
#include "netstack/memory_channel.h"
#include "netstack/mlx5_channel.h"

using namespace lamina::device;
using Mlx5 = lamina::mlx5::Channel;
using Memory = lamina::memory::Channel;
using Gin = lamina::gin::Channel;

namespace {

constexpr int kBlockThreads = 256;  // cuda_driver.THREADS

// Loads of a thread in flight, of 16 bytes each: 64 KiB for a block. At a latency of 1 us (assumed, not measured), PCIe 5
// x16 needs 63 KB for its 63 GB/s. NVLink 4 needs 450 KB for 450 GB/s in one direction, so several blocks share the copy
// of a long message (calls.py).
constexpr int kAhead = 16;

// By all threads of all blocks, as many whole words as there are: the bytes copied. The loads go to L2, where a NIC's
// writes land; L1 could hold what was there before.
template <class Word>
__device__ u64 copy_words(u8* to, const u8* from, u64 bytes) {
  const u64 words = bytes / sizeof(Word), step = u64(gridDim.x) * blockDim.x;
  for (u64 at = blockIdx.x * blockDim.x + threadIdx.x; at < words; at += kAhead * step) {
    Word held[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (at + i * step < words) held[i] = __ldcg(reinterpret_cast<const Word*>(from) + at + i * step);
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (at + i * step < words) reinterpret_cast<Word*>(to)[at + i * step] = held[i];
  }
  return words * sizeof(Word);
}

// In the largest words that both places allow, then what is left of them byte by byte.
__device__ void copy(u8* to, const u8* from, u64 bytes) {
  const u64 places = reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from);
  u64 done = 0;
  if (places % sizeof(uint4) == 0)
    done = copy_words<uint4>(to, from, bytes);
  else if (places % sizeof(u64) == 0)
    done = copy_words<u64>(to, from, bytes);
  else if (places % sizeof(u32) == 0)
    done = copy_words<u32>(to, from, bytes);
  copy_words<u8>(to + done, from + done, bytes - done);
}

__device__ void settle(int* status, Status found) {
  if (*status == kOk) *status = found;
}

// A message's payload: `bytes[0]` from `first`, then, if there is a `second`, `bytes[1]` from it.
struct Source {
  const u8 *first, *second;
  const u64* bytes;

  __device__ u64 total() const { return bytes[0] + (second ? bytes[1] : 0); }
  // Of counts that may be anything.
  __device__ bool fits(u64 room) const { return bytes[0] <= room && (!second || bytes[1] <= room - bytes[0]); }
};

// By one thread.
template <class C>
__device__ void reserve(C& c, u64 timeout_ns, int* status) {
  Bus bus;
  if (*status != kOk) return;
  const Status found = wait_slot_or_tell(bus, c, timeout_ns);
  if (found == kOk) c.granted += 1;
  settle(status, found);
}

// A granted message's payload into its slot.
template <class C>
__device__ void fill(const C& c, Source source) {
  u8* payload = payload_of(c, c.published);
  copy(payload, source.first, source.bytes[0]);
  if (source.second) copy(payload + source.bytes[0], source.second, source.bytes[1]);
}

// By one thread, once the payload is in place.
template <class C>
__device__ void post(C& c, Source source, const u64* tag, u64 timeout_ns, int* status) {
  Bus bus;
  settle(status, persist(bus, c, timeout_ns, [&] { return publish(bus, c, source.total(), tag); }));
}

// By all threads, as are the next two.
template <class C>
__device__ void put(C& c, Source source, const u64* tag, u64 timeout_ns, int* status) {
  __shared__ int ready;
  if (threadIdx.x == 0) {
    if (!source.fits(c.out.bytes) || c.published == c.granted) settle(status, kFault);
    ready = *status == kOk;
  }
  __syncthreads();
  if (!ready) return;
  fill(c, source);
  __syncthreads();  // with publish's fence, all threads' stores come before the signal
  if (threadIdx.x == 0) post(c, source, tag, timeout_ns, status);
}

// The expected message: its length `*bytes` and its `tag`. For another message, `note` gets the length and tag of both.
struct Due {
  const u64 *bytes, *tag;
  u64* note;

  __device__ Status operator()(const Header& header) const {
    bool same = header.length == *bytes;
    for (u64 i = 0; i < kTagWords; ++i) same = same && header.tag[i] == tag[i];
    if (same) return kOk;
    u64* due = note + 1 + kTagWords;
    note[0] = header.length;
    due[0] = *bytes;
    for (u64 i = 0; i < kTagWords; ++i) {
      note[1 + i] = header.tag[i];
      due[1 + i] = tag[i];
    }
    return kFault;
  }
};

// By one thread: `met` says what to make of the next message's header. False if it failed.
template <class C, class Met>
__device__ bool arrive(C& c, u64 timeout_ns, int* status, Met met, u64* length, const u8** payload) {
  Bus bus;
  Header header = {};
  Status found = Status(*status);
  if (found == kOk) found = wait_message(bus, c, timeout_ns);
  if (found == kOk) found = take(bus, c, &header, payload);
  if (found == kOk) found = met(header);
  settle(status, found);
  *length = header.length;
  return found == kOk;
}

template <class C, class Met>
__device__ bool take(C& c, u8* target, u64 timeout_ns, int* status, Met met) {
  __shared__ const u8* payload;
  __shared__ u64 length;
  if (threadIdx.x == 0) {
    const u8* from = nullptr;
    u64 bytes = 0;
    payload = arrive(c, timeout_ns, status, met, &bytes, &from) ? from : nullptr;
    length = bytes;
  }
  __syncthreads();
  if (!payload) return false;
  copy(target, payload, length);
  __syncthreads();  // with report's fence, all threads' loads come before the credit
  return true;
}

// Into `bytes` and `tag`, of a message of up to `room` bytes.
struct Any {
  u64 room, *bytes, *tag;

  __device__ Status operator()(const Header& header) const {
    if (header.length > room) return kFault;
    *bytes = header.length;
    for (u64 i = 0; i < kTagWords; ++i) tag[i] = header.tag[i];
    return kOk;
  }
};

// Release the last message. The peer is notified once that is necessary.
template <class C>
__device__ void release(C& c, u64 timeout_ns, int* status) {
  if (threadIdx.x != 0 || *status != kOk) return;
  Bus bus;
  give_back(bus, c, c.received);
  settle(status, persist(bus, c, timeout_ns, [&] { return report_due(bus, c); }));
}

// By one thread.
template <class C>
__device__ void begin(C& c, Source source, u64 timeout_ns, int* status) {
  if (!source.fits(c.out.bytes)) settle(status, kFault);
  reserve(c, timeout_ns, status);
}

template <class C>
__device__ void send(C& c, Source source, const u64* tag, u64 timeout_ns, int* status) {
  if (threadIdx.x == 0) begin(c, source, timeout_ns, status);
  put(c, source, tag, timeout_ns, status);
}

template <class C, class Met>
__device__ void receive(C& c, u8* target, u64 timeout_ns, int* status, Met met) {
  if (take(c, target, timeout_ns, status, met)) release(c, timeout_ns, status);
}

// One message of a launch for several channels: the rows of a tensor, a part of each. It is `bytes[0]` long, in parts of
// `width[0]` bytes that begin `at[0]` bytes into a row, then, with a second tensor, `bytes[1]` in parts of `width[1]`.
template <class C>
struct Share {
  C* channel;
  const u64 *bytes, *tag;
  u64* note;  // of a receive: see Due
  int* status;
  u64 at[2], width[2];
};

// `rows` parts of `width` bytes, `to_step` and `from_step` bytes apart, by part `part` of `parts` of the blocks.
template <class Word>
__device__ void copy_words_of_rows(u8* to, u64 to_step, const u8* from, u64 from_step, u64 width, u64 rows, u64 part,
                                   u64 parts) {
  const u32 each = u32(width / sizeof(Word)), words = u32(rows) * each, step = u32(parts * blockDim.x);
  for (u32 at = u32(part * blockDim.x + threadIdx.x); at < words; at += kAhead * step) {
    Word held[kAhead];
#pragma unroll
    for (u32 i = 0; i < kAhead; ++i)
      if (const u32 word = at + i * step; word < words)
        held[i] = __ldcg(reinterpret_cast<const Word*>(from + word / each * from_step) + word % each);
#pragma unroll
    for (u32 i = 0; i < kAhead; ++i)
      if (const u32 word = at + i * step; word < words)
        reinterpret_cast<Word*>(to + word / each * to_step)[word % each] = held[i];
  }
}

// In the largest words that all places allow.
__device__ void copy_rows(u8* to, u64 to_step, const u8* from, u64 from_step, u64 width, u64 rows, u64 part,
                          u64 parts) {
  const u64 places = reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from) | to_step | from_step | width;
  if (places % sizeof(uint4) == 0)
    copy_words_of_rows<uint4>(to, to_step, from, from_step, width, rows, part, parts);
  else if (places % sizeof(u64) == 0)
    copy_words_of_rows<u64>(to, to_step, from, from_step, width, rows, part, parts);
  else if (places % sizeof(u32) == 0)
    copy_words_of_rows<u32>(to, to_step, from, from_step, width, rows, part, parts);
  else
    copy_words_of_rows<u8>(to, to_step, from, from_step, width, rows, part, parts);
}

// The tensors of a launch: rows `step` bytes apart. Without a second one it is null.
struct Rows {
  u8* first;
  u64 first_step;
  u8* second;
  u64 second_step;
};

// Whether both lengths are of whole rows, and fit.
template <class C>
__device__ bool whole(const Share<C>& share, const Rows& rows, u64 room) {
  const Source source{rows.first, rows.second, share.bytes};
  return source.fits(room) && share.bytes[0] % share.width[0] == 0 &&
         (!rows.second || share.bytes[1] % share.width[1] == 0);
}

// A granted message's payload, out of its rows.
template <class C>
__device__ void fill_rows(const Share<C>& share, const Rows& rows, u64 part, u64 parts) {
  u8* payload = payload_of(*share.channel, share.channel->published);
  const u64 *width = share.width, *bytes = share.bytes;
  copy_rows(payload, width[0], rows.first + share.at[0], rows.first_step, width[0], bytes[0] / width[0], part, parts);
  if (!rows.second) return;
  payload += bytes[0];
  copy_rows(payload, width[1], rows.second + share.at[1], rows.second_step, width[1], bytes[1] / width[1], part, parts);
}

// What was taken last, into its rows.
template <class C>
__device__ void drain_rows(const Share<C>& share, const Rows& rows, u64 part, u64 parts) {
  const u8* payload = payload_in(*share.channel, share.channel->received - 1);
  const u64 width = share.width[0];
  copy_rows(rows.first + share.at[0], rows.first_step, payload, width, width, share.bytes[0] / width, part, parts);
}

// By one thread, as are the next two.
template <class C>
__device__ void begin_rows(const Share<C>& share, const Rows& rows, u64 timeout_ns) {
  if (!whole(share, rows, share.channel->out.bytes)) settle(share.status, kFault);
  reserve(*share.channel, timeout_ns, share.status);
}

template <class C>
__device__ void post_rows(const Share<C>& share, const Rows& rows, u64 timeout_ns) {
  if (*share.status == kOk)
    post(*share.channel, Source{rows.first, rows.second, share.bytes}, share.tag, timeout_ns, share.status);
}

template <class C>
__device__ void arrive_rows(const Share<C>& share, const Rows& rows, u64 timeout_ns) {
  if (!whole(share, rows, share.channel->in.bytes)) settle(share.status, kFault);
  u64 length;
  const u8* payload;
  arrive(*share.channel, timeout_ns, share.status, Due{share.bytes, share.tag, share.note}, &length, &payload);
}

// By all threads of a block, as is the next one.
template <class C>
__device__ void send_rows(const Share<C>& share, const Rows& rows, u64 timeout_ns) {
  __shared__ int ready;
  if (threadIdx.x == 0) {
    begin_rows(share, rows, timeout_ns);
    ready = *share.status == kOk;
  }
  __syncthreads();
  if (!ready) return;
  fill_rows(share, rows, 0, 1);
  __syncthreads();  // with publish's fence, all threads' stores come before the signal
  if (threadIdx.x == 0) post_rows(share, rows, timeout_ns);
}

template <class C>
__device__ void receive_rows(const Share<C>& share, const Rows& rows, u64 timeout_ns) {
  __shared__ int ready;
  if (threadIdx.x == 0) {
    arrive_rows(share, rows, timeout_ns);
    ready = *share.status == kOk;
  }
  __syncthreads();
  if (!ready) return;
  drain_rows(share, rows, 0, 1);
  __syncthreads();  // with report's fence, all threads' loads come before the credit
  release(*share.channel, timeout_ns, share.status);
}

// `count` round trips of messages of `bytes`, by all threads. The leader's message n is a copy of `sources[n % kinds]`,
// which are contiguous. The other side returns what it received. Received messages go to `targets[n]`. `times` gets the
// GPU's clock before the first round and after each.
template <class C>
__device__ void rounds(C& c, const u8* sources, u64 kinds, u8* targets, u64 bytes, u64 count, bool leads, u64* times,
                       u64 timeout_ns, int* status) {
  Bus bus;
  const auto is_due = [=](u64 n) {
    return [=](const Header& header) { return header.length == bytes && header.tag[0] == n ? kOk : kFault; };
  };
  if (threadIdx.x == 0) times[0] = bus.now_ns();
  for (u64 n = 0; n < count; ++n) {
    const u64 tag[kTagWords] = {n};
    u8* came = targets + n * bytes;
    if (leads) send(c, Source{sources + n % kinds * bytes, nullptr, &bytes}, tag, timeout_ns, status);
    if (!take(c, came, timeout_ns, status, is_due(n))) return;
    release(c, timeout_ns, status);
    if (!leads) send(c, Source{came, nullptr, &bytes}, tag, timeout_ns, status);
    if (threadIdx.x == 0) times[n + 1] = bus.now_ns();
  }
}

}  // namespace

#define LAMINA_KERNEL extern "C" __global__ void __launch_bounds__(kBlockThreads)

#define LAMINA_OF_LINK(name) lamina_mlx5_##name
#define LAMINA_LINK Mlx5
#include "netstack/kernels/link.h"
#undef LAMINA_OF_LINK
#undef LAMINA_LINK

#define LAMINA_OF_LINK(name) lamina_memory_##name
#define LAMINA_LINK Memory
#include "netstack/kernels/link.h"
#undef LAMINA_OF_LINK
#undef LAMINA_LINK

#if defined(LAMINA_GIN)
#define LAMINA_OF_LINK(name) lamina_gin_##name
#define LAMINA_LINK Gin
#include "netstack/kernels/link.h"
#undef LAMINA_OF_LINK
#undef LAMINA_LINK

// As lamina_mlx5_flush, but by cycles of the GPU, of which no known one has fewer than one in a nanosecond at work.
LAMINA_KERNEL lamina_gin_flush(Gin* channel, const u64*, u64 timeout_ns, int* status) {
  if (threadIdx.x != 0 || *status != kOk) return;
  const lamina::gin::Putter p(*channel);
  const auto found = p.gin.flush(ncclCoopThread{}, cuda::memory_order_acquire, ncclGin_None{}, timeout_ns);
  settle(status, found == ncclSuccess ? kOk : kTimeout);
}
#endif

// See flush of mlx5_channel.h.
LAMINA_KERNEL lamina_mlx5_flush(Mlx5* channel, const u64* abort, u64 timeout_ns, int* status) {
  if (threadIdx.x != 0 || *status != kOk) return;
  Bus bus;
  settle(status, flush(bus, *channel, abort, timeout_ns));
}

// The time, in nanoseconds of the GPU's clock, into the next of `times`.
LAMINA_KERNEL lamina_stamp(u64* times, u64* count) {
  Bus bus;
  if (threadIdx.x == 0) times[(*count)++] = bus.now_ns();
}
