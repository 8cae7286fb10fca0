// The kernels of lamina.ops.attention.cuda, for one element type and head size. NVRTC compiles them at run time, nvcc
// and g++ in tests (tests/cuda_emulation). Blocks are single warps, which share nothing but L2.
//
// HARDWARE-UNVERIFIED: compiled for sm_80, sm_90 and sm_100, and run warp by warp on a CPU, not on a GPU.
//
// The compiler's command line defines LAMINA_ELEMENT (float, BFloat16, Half), and LAMINA_STORED if k and v are Int8 or
// Fp8. For tensor cores it also defines LAMINA_KEY_DIM, LAMINA_VALUE_DIM, LAMINA_COLUMNS, LAMINA_STAGES,
// LAMINA_NEAR_LEVELS and LAMINA_WARPS. Without these it is the plain core, for any head size up to 256.
#include "attention/cuda/plain.cuh"
#include "attention/cuda/tensor.cuh"

namespace lamina::attention::cuda {

using Element = LAMINA_ELEMENT;
#ifndef LAMINA_STORED
#define LAMINA_STORED LAMINA_ELEMENT
#endif
using Stored = LAMINA_STORED;
#ifdef LAMINA_COLUMNS
using Core = TensorCore<Element, LAMINA_KEY_DIM, LAMINA_VALUE_DIM, LAMINA_COLUMNS, LAMINA_STAGES, LAMINA_NEAR_LEVELS,
                        LAMINA_WARPS, Stored>;
#else
using Core = PlainCore<Element, Stored>;
#endif

}  // namespace lamina::attention::cuda

using namespace lamina::attention::cuda;

// See plan_step. A block for each 32 sequences.
extern "C" __global__ void __launch_bounds__(kLanes)
    lamina_plan(const int* counts, const Sequence* sequences, Plan* plan, int capacity, int tile, int group,
                int kv_heads, int warps, int stored) {
  plan_step({counts, sequences, nullptr, 0, 0}, *plan, capacity, tile, group, kv_heads, warps, stored);
}

// See Call. As many blocks as can run at a time.
extern "C" __global__ void __launch_bounds__(kLanes, Core::kWarps)
    lamina_attend(const int* counts, const Sequence* sequences, const int* table, int width, int block_shift,
                  const Plan* plan, int q_heads, int kv_heads, int qk_dim, int v_dim, int window, float scale,
                  float softcap, const float* sinks, const float* slopes, int stored, const Element* q, const Stored* k,
                  const Stored* v, const float* k_scale, const float* v_scale, float* o, float* lse, Element* out,
                  float* nodes, u32* counters, u32* taken, float* slots) {
  attend<Core>({{counts, sequences, table, width, block_shift},
                plan,
                {q_heads, kv_heads, qk_dim, v_dim, window, scale, softcap, sinks, slopes},
                stored != 0,
                q,
                k,
                v,
                k_scale,
                v_scale,
                o,
                lse,
                out,
                nodes,
                counters,
                taken,
                slots});
}

// Rows `left` [pairs] of o [N, Hq, Dv] and lse [N, Hq] become their merge with rows `right`. A block for each pair and head.
extern "C" __global__ void __launch_bounds__(kLanes)
    lamina_merge(float* o, float* lse, const i64* left, const i64* right, int heads, int v_dim) {
  const int pair = block() / heads, head = block() % heads;
  const i64 a = left[pair] * heads + head, b = right[pair] * heads + head;
  const Weights weights(lse[a], lse[b]);
  sync();  // all have read what is written now
  for (int d = lane(); d < v_dim; d += kLanes) {
    const i64 at = a * v_dim + d;
    o[at] = weights(o[at], o[b * v_dim + d]);
  }
  if (lane() == 0) lse[a] = weights.lse;
}

// merge.finish of o, lse [R, Hq, .] and sinks [Hq] or null. A block for each row and head.
extern "C" __global__ void __launch_bounds__(kLanes)
    lamina_close(const float* o, const float* lse, const float* new_o, const float* new_lse, const float* sinks,
                 int heads, int v_dim, Element* out) {
  const i64 at = block();
  const Weights both(lse[at], new_lse[at]), sunk(both.lse, sinks ? sinks[at % heads] : none());
  for (int d = lane(); d < v_dim; d += kLanes) {
    const i64 i = at * v_dim + d;
    round_to(out[i], sunk(both(o[i], new_o[i]), 0.0f));
  }
}

// Row r of k [R, Hkv, D] and v [R, Hkv, Dv], and of their scales [R, Hkv] or null, to token offsets[r] of block blocks[r]. A block for each row and head.
extern "C" __global__ void __launch_bounds__(kLanes)
    lamina_append(const Stored* k, const Stored* v, const float* k_scale, const float* v_scale, const i64* block_ids,
                  const i64* offsets, int kv_heads, int block_size, int qk_dim, int v_dim, Stored* k_store,
                  Stored* v_store, float* k_scales, float* v_scales) {
  const int r = block() / kv_heads, head = block() % kv_heads;
  const i64 to = (block_ids[r] * kv_heads + head) * block_size + offsets[r], from = block();
  for (int d = lane(); d < qk_dim; d += kLanes) k_store[to * qk_dim + d] = k[from * qk_dim + d];
  for (int d = lane(); d < v_dim; d += kLanes) v_store[to * v_dim + d] = v[from * v_dim + d];
  if (k_scale && lane() == 0) k_scales[to] = k_scale[from], v_scales[to] = v_scale[from];
}
