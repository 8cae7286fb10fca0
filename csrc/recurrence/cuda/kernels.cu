// The kernel of lamina.ops.recurrence.cuda: causal convolution and recurrence, token by token. CuPy compiles it at run
// time, nvcc and g++ in tests (tests/cuda_emulation). Blocks are single warps, which share nothing.
//
// HARDWARE-UNVERIFIED: compiled for sm_80, sm_90 and sm_100, and run warp by warp on a CPU, not on a GPU.
//
// A warp has 32 columns of one head's state S [K, V] for all rows of one segment. S lies in shared memory meanwhile: it is
// read once and written once, as on a CPU. Each number is computed in one order, whatever else the launch has.
#include "attention/cuda/warp.cuh"

namespace lamina::recurrence::cuda {

using attention::cuda::block;
using attention::cuda::i64;
using attention::cuda::kLanes;
using attention::cuda::lane;
using attention::cuda::shared_memory;
using attention::cuda::shuffle_xor;
using attention::cuda::sync;

enum Kind { kConvolution, kGatedDelta, kKimiDelta, kMamba2 };

// RecurrenceSpec; the module lays it out.
struct Layer {
  int kind, heads, heads_per_group, first_head, key_dim, value_dim, width, channels, q_first, k_first, v_first;
  int history_size, silu, normalised, softplus;
  float scale, least, most;  // most: 0 = no bound
};

// Rows first .. first + rows; see Segment.
struct Segment {
  i64 first, rows, prompt, read, write;
};

// The causal convolution of one segment's rows.
struct Convolution {
  const Layer& layer;
  const float *x, *weight, *bias, *history;  // history: 0 at the beginning of a sequence
  i64 first;

  // Channel c of row t of the segment; rows before it are of its history.
  LAMINA_DEVICE float input(i64 t, int c) const {
    if (t >= 0) return x[(first + t) * layer.channels + c];
    return history ? history[(layer.width - 1 + t) * layer.channels + c] : 0.0f;
  }

  LAMINA_DEVICE float operator()(i64 t, int c) const {
    float y = 0.0f;
    for (int j = 0; j < layer.width; ++j) y += input(t - layer.width + 1 + j, c) * weight[c * layer.width + j];
    if (bias) y += bias[c];
    return layer.silu ? y / (1.0f + expf(-y)) : y;
  }

