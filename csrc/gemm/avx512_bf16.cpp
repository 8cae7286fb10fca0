// bf16 by products of pairs (AVX512-BF16): x and w meet as they lie, nothing is widened. Other types are AVX-512's.
// Weights for many rows go through panels.h, as do those that were packed.
//
// Every output is 16 chains, one a lane, each of pairs 32 numbers apart. A tail of k is a vector that ends with zeros.
// Lanes are added in one order. So a row's result depends, bit for bit, on that row alone, whatever the tile.
//
// The instruction takes numbers below 2^-126 in magnitude for zeros, and so do sums and y here.
#include <immintrin.h>

#include <algorithm>

#include "gemm/panels.h"

// See linear.cpp.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma")
namespace lamina::gemm::avx512_bf16 {
namespace {

constexpr std::size_t kDepth = 32;    // numbers of k in a vector
constexpr std::size_t kMostRows = 6;  // of a tile: 6 x 4 sums, 4 vectors of w and one of x fill the registers
constexpr std::size_t kQuad = 4;      // columns whose lanes are added together
constexpr std::size_t kWide = 8;      // columns of a tile of one or two rows, which need as many sums under way

constexpr std::size_t kFewRows = 64;  // for more of them a panel is made of w on the way, which takes 1/10 of the time

Plan plan(const Problem& p) {
  if (p.rows <= kFewRows) return {kWide, 0, 0};
  Plan plan = panels::plan(p);
  plan.scratch += panels::bytes(p.k_size) / sizeof(float);
  return plan;
}

// Sums over the lanes of each vector, all in the same order.
inline __m128 sums(const __m512 (&v)[kQuad]) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
  const auto low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const auto high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512 quarters = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
  const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(quarters), _mm512_extractf32x8_ps(quarters, 1));
  return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}

// What a tile works on: rows of x and columns of y from here on, and w that is to be fetched meanwhile.
struct Place {
  const Bf16 *x, *w, *ahead;
  const Bf16* b;  // or null
  Bf16* y;
};

// A vector of k, or what there is of it.
template <bool kWhole>
inline __m512bh load(const Bf16* from, __mmask32 there) {
  return (__m512bh)(kWhole ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi16(there, from));
}

template <bool kWhole, int kRows, int kCols, int kSums>
inline void step(const Problem& p, const Place& at, std::size_t k, __mmask32 there, __m512 (&s)[kRows][kSums]) {
  __m512bh w[kCols];
  for (int n = 0; n < kCols; ++n) w[n] = load<kWhole>(at.w + n * p.ldw + k, there);
  for (int m = 0; m < kRows; ++m) {
    const __m512bh x = load<kWhole>(at.x + m * p.k_size + k, there);
    for (int n = 0; n < kCols; ++n) s[m][n] = _mm512_dpbf16_ps(s[m][n], x, w[n]);
  }
}

// `kAhead` lines are fetched for each vector of k, in the order of memory and no nearer than L2: other orders, and L1,
// take up to twice as long (perf/README.md).
template <int kRows, int kCols, int kAhead>
void tile(const Problem& p, const Place& at) {
  constexpr int kQuads = (kCols + int(kQuad) - 1) / int(kQuad);
  __m512 s[kRows][kQuads][kQuad];
  for (auto& row : s)
    for (auto& quad : row)
      for (auto& v : quad) v = _mm512_setzero_ps();
  auto& flat = reinterpret_cast<__m512(&)[kRows][kQuads * kQuad]>(s);
  std::size_t k = 0;
  for (; k + kDepth <= p.k_size; k += kDepth) {
    for (int n = 0; n < kAhead; ++n) __builtin_prefetch(at.ahead + kAhead * k + n * kDepth, 0, 2);
    step<true, kRows, kCols>(p, at, k, 0, flat);
  }
  if (k < p.k_size) step<false, kRows, kCols>(p, at, k, (__mmask32(1) << (p.k_size - k)) - 1, flat);
  constexpr __mmask8 kStored = kCols < int(kQuad) ? (1 << kCols) - 1 : 15;
  for (int m = 0; m < kRows; ++m)
    for (int q = 0; q < kQuads; ++q) {
      __m128 y = sums(s[m][q]);
      if (at.b) {
        const __m128i b = _mm_maskz_loadu_epi16(kStored, at.b + q * kQuad);
        y = _mm_add_ps(y, _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(b), 16)));
      }
      _mm_mask_storeu_epi16(at.y + m * p.cols + q * kQuad, kStored, (__m128i)_mm_cvtneps_pbh(y));
    }
}

