// Quantized weights by products of pairs (AVX512-BF16).
#include <immintrin.h>

#include <algorithm>
#include <type_traits>

#include "gemm/quantized.h"

// See linear.cpp.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")
namespace lamina::gemm::quantized::avx512_bf16 {
namespace {

constexpr std::size_t kLanes = 16, kDirect4 = SIZE_MAX, kDirect8 = 16;
constexpr int kVectors = 2, kRows = 8, kSums = 16;

#include "gemm/vec512.h"

using X = std::uint32_t;  // as two of bf16 lie
template <class W>
using PairOf = X;

struct Pairs {
  __m512i v;
};
using Nibbles = __m512i;
using Table = __m512i;  // twice, for what lies before a code counts as a fifth bit

Table table_of(const float* values) {
  std::uint16_t numbers[32];
  for (std::size_t i = 0; i < 32; ++i) std::memcpy(numbers + i, reinterpret_cast<const char*>(values + i % 16) + 2, 2);
  return _mm512_loadu_si512(numbers);
}

inline Nibbles nibbles(const char* from) { return _mm512_loadu_si512(from); }
inline Pairs pairs_of(Nibbles codes, int number, const Table& table) {
  return {_mm512_permutexvar_epi16(_mm512_srli_epi32(codes, 4 * number), table)};
}
inline Pairs bytes(const char* from) {
  const auto half = [&](int i) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i);
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
  };
  return {(__m512i)_mm512_cvtne2ps_pbh(half(1), half(0))};
}

inline Vec link(Vec sum, const X& x, Pairs w) {
  return {_mm512_dpbf16_ps(sum.v, (__m512bh)_mm512_set1_epi32(static_cast<int>(x)), (__m512bh)w.v)};
}

// Dwords of two vectors in turns.
struct Two {
  __m512i low, high;
};
inline Two turns(__m512i a, __m512i b) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  return {_mm512_permutex2var_epi32(a, low, b),
          _mm512_permutex2var_epi32(a, _mm512_add_epi32(low, _mm512_set1_epi32(8)), b)};
}

// kPlaces vectors of 16 pairs, one a row, to [pair][row].
template <std::size_t kPlaces>
inline void interleave(const __m512i* rows, std::size_t stride, __m512i* to) {
  if constexpr (kPlaces == 1) {
    to[0] = rows[0];
  } else {
    __m512i even[kPlaces / 2], odd[kPlaces / 2];
    interleave<kPlaces / 2>(rows, 2 * stride, even);
    interleave<kPlaces / 2>(rows + stride, 2 * stride, odd);
    for (std::size_t i = 0; i < kPlaces / 2; ++i) {
      const Two two = turns(even[i], odd[i]);
      to[2 * i] = two.low, to[2 * i + 1] = two.high;
    }
  }
}

template <std::size_t kPlaces>
void spread_to(const Bf16* x, std::size_t k_size, std::size_t count, std::size_t pairs, X* to) {
  for (std::size_t pair = 0; pair < pairs; pair += 16) {
    const std::size_t left = k_size - std::min(k_size, 2 * pair), some = std::min<std::size_t>(16, pairs - pair);
    const __mmask32 there = left >= 32 ? ~__mmask32(0) : (__mmask32(1) << left) - 1;
    __m512i rows[kPlaces], turned[kPlaces];
    for (std::size_t r = 0; r < kPlaces; ++r)
      rows[r] = r < count ? _mm512_maskz_loadu_epi16(there, x + r * k_size + 2 * pair) : _mm512_setzero_si512();
    interleave<kPlaces>(rows, 1, turned);
    for (std::size_t i = 0; i < some * kPlaces; i += 16) {
      const std::size_t lanes = std::min<std::size_t>(16, some * kPlaces - i);
      _mm512_mask_storeu_epi32(to + pair * kPlaces + i, static_cast<__mmask16>((1u << lanes) - 1), turned[i / 16]);
    }
  }
}

// `count` rows of x to [pair][places], with zeros after the end of k.
void spread(const Bf16* x, std::size_t k_size, std::size_t count, std::size_t places, std::size_t pairs, X* to) {
  const auto by_places = places == 8   ? spread_to<8>
                         : places == 4 ? spread_to<4>
                         : places == 2 ? spread_to<2>
                                       : spread_to<1>;
  by_places(x, k_size, count, pairs, to);
}

// `count` columns of a row of y from n on, with the bias.
inline void put(const float* sums, const Bf16* b, std::size_t n, std::size_t count, Bf16* y) {
  for (std::size_t i = 0; i < count; i += kLanes) {
    const auto there = static_cast<__mmask16>((1u << std::min(kLanes, count - i)) - 1);
    __m512 sum = _mm512_loadu_ps(sums + i);
    if (b) {
      const __m512i bias = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, b + n + i));
      sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(bias, 16)));
    }
    _mm256_mask_storeu_epi16(y + i, there, (__m256i)_mm512_cvtneps_pbh(sum));
  }
}

#include "gemm/quantized_kernel.h"

}  // namespace
}  // namespace lamina::gemm::quantized::avx512_bf16
#pragma GCC pop_options

namespace lamina::gemm::quantized {

const Kernel kAvx512Bf16 = avx512_bf16::kernel<Bf16>;

}  // namespace lamina::gemm::quantized