  // The last rows of channel c after `rows` rows.
  LAMINA_DEVICE void keep(float* after, i64 rows, int c) const {
    for (int i = 0; i < layer.width - 1; ++i) after[i * layer.channels + c] = input(rows - (layer.width - 1) + i, c);
  }
};

LAMINA_DEVICE float sum_of_lanes(float x) {
  for (int mask = kLanes / 2; mask; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}

LAMINA_DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

}  // namespace lamina::recurrence::cuda

using namespace lamina::recurrence::cuda;

// Blocks: for each segment `tasks` of them, one for 32 channels of a convolution, or for 32 columns of a head. `gate`
// is g or dt, `beta` is of delta rules; `fade`, `skip`, `dt_bias` are of Mamba-2, where there are such. States are
// [slots, stride]. All inputs are fp32 [rows, columns].
extern "C" __global__ void __launch_bounds__(kLanes)
    lamina_recur(const Segment* segments, const Layer* layers, int tasks, const float* x, const float* gate,
                 const float* beta, const float* weight, const float* bias, const float* fade, const float* skip,
                 const float* dt_bias, float* states, i64 stride, float* out) {
  const Layer layer = *layers;
  const Segment segment = segments[block() / tasks];
  const int task = block() % tasks, size = layer.value_dim, keys = layer.key_dim;
  const float* const before = segment.read < 0 ? nullptr : states + segment.read * stride;
  float* const after = states + segment.write * stride;
  const Convolution convolve{layer, x, weight, bias, before, segment.first};

  if (layer.kind == kConvolution) {
    const int c = task * kLanes + lane();
    if (c >= layer.heads) return;
    for (i64 t = 0; t < segment.rows; ++t) out[(segment.first + t) * layer.heads + c] = convolve(t, c);
    convolve.keep(after, segment.rows, c);
    return;
  }

  const int parts = (size + kLanes - 1) / kLanes, h = task / parts, d = task % parts * kLanes + lane();
  const int group = (layer.first_head + h) / layer.heads_per_group;
  const bool has = d < size, is_delta = layer.kind != kMamba2;
  const int q_first = layer.q_first + group * keys, k_first = layer.k_first + group * keys;
  float* const s = reinterpret_cast<float*>(shared_memory());  // [K, 32]
  float* const k = s + keys * kLanes;  // [K] each
  float* const q = k + keys;
  float* const decay = q + keys;
  const i64 place = layer.history_size + (i64(h) * keys) * size + d;  // of S[0, d]
  for (int i = 0; i < keys; ++i) s[i * kLanes + lane()] = before && has ? before[place + i64(i) * size] : 0.0f;

  for (i64 t = 0; t < segment.rows; ++t) {
    const i64 row = segment.first + t;
    float of_q = 0.0f, of_k = 0.0f;
    for (int i = lane(); i < keys; i += kLanes) {
      q[i] = convolve(t, q_first + i), k[i] = convolve(t, k_first + i);
      of_q += q[i] * q[i], of_k += k[i] * k[i];
      if (layer.kind == kKimiDelta) decay[i] = expf(gate[(row * layer.heads + h) * keys + i]);
    }
    if (is_delta) {
      of_q = sum_of_lanes(of_q), of_k = sum_of_lanes(of_k);
      const float q_factor = layer.normalised ? layer.scale / sqrtf(of_q + 1e-6f) : layer.scale;
      const float k_factor = layer.normalised ? 1.0f / sqrtf(of_k + 1e-6f) : 1.0f;
      for (int i = lane(); i < keys; i += kLanes) q[i] *= q_factor, k[i] *= k_factor;
    }
    sync();
    const float v = has ? convolve(t, layer.v_first + h * size + d) : 0.0f;
    float o = 0.0f, u;
    if (is_delta) {
      const float whole = layer.kind == kKimiDelta ? 0.0f : expf(gate[row * layer.heads + h]);
      float seen = 0.0f;
      for (int i = 0; i < keys; ++i) {
        float& each = s[i * kLanes + lane()];
        each *= layer.kind == kKimiDelta ? decay[i] : whole;
        seen += each * k[i];
      }
      u = beta[row * layer.heads + h] * (v - seen);
      for (int i = 0; i < keys; ++i) {
        float& each = s[i * kLanes + lane()];
        each += k[i] * u;
        o += each * q[i];
      }
    } else {
      float dt = gate[row * layer.heads + h] + (dt_bias ? dt_bias[h] : 0.0f);
      if (layer.softplus) dt = softplus(dt);
      if (t < segment.prompt) {
        dt = dt < layer.least ? layer.least : dt;
        dt = layer.most && dt > layer.most ? layer.most : dt;
      }
      const float whole = expf(dt * fade[h]);
      u = dt * v;
      for (int i = 0; i < keys; ++i) {
        float& each = s[i * kLanes + lane()];
        each = each * whole + k[i] * u;
        o += each * q[i];
      }
      if (skip) o += skip[h] * v;
    }
    if (has) out[(row * layer.heads + h) * size + d] = o;
    sync();  // all have read q and k
  }

  if (has) {
    for (int i = 0; i < keys; ++i) after[place + i64(i) * size] = s[i * kLanes + lane()];
    convolve.keep(after, segment.rows, layer.v_first + h * size + d);
  }
  if (task % parts == 0 && (h == 0 || (layer.first_head + h) % layer.heads_per_group == 0))
    for (int i = lane(); i < keys; i += kLanes) {
      convolve.keep(after, segment.rows, q_first + i);
      convolve.keep(after, segment.rows, k_first + i);
    }
}
