// bf16 by products of pairs (AVX512-BF16): x and w meet as they lie, nothing is widened. Other types are AVX-512's.
//
// The instruction takes numbers below 2^-126 in magnitude for zeros, and so do sums and y here.
#include <immintrin.h>

#include <algorithm>

#include "gemm/linear.h"

// See linear.cpp.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma")
namespace lamina::gemm::avx512_bf16 {
namespace {

// 16 pairs of numbers.
struct Pairs {
  static constexpr std::size_t kMostRows = 6;  // of a tile: 6 x 4 sums, 4 vectors of w and one of x fill the registers
  static constexpr std::size_t kFewRows = 64;  // for more, making panels on the way takes 1/10 of the time
  static constexpr std::size_t kParts = 1;  // words of a pair of x that was prepared
  __m512bh v;
  static Pairs of(__m512i bits) { return {(__m512bh)bits}; }
  static Pairs all(const std::uint32_t* x, std::size_t) { return {(__m512bh)_mm512_set1_epi32(static_cast<int>(*x))}; }
  static void put(std::uint32_t* to, std::size_t, __mmask16 kept, __m512i bits) {
    _mm512_mask_storeu_epi32(to, kept, bits);
  }
  static __m512 add(__m512 sum, Pairs x, Pairs w) { return _mm512_dpbf16_ps(sum, x.v, w.v); }
  static __m256i rounded(__m512 sums) { return (__m256i)_mm512_cvtneps_pbh(sums); }
};

#include "gemm/pairs512.h"

}  // namespace
}  // namespace lamina::gemm::avx512_bf16
#pragma GCC pop_options

namespace lamina::gemm {

const Kernel kAvx512Bf16 = avx512_bf16::kAsTheyLie;
const Packing kAvx512Bf16Panels = avx512_bf16::kPacking;

}  // namespace lamina::gemm
