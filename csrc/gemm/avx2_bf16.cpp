// bf16 by AVX2, which has no products of it: numbers are widened in registers. Few rows meet weights as they lie; for more
// of them a panel is made of w on the way, and weights that were packed are panels.
//
// Every output is, of each block of k, eight chains, one a lane, each of pairs 16 numbers apart. The sums of chains are
// added one after the other. So a row's result depends, bit for bit, on that row alone, whatever the tile, packed or not.
#include "gemm/avx2_panels.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace lamina::gemm::avx2 {
namespace {

constexpr std::size_t kFewRows = 32;  // for more of them a panel takes less time, and what it takes to make it
constexpr std::size_t kTile = 4, kStrip = 3;  // rows and columns of a tile: 4 x 3 sums
constexpr std::size_t kWide = 6;  // columns of a tile of one or two rows, which need as many sums under way
constexpr std::size_t kFour = 4;  // vectors whose lanes are added together

Plan plan(const Problem& p) {
  return p.rows > kFewRows ? panels::plan(p) : Plan{4 * kWide, p.rows * links(p.k_size) * kLink, 0};
}

// Few rows: of each, [link][even, odd][chain] floats, with zeros behind the end.
void prepare(const Problem& p, const void* from, std::size_t begin, std::size_t end, float* to) {
  if (p.rows > kFewRows) return panels::prepare(p, from, begin, end, to);
  to += begin * links(p.k_size) * kLink;
  for (std::size_t m = begin; m < end; ++m)
    for (std::size_t k = 0; k < p.k_size; k += kLink, to += kLink) {
      Bf16 numbers[kLink] = {};
      std::memcpy(numbers, static_cast<const Bf16*>(from) + m * p.k_size + k,
                  std::min(kLink, p.k_size - k) * sizeof(Bf16));
      const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers));
      _mm256_store_ps(to, evens(pairs));
      _mm256_store_ps(to + kLanes, odds(pairs));
    }
}

// `count` links of kRows rows of x and kCols of w, to sums [row][column]. Columns behind are fetched where kAhead. Sums
// are in registers if every index is a constant, and if this is a function of its own, whose addresses have room.
template <std::size_t kRows, std::size_t kCols, bool kAhead>
[[gnu::noinline]] void add_links(const float* x, std::size_t ldx, const Bf16* w, std::size_t ldw, std::size_t count,
                                 __m256* sums) {
  __m256 s[kRows][kCols];
#pragma GCC unroll 4
  for (std::size_t m = 0; m < kRows; ++m)
#pragma GCC unroll 6
    for (std::size_t n = 0; n < kCols; ++n) s[m][n] = sums[m * kCols + n];
  for (std::size_t t = 0; t < count; ++t, x += kLink, w += kLink) {
    if (kAhead && t % 2 == 0)
      for (std::size_t n = 0; n < kCols; ++n) __builtin_prefetch(w + (kCols + n) * ldw);
#pragma GCC unroll 6
    for (std::size_t n = 0; n < kCols; ++n) {
      __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + n * ldw));
      asm("" : "+x"(pairs));  // or it would be loaded twice, and loads wait for memory here
      const __m256 even = evens(pairs), odd = odds(pairs);
#pragma GCC unroll 4
      for (std::size_t m = 0; m < kRows; ++m) {
        s[m][n] = _mm256_fmadd_ps(_mm256_load_ps(x + m * ldx), even, s[m][n]);
        s[m][n] = _mm256_fmadd_ps(_mm256_load_ps(x + m * ldx + kLanes), odd, s[m][n]);
      }
    }
  }
#pragma GCC unroll 4
  for (std::size_t m = 0; m < kRows; ++m)
#pragma GCC unroll 6
    for (std::size_t n = 0; n < kCols; ++n) sums[m * kCols + n] = s[m][n];
}

// Lanes of four vectors, one after the other, to the sums of those before them; `first`: there are none.
inline __m128 add_lanes(const __m256* four, __m128 sums, bool first) {
  __m256 lanes[kFour];
  transpose(*reinterpret_cast<const __m256(*)[kFour]>(four), lanes);
  sums = first ? _mm256_castps256_ps128(lanes[0]) : _mm_add_ps(sums, _mm256_castps256_ps128(lanes[0]));
  for (std::size_t i = 1; i < kFour; ++i) sums = _mm_add_ps(sums, _mm256_castps256_ps128(lanes[i]));
  for (std::size_t i = 0; i < kFour; ++i) sums = _mm_add_ps(sums, _mm256_extractf128_ps(lanes[i], 1));
  return sums;
}

