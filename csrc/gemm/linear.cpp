#include "gemm/linear.h"

#include "cpu.h"
#include "gemm/quantized.h"

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

// GCC 12 takes the deliberately undefined registers of its own intrinsics for a mistake (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace lamina::gemm {

#pragma GCC push_options
#pragma GCC target("f16c")
float to_float(Half v) { return _cvtsh_ss(v.bits); }
Half to_half(float v) { return {_cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT)}; }
#pragma GCC pop_options

namespace {

// Sums of columns [first, first + cols) to y, with the bias.
void store(const Problem& p, const float* out, std::size_t ldo, std::size_t first, std::size_t cols) {
  const auto bias = [&](std::size_t n) {
    switch (p.type) {
      case Type::kFloat: return static_cast<const float*>(p.b)[n];
      case Type::kBf16: return to_float(static_cast<const Bf16*>(p.b)[n]);
      default: return to_float(static_cast<const Half*>(p.b)[n]);
    }
  };
  for (std::size_t m = 0; m < p.rows; ++m)
    for (std::size_t c = 0; c < cols; ++c) {
      const std::size_t n = first + c, at = m * p.cols + n;
      const float v = out[m * ldo + c] + (p.b ? bias(n) : 0.0f);
      switch (p.type) {
        case Type::kFloat: static_cast<float*>(p.y)[at] = v; break;
        case Type::kBf16: static_cast<Bf16*>(p.y)[at] = to_bf16(v); break;
        case Type::kHalf: static_cast<Half*>(p.y)[at] = to_half(v); break;
      }
    }
}

}  // namespace

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {  // of fp32; other types have kernels of their own
namespace {

constexpr int kTileRows = 4;
#include "gemm/vec256.h"

#include "gemm/kernel.h"

}  // namespace
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
namespace avx512 {
namespace {

constexpr int kTileRows = 6;
#include "gemm/vec512.h"

#include "gemm/kernel.h"

}  // namespace
}  // namespace avx512
#pragma GCC pop_options

const Variant* variants() {
  static const Kernel by_pairs[3] = {quantized::kAvx512[0], quantized::kAvx512Bf16, quantized::kAvx512[2]};
  const Kernel* const by_int8 = avx512_vnni_usable() ? quantized::kInt8Vnni : quantized::kInt8Avx2;
  static const Variant all[kVariants] = {
      // Pairs go at half the rate of floats there, and have the same bits.
      {"amx",
       amx_usable(),
       {avx512::kernel<float>, kAmx, avx512::kernel<Half>},
       &kAmxPanels,
       quantized::kAvx512,
       by_int8},
      {"avx512_bf16",
       avx512_bf16_usable(),
       {avx512::kernel<float>, kAvx512Bf16, avx512::kernel<Half>},
       &kAvx512Bf16Panels,
       by_pairs,
       by_int8},
      {"avx512",
       avx512_usable(),
       {avx512::kernel<float>, kAvx512, avx512::kernel<Half>},
       &kAvx512Panels,
       quantized::kAvx512,
       by_int8},
      {"avx2",
       avx2_usable(),
       {avx2::kernel<float>, kAvx2Bf16, kAvx2Half},
       &kAvx2Panels,
       quantized::kAvx2,
       quantized::kInt8Avx2},
  };
  return all;
}

}  // namespace lamina::gemm
