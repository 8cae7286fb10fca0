// Quantized weights by AVX-512 and by AVX2 with FMA: x and w are floats. Columns are lanes, so no sums of lanes are left.
#include <immintrin.h>

#include <algorithm>
#include <type_traits>

#include "gemm/quantized.h"

// See linear.cpp.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace lamina::gemm::quantized {
namespace {

struct X {
  float even, odd;
};
template <class W>
using PairOf = std::conditional_t<std::is_same_v<W, float>, X, void>;

// `count` rows of x to [pair][places], with zeros after the end of k.
template <class W>
void spread(const W* x, std::size_t k_size, std::size_t count, std::size_t places, std::size_t pairs, X* to) {
  const auto number = [&](std::size_t r, std::size_t k) { return k < k_size ? to_float(x[r * k_size + k]) : 0.0f; };
  for (std::size_t pair = 0; pair < pairs; ++pair, to += places)
    for (std::size_t r = 0; r < count; ++r) to[r] = {number(r, 2 * pair), number(r, 2 * pair + 1)};
}

inline void round_to(float v, float* y) { *y = v; }
inline void round_to(float v, Bf16* y) { *y = to_bf16(v); }
inline void round_to(float v, Half* y) { *y = to_half(v); }

// `count` columns of a row of y from n on, with the bias.
template <class W>
inline void put(const float* sums, const W* b, std::size_t n, std::size_t count, W* y) {
  for (std::size_t i = 0; i < count; ++i) round_to(b ? sums[i] + to_float(b[n + i]) : sums[i], y + i);
}

}  // namespace

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
namespace avx512 {
namespace {

constexpr std::size_t kLanes = 16, kDirect4 = 8, kDirect8 = 8;
constexpr int kVectors = 2, kRows = 8, kSums = 16;

#include "gemm/vec512.h"

struct Pairs {
  __m512 even, odd;
};
using Nibbles = __m512i;
using Table = __m512;

Table table_of(const float* values) { return _mm512_loadu_ps(values); }
inline Nibbles nibbles(const char* from) { return _mm512_loadu_si512(from); }
inline Pairs pairs_of(Nibbles codes, int number, const Table& table) {
  const auto at = [&](int shift) { return _mm512_permutexvar_ps(_mm512_srli_epi32(codes, shift), table); };
  return {at(4 * number), at(4 * number + 16)};
}
inline Pairs bytes(const char* from) {
  const __m512i two = _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(two, 24), 24)),
          _mm512_cvtepi32_ps(_mm512_srai_epi32(two, 8))};
}

inline Vec link(Vec sum, const X& x, Pairs w) {
  return {_mm512_fmadd_ps(_mm512_set1_ps(x.even), w.even, _mm512_fmadd_ps(_mm512_set1_ps(x.odd), w.odd, sum.v))};
}

#include "gemm/quantized_kernel.h"

}  // namespace
}  // namespace avx512
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
namespace {

constexpr std::size_t kLanes = 8, kDirect4 = 4, kDirect8 = 4;
constexpr int kVectors = 2, kRows = 4, kSums = 8;

#include "gemm/vec256.h"

struct Pairs {
  __m256 even, odd;
};
using Nibbles = __m256i;
struct Table {
  __m256 low, high;
};

Table table_of(const float* values) { return {_mm256_loadu_ps(values), _mm256_loadu_ps(values + kLanes)}; }
inline Nibbles nibbles(const char* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline Pairs pairs_of(Nibbles codes, int number, const Table& table) {
  const auto at = [&](int shift) {
    const __m256i code = _mm256_srli_epi32(codes, shift);
    const __m256 is_high = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28 - shift));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, code), _mm256_permutevar8x32_ps(table.high, code),
                            is_high);
  };
  return {at(4 * number), at(4 * number + 16)};
}
inline Pairs bytes(const char* from) {
  const __m256i two = _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return {_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(two, 24), 24)),
          _mm256_cvtepi32_ps(_mm256_srai_epi32(two, 8))};
}

inline Vec link(Vec sum, const X& x, Pairs w) {
  return {_mm256_fmadd_ps(_mm256_set1_ps(x.even), w.even, _mm256_fmadd_ps(_mm256_set1_ps(x.odd), w.odd, sum.v))};
}

#include "gemm/quantized_kernel.h"

}  // namespace
}  // namespace avx2
#pragma GCC pop_options

const Kernel kAvx512[3] = {avx512::kernel<float>, avx512::kernel<Bf16>, avx512::kernel<Half>};
const Kernel kAvx2[3] = {avx2::kernel<float>, avx2::kernel<Bf16>, avx2::kernel<Half>};

}  // namespace lamina::gemm::quantized