template <int kCols, int kAhead>
void tile_of(std::size_t rows, const Problem& p, const Place& at) {
  if (rows == 1) return tile<1, kCols, kAhead>(p, at);
  if (rows == 2) return tile<2, kCols, kAhead>(p, at);
  if constexpr (kCols <= int(kQuad)) {
    if (rows == 3) return tile<3, kCols, kAhead>(p, at);
    if (rows == 4) return tile<4, kCols, kAhead>(p, at);
    if (rows == 5) return tile<5, kCols, kAhead>(p, at);
    return tile<6, kCols, kAhead>(p, at);
  }
}

// All rows of x against kCols columns of y, in tiles as equal as may be. Each fetches its part of the strip after next.
template <int kCols>
void strip(const Problem& p, std::size_t n) {
  const std::size_t tiles = (p.rows + kMostRows - 1) / kMostRows;
  const auto* const x = reinterpret_cast<const Bf16*>(p.x);
  const auto* const w = static_cast<const Bf16*>(p.w) + n * p.ldw;
  const auto* const b = static_cast<const Bf16*>(p.b);
  std::size_t fetched = 0;  // columns
  for (std::size_t t = 0, m = 0; t < tiles; ++t) {
    const std::size_t rows = (p.rows - m + tiles - t - 1) / (tiles - t), ahead = (t + 1) * kCols / tiles - fetched;
    const Place at{x + m * p.k_size, w, w + (2 * kCols + fetched) * p.ldw, b ? b + n : nullptr,
                   static_cast<Bf16*>(p.y) + m * p.cols + n};
    if (ahead == 0) tile_of<kCols, 0>(rows, p, at);
    if (ahead == 1) tile_of<kCols, 1>(rows, p, at);
    if (ahead == 2) tile_of<kCols, 2>(rows, p, at);
    if (ahead > 2) tile_of<kCols, kCols>(rows, p, at);
    m += rows, fetched += ahead;
  }
}

void by_panels(const Problem& p, std::size_t begin, std::size_t end, float* scratch) {
  float* const panel = scratch + panels::plan(p).scratch;
  for (std::size_t n = begin; n < end; n += panels::kCols) {
    panels::pack(p, n, panel);
    panels::multiply(p, n, panel, scratch);
  }
}

void columns(const Problem& p, std::size_t begin, std::size_t end, float* scratch) {
  if (p.rows > kFewRows) return by_panels(p, begin, end, scratch);
  std::size_t n = begin;
  if (p.rows <= 2)
    for (; n + kWide <= end; n += kWide) strip<kWide>(p, n);
  for (; n + kQuad <= end; n += kQuad) strip<kQuad>(p, n);
  for (; n < end; ++n) strip<1>(p, n);
}

#include "gemm/packed.h"

}  // namespace

}  // namespace lamina::gemm::avx512_bf16
#pragma GCC pop_options

namespace lamina::gemm {

const Kernel kAvx512Bf16 = {avx512_bf16::plan, panels::prepare, avx512_bf16::columns};
const Packing kPanels = {
    {panels::plan, panels::prepare, avx512_bf16::packed_columns}, avx512_bf16::packed_bytes, avx512_bf16::pack};

}  // namespace lamina::gemm
