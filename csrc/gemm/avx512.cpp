// bf16 on CPUs that have AVX-512 and do not multiply bf16 (Skylake to Ice Lake): numbers are widened in registers.
#include <immintrin.h>

#include <algorithm>

#include "gemm/linear.h"

// See linear.cpp.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
namespace lamina::gemm::avx512 {
namespace {

// 16 pairs of numbers, as floats.
struct Pairs {
  static constexpr std::size_t kMostRows = 4;  // of a tile: 4 x 4 sums, 8 vectors of w and two of x are in registers
  static constexpr std::size_t kFewRows = 8;   // for more, panels that are made on the way take less time
  static constexpr std::size_t kParts = 2;     // words of a pair of x that was prepared
  __m512 even, odd;
  static Pairs of(__m512i bits) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)), _mm512_castsi512_ps(_mm512_and_si512(bits, upper))};
  }
  // The pair at x, whose second number is `stride` words after the first.
  static Pairs all(const std::uint32_t* x, std::size_t stride) {
    const auto* const at = reinterpret_cast<const float*>(x);
    return {_mm512_set1_ps(at[0]), _mm512_set1_ps(at[stride])};
  }
  static void put(std::uint32_t* to, std::size_t stride, __mmask16 kept, __m512i bits) {
    const Pairs pairs = of(bits);
    _mm512_mask_storeu_ps(to, kept, pairs.even);
    _mm512_mask_storeu_ps(to + stride, kept, pairs.odd);
  }
  static __m512 add(__m512 sum, const Pairs& x, const Pairs& w) {
    return _mm512_fmadd_ps(x.odd, w.odd, _mm512_fmadd_ps(x.even, w.even, sum));
  }
  // To nearest even; NaN stays NaN.
  static __m256i rounded(__m512 sums) {
    const __m512i bits = _mm512_castps_si512(sums), quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i near = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i kept = _mm512_mask_mov_epi32(near, _mm512_cmp_ps_mask(sums, sums, _CMP_UNORD_Q), quiet);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
  }
};

#include "gemm/pairs512.h"

}  // namespace
}  // namespace lamina::gemm::avx512
#pragma GCC pop_options

namespace lamina::gemm {

const Kernel kAvx512 = avx512::kAsTheyLie;
const Packing kAvx512Panels = avx512::kPacking;

}  // namespace lamina::gemm
