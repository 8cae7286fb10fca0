// Quantized weights and rows of x that become int8, by AVX512-VNNI and by AVX2 with FMA. Columns are lanes.
#include <immintrin.h>

#include <algorithm>
#include <limits>

#include "gemm/quantized.h"

// See linear.cpp.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace lamina::gemm::quantized {
namespace {

inline void round_to(float v, float* y) { *y = v; }
inline void round_to(float v, Bf16* y) { *y = to_bf16(v); }
inline void round_to(float v, Half* y) { *y = to_half(v); }

}  // namespace

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")
namespace vnni {
namespace {

constexpr std::size_t kLanes = 16;
constexpr int kVectors = 2, kRows = 6;

#include "gemm/vec512.h"

using Codes = __m512i;
struct Ints {
  __m512i v;
  static Ints all(std::int32_t a) { return {_mm512_set1_epi32(a)}; }
  static Vec of(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
};

inline Codes codes(const char* from) { return _mm512_loadu_si512(from); }
inline Codes low(Codes w) { return _mm512_and_si512(w, _mm512_set1_epi8(15)); }
inline Codes high(Codes w) { return _mm512_and_si512(_mm512_srli_epi32(w, 4), _mm512_set1_epi8(15)); }
inline Ints dot(Ints sum, Codes w, std::uint32_t x) {
  return {_mm512_dpbusd_epi32(sum.v, w, _mm512_set1_epi32(static_cast<int>(x)))};
}

inline __m512i no_magnitude() { return _mm512_setzero_si512(); }
inline __m512i magnitudes(Vec x, __m512i most) {
  return _mm512_max_epu32(most, _mm512_and_si512(_mm512_castps_si512(x.v), _mm512_set1_epi32(0x7fffffff)));
}
inline std::uint32_t largest(__m512i most) { return _mm512_reduce_max_epu32(most); }
inline void rounded(Vec x, Vec scale, Ints* sum, std::uint32_t* to) {
  const __m128i q = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_div_ps(x.v, scale.v)));
  sum->v = _mm512_add_epi32(sum->v, _mm512_cvtepi8_epi32(q));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), q);
}
inline std::int32_t total(Ints a) { return _mm512_reduce_add_epi32(a.v); }

// `count` columns of a row of y from n on: sums by the row's scale, with the bias.
template <class W>
inline void put(const float* sums, float scale, const W* b, std::size_t n, std::size_t count, W* y) {
  for (std::size_t i = 0; i < count; ++i) round_to(b ? sums[i] * scale + to_float(b[n + i]) : sums[i] * scale, y + i);
}

#include "gemm/int8_rows_kernel.h"

}  // namespace
}  // namespace vnni
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace int8_avx2 {
namespace {

constexpr std::size_t kLanes = 8;
constexpr int kVectors = 1, kRows = 4;

#include "gemm/vec256.h"

using Codes = __m256i;
struct Ints {
  __m256i low, high;  // each pair of lanes is a column: four of them, and four more
  static Ints all(std::int32_t a) {
    return {_mm256_set1_epi64x(static_cast<std::uint32_t>(a)), _mm256_set1_epi64x(static_cast<std::uint32_t>(a))};
  }
  static __m256i added(Ints a) { return _mm256_permute4x64_epi64(_mm256_hadd_epi32(a.low, a.high), 0xd8); }
  static Vec of(Ints a) { return {_mm256_cvtepi32_ps(added(a))}; }
};

inline Codes codes(const char* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline Codes low(Codes w) { return _mm256_and_si256(w, _mm256_set1_epi8(15)); }
inline Codes high(Codes w) { return _mm256_and_si256(_mm256_srli_epi32(w, 4), _mm256_set1_epi8(15)); }
inline Ints dot(Ints sum, Codes w, std::uint32_t x) {
  const __m256i four = _mm256_cvtepi8_epi16(_mm_set1_epi32(static_cast<int>(x)));
  const __m256i first = _mm256_cvtepu8_epi16(_mm256_castsi256_si128(w));
  const __m256i second = _mm256_cvtepu8_epi16(_mm256_extracti128_si256(w, 1));
  return {_mm256_add_epi32(sum.low, _mm256_madd_epi16(first, four)),
          _mm256_add_epi32(sum.high, _mm256_madd_epi16(second, four))};
}

inline __m256i no_magnitude() { return _mm256_setzero_si256(); }
inline __m256i magnitudes(Vec x, __m256i most) {
  return _mm256_max_epu32(most, _mm256_and_si256(_mm256_castps_si256(x.v), _mm256_set1_epi32(0x7fffffff)));
}
inline std::uint32_t largest(__m256i most) {
  std::uint32_t lanes[kLanes];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), most);
  return *std::max_element(lanes, lanes + kLanes);
}
inline void rounded(Vec x, Vec scale, Ints* sum, std::uint32_t* to) {
  const __m256i all = _mm256_cvtps_epi32(_mm256_div_ps(x.v, scale.v));
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  const __m128i q = _mm_packs_epi16(words, words);
  sum->low = _mm256_add_epi32(sum->low, _mm256_cvtepi8_epi32(q));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), q);
}
inline std::int32_t total(Ints a) {
  std::int32_t lanes[kLanes], sum = 0;
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), _mm256_add_epi32(a.low, a.high));
  for (const std::int32_t lane : lanes) sum += lane;
  return sum;
}

// `count` columns of a row of y from n on: sums by the row's scale, with the bias.
template <class W>
inline void put(const float* sums, float scale, const W* b, std::size_t n, std::size_t count, W* y) {
  for (std::size_t i = 0; i < count; ++i) round_to(b ? sums[i] * scale + to_float(b[n + i]) : sums[i] * scale, y + i);
}

#include "gemm/int8_rows_kernel.h"

}  // namespace
}  // namespace int8_avx2
#pragma GCC pop_options

const Kernel kInt8Vnni[3] = {vnni::kernel<float>, vnni::kernel<Bf16>, vnni::kernel<Half>};
const Kernel kInt8Avx2[3] = {int8_avx2::kernel<float>, int8_avx2::kernel<Bf16>, int8_avx2::kernel<Half>};

}  // namespace lamina::gemm::quantized