// kRows rows from m on and kCols columns from n on. Columns behind are fetched where kAhead.
template <std::size_t kRows, std::size_t kCols, bool kAhead>
void tile(const Problem& p, std::size_t m, std::size_t n) {
  constexpr std::size_t kFours = (kRows * kCols + kFour - 1) / kFour;
  const auto* const w = static_cast<const Bf16*>(p.w) + n * p.ldw;
  const std::size_t ldx = links(p.k_size) * kLink, whole = p.k_size / kLink;
  const float* const x = p.x + m * ldx;
  __m128 sums[kFours] = {};
  each_block(p.k_size, [&](std::size_t begin, std::size_t count) {
    __m256 s[kFours * kFour] = {};
    const std::size_t all = std::min(begin + count, whole) - begin;
    add_links<kRows, kCols, kAhead>(x + begin * kLink, ldx, w + begin * kLink, p.ldw, all, s);
    if (all < count) {
      Bf16 tail[kCols * kLink] = {};
      for (std::size_t i = 0; i < kCols; ++i)
        std::memcpy(tail + i * kLink, w + i * p.ldw + whole * kLink, (p.k_size - whole * kLink) * sizeof *tail);
      add_links<kRows, kCols, false>(x + whole * kLink, ldx, tail, kLink, 1, s);
    }
    for (std::size_t i = 0; i < kFours; ++i) sums[i] = add_lanes(s + i * kFour, sums[i], begin == 0);
  });
  float y[kFours * kFour];
  for (std::size_t i = 0; i < kFours; ++i) _mm_storeu_ps(y + i * kFour, sums[i]);
  for (std::size_t r = 0; r < kRows; ++r)
    for (std::size_t i = 0; i < kCols; ++i) {
      const float sum = p.b ? y[r * kCols + i] + to_float(static_cast<const Bf16*>(p.b)[n + i]) : y[r * kCols + i];
      const auto bits = static_cast<std::uint16_t>(_mm_cvtsi128_si32(rounded(_mm256_set1_ps(sum))));
      static_cast<Bf16*>(p.y)[(m + r) * p.cols + n + i].bits = bits;
    }
}

template <std::size_t kRows, bool kAhead>
void strip(const Problem& p, std::size_t m, std::size_t n, std::size_t end) {
  if constexpr (kRows <= 2)
    for (; n + kWide <= end; n += kWide) tile<kRows, kWide, kAhead>(p, m, n);
  for (; n + kStrip <= end; n += kStrip) tile<kRows, kStrip, kAhead>(p, m, n);
  for (; n < end; ++n) tile<kRows, 1, kAhead>(p, m, n);
}

template <bool kAhead>
void rows_of(const Problem& p, std::size_t m, std::size_t rows, std::size_t n, std::size_t end) {
  constexpr decltype(&strip<1, kAhead>) kStrips[] = {strip<1, kAhead>, strip<2, kAhead>, strip<3, kAhead>,
                                                     strip<4, kAhead>};
  kStrips[rows - 1](p, m, n, end);
}

void columns(const Problem& p, std::size_t begin, std::size_t end, float* scratch) {
  if (p.rows > kFewRows) {
    for (std::size_t n = begin; n < end; n += panels::kCols) panels::multiply(p, n, nullptr, scratch);
    return;
  }
  for (std::size_t n = begin; n < end; n += kWide)  // of which all tiles of rows have their turn while w is in L1
    for (std::size_t m = 0, tiles = (p.rows + kTile - 1) / kTile; tiles; --tiles) {
      const std::size_t rows = (p.rows - m + tiles - 1) / tiles;
      (m ? rows_of<false> : rows_of<true>)(p, m, rows, n, std::min(n + kWide, end));
      m += rows;
    }
}

// Of weights that were packed, a panel behind the other.
const char* panel_at(const void* w, std::size_t n, std::size_t k_size) {
  return static_cast<const char*>(w) + n / panels::kCols * panels::bytes(k_size);
}

void packed_columns(const Problem& p, std::size_t begin, std::size_t end, float* scratch) {
  for (std::size_t n = begin; n < end; n += panels::kCols) panels::multiply(p, n, panel_at(p.w, n, p.k_size), scratch);
}

std::size_t packed_bytes(std::size_t cols, std::size_t k_size) {
  return (cols + panels::kCols - 1) / panels::kCols * panels::bytes(k_size);
}

void pack(const Problem& p, std::size_t begin, std::size_t end, void* to) {
  for (std::size_t n = begin; n < end; n += panels::kCols)
    panels::pack(p, n, const_cast<char*>(panel_at(to, n, p.k_size)));
}

}  // namespace
}  // namespace lamina::gemm::avx2
#pragma GCC pop_options

namespace lamina::gemm {

const Kernel kAvx2Bf16 = {avx2::plan, avx2::prepare, avx2::columns};
const Packing kAvx2Panels = {
    {avx2::panels::plan, avx2::panels::prepare, avx2::packed_columns}, avx2::packed_bytes, avx2::pack};

}  // namespace lamina::gemm
