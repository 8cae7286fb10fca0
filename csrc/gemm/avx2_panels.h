// bf16 weights in panels of columns, by which AVX2 multiplies faster than as they lie, with the same bits.
//
// A panel has [block of k][chain][link][column] pairs of numbers. A chain is one lane of avx2.cpp: of a block of k,
// pairs 16 numbers apart, which are its links. So a vector is a pair of eight columns, and no lanes are left to add.
#pragma once

#include <immintrin.h>

#include <algorithm>

#include "gemm/linear.h"

// See linear.cpp.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace lamina::gemm::avx2 {

constexpr std::size_t kLanes = 8, kLink = 2 * kLanes;  // numbers of k in a vector of pairs
constexpr std::size_t kDepth = 128 * kLink;  // of a block: a chain of a panel, 12 KiB, and of four rows, 4, are in L1

// Vectors of pairs in a row.
inline std::size_t links(std::size_t k_size) { return (k_size + kLink - 1) / kLink; }

// Blocks of k, as equal as may be: `of` gets the first link and how many they are.
template <class F>
inline void each_block(std::size_t k_size, F of) {
  const std::size_t all = links(k_size);
  for (std::size_t begin = 0, blocks = (k_size + kDepth - 1) / kDepth; blocks; --blocks) {
    const std::size_t count = (all - begin + blocks - 1) / blocks;
    of(begin, count);
    begin += count;
  }
}

namespace panels {

constexpr std::size_t kCols = 24;  // of a panel

std::size_t bytes(std::size_t k_size);

// Columns [n, n + kCols) of p.w, as they lie, to a panel; 0 where there is no column or number.
void pack(const Problem& p, std::size_t n, void* to);

// Rows for `multiply`, and its scratch; a block of a panel more where w is packed on the way.
Plan plan(const Problem& p);
void prepare(const Problem& p, const void* x, std::size_t begin, std::size_t end, float* to);

// Columns [n, n + kCols) of y, by their panel `w`, or null: each block is packed on the way.
void multiply(const Problem& p, std::size_t n, const void* w, float* scratch);

}  // namespace panels

#pragma GCC push_options
#pragma GCC target("avx2,fma")

// Of pairs, the lower halves as floats, and what is left of the upper ones.
inline __m256 evens(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline __m256 odds(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

// In each half, the t-th place of four vectors to the t-th vector.
inline void transpose(const __m256 (&from)[4], __m256 (&to)[4]) {
  const __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(from[0], from[1]));
  const __m256d b = _mm256_castps_pd(_mm256_unpacklo_ps(from[2], from[3]));
  const __m256d c = _mm256_castps_pd(_mm256_unpackhi_ps(from[0], from[1]));
  const __m256d d = _mm256_castps_pd(_mm256_unpackhi_ps(from[2], from[3]));
  to[0] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b)), to[1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
  to[2] = _mm256_castpd_ps(_mm256_unpacklo_pd(c, d)), to[3] = _mm256_castpd_ps(_mm256_unpackhi_pd(c, d));
}

// Sums to bf16, to nearest even; NaN stays NaN.
inline __m128i rounded(__m256 sums) {
  const __m256i bits = _mm256_castps_si256(sums), quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i near = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i no_number = _mm256_castps_si256(_mm256_cmp_ps(sums, sums, _CMP_UNORD_Q));
  const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(near, quiet, no_number), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}

#pragma GCC pop_options

}  // namespace lamina::gemm::avx2
