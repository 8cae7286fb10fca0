// bf16 and fp16 by AVX2 with FMA and F16C: numbers are widened in registers. Rows meet weights as they lie; for many rows of
// bf16 a panel is made of w on the way, and weights that were packed are panels.
//
// Every output is, of each block of k, eight chains, one a lane: of bf16 each of pairs 16 numbers apart, of fp16 of numbers
// 8 apart. The sums of chains are added one after the other. So a row's result depends, bit for bit, on that row alone,
// whatever the tile, packed or not.
#include <type_traits>

#include "gemm/avx2_panels.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace lamina::gemm::avx2 {
namespace {

constexpr std::size_t kFewRows = 32;  // of bf16: for more, a panel takes less time, and what it takes to make it
constexpr std::size_t kTile = 4, kStrip = 3;  // rows and columns of a tile: 4 x 3 sums
constexpr std::size_t kWide = 6;  // columns of a tile of one or two rows, which need as many sums under way
constexpr std::size_t kGroup = 6;  // columns of which all tiles of rows have their turn while they are in L1
constexpr std::size_t kFour = 4;  // vectors whose lanes are added together

// A link: 16 numbers in the order in which each type is widened.
struct Link {
  __m256 a, b;
};
inline __m128i halves(const void* at) { return _mm_loadu_si128(static_cast<const __m128i*>(at)); }
inline Link load(const Half* at) { return {_mm256_cvtph_ps(halves(at)), _mm256_cvtph_ps(halves(at + kLanes))}; }
inline Link load(const Bf16* at) {
  __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
  asm("" : "+x"(pairs));  // or it would be loaded twice, and loads wait for memory here
  return {evens(pairs), odds(pairs)};
}

inline void put(float v, Half* y) { y->bits = _cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT); }
inline void put(float v, Bf16* y) {
  y->bits = static_cast<std::uint16_t>(_mm_cvtsi128_si32(rounded(_mm256_set1_ps(v))));
}

template <class W>
bool by_panels(const Problem& p) {
  return std::is_same_v<W, Bf16> && p.rows > kFewRows;
}

template <class W>
Plan plan(const Problem& p) {
  return by_panels<W>(p) ? panels::plan(p) : Plan{4 * kGroup, p.rows * links(p.k_size) * kLink, 0};
}

// The links of each row, with zeros after its end.
template <class W>
void prepare(const Problem& p, const void* from, std::size_t begin, std::size_t end, float* to) {
  if (by_panels<W>(p)) return panels::prepare(p, from, begin, end, to);
  to += begin * links(p.k_size) * kLink;
  for (std::size_t m = begin; m < end; ++m)
    for (std::size_t k = 0; k < p.k_size; k += kLink, to += kLink) {
      W numbers[kLink] = {};
      std::memcpy(numbers, static_cast<const W*>(from) + m * p.k_size + k, std::min(kLink, p.k_size - k) * sizeof(W));
      const Link link = load(numbers);
      _mm256_store_ps(to, link.a);
      _mm256_store_ps(to + kLanes, link.b);
    }
}

// A tile's prefetches: its share, one of `tiles`, of the lines of columns that are `columns` after its own.
struct Ahead {
  std::size_t columns, tile, tiles;
};

// `count` links of kRows rows of x and kCols of w, to sums [row][column]. Sums are in registers if every index is a
// constant, and if this is a function of its own, whose addresses have room.
template <std::size_t kRows, std::size_t kCols, class W>
[[gnu::noinline]] void add_links(const float* x, std::size_t ldx, const W* w, std::size_t ldw, std::size_t count,
                                 const Ahead& ahead, __m256* sums) {
  constexpr std::size_t kLine = std::max<std::size_t>(1, 64 / (kLink * sizeof(W)));  // links
  const std::size_t every = ahead.tiles * kLine, behind = ahead.columns * ldw;
  std::size_t next = ahead.tile * kLine;
  __m256 s[kRows][kCols];
#pragma GCC unroll 4
  for (std::size_t m = 0; m < kRows; ++m)
#pragma GCC unroll 6
    for (std::size_t n = 0; n < kCols; ++n) s[m][n] = sums[m * kCols + n];
  for (std::size_t t = 0; t < count; ++t, x += kLink, w += kLink) {
    if (t == next) {
      for (std::size_t n = 0; n < kCols; ++n) __builtin_prefetch(w + behind + n * ldw);
      next += every;
    }
#pragma GCC unroll 6
    for (std::size_t n = 0; n < kCols; ++n) {
      const Link link = load(w + n * ldw);
#pragma GCC unroll 4
      for (std::size_t m = 0; m < kRows; ++m) {
        s[m][n] = _mm256_fmadd_ps(_mm256_load_ps(x + m * ldx), link.a, s[m][n]);
        s[m][n] = _mm256_fmadd_ps(_mm256_load_ps(x + m * ldx + kLanes), link.b, s[m][n]);
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

// kRows rows from m on and kCols columns from n on.
template <std::size_t kRows, std::size_t kCols, class W>
void tile(const Problem& p, std::size_t m, std::size_t n, const Ahead& ahead) {
  constexpr std::size_t kFours = (kRows * kCols + kFour - 1) / kFour;
  const auto* const w = static_cast<const W*>(p.w) + n * p.ldw;
  const std::size_t ldx = links(p.k_size) * kLink, whole = p.k_size / kLink;
  const float* const x = p.x + m * ldx;
  __m128 sums[kFours] = {};
  each_block(p.k_size, [&](std::size_t begin, std::size_t count) {
    __m256 s[kFours * kFour] = {};
    const std::size_t all = std::min(begin + count, whole) - begin;
    add_links<kRows, kCols>(x + begin * kLink, ldx, w + begin * kLink, p.ldw, all, ahead, s);
    if (all < count) {
      W tail[kCols * kLink] = {};
      for (std::size_t i = 0; i < kCols; ++i)
        std::memcpy(tail + i * kLink, w + i * p.ldw + whole * kLink, (p.k_size - whole * kLink) * sizeof *tail);
      add_links<kRows, kCols>(x + whole * kLink, ldx, tail, kLink, 1, {0, 1, 1}, s);
    }
    for (std::size_t i = 0; i < kFours; ++i) sums[i] = add_lanes(s + i * kFour, sums[i], begin == 0);
  });
  float y[kFours * kFour];
  for (std::size_t i = 0; i < kFours; ++i) _mm_storeu_ps(y + i * kFour, sums[i]);
  for (std::size_t r = 0; r < kRows; ++r)
    for (std::size_t i = 0; i < kCols; ++i) {
      const float sum = p.b ? y[r * kCols + i] + to_float(static_cast<const W*>(p.b)[n + i]) : y[r * kCols + i];
      put(sum, static_cast<W*>(p.y) + (m + r) * p.cols + n + i);
    }
}

template <std::size_t kRows, class W>
void strip(const Problem& p, std::size_t m, std::size_t n, std::size_t end, const Ahead& ahead) {
  if constexpr (kRows <= 2)
    for (; n + kWide <= end; n += kWide) tile<kRows, kWide, W>(p, m, n, ahead);
  for (; n + kStrip <= end; n += kStrip) tile<kRows, kStrip, W>(p, m, n, ahead);
  for (; n < end; ++n) tile<kRows, 1, W>(p, m, n, ahead);
}

template <class W>
void columns(const Problem& p, std::size_t begin, std::size_t end, float* scratch) {
  if (by_panels<W>(p)) {
    for (std::size_t n = begin; n < end; n += panels::kCols) panels::multiply(p, n, nullptr, scratch);
    return;
  }
  constexpr decltype(&strip<1, W>) kStrips[] = {nullptr, strip<1, W>, strip<2, W>, strip<3, W>, strip<4, W>};
  const std::size_t tiles = (p.rows + kTile - 1) / kTile;
  for (std::size_t n = begin; n < end; n += kGroup)
    for (std::size_t t = 0, m = 0; t < tiles; ++t) {
      const std::size_t rows = (p.rows - m + tiles - t - 1) / (tiles - t);
      kStrips[rows](p, m, n, std::min(n + kGroup, end), {kGroup, t, tiles});
      m += rows;
    }
}

#include "gemm/packed.h"

void packed_columns(const Problem& p, std::size_t begin, std::size_t end, float* scratch) {
  for (std::size_t n = begin; n < end; n += panels::kCols) panels::multiply(p, n, panel_at(p.w, n, p.k_size), scratch);
}

}  // namespace
}  // namespace lamina::gemm::avx2
#pragma GCC pop_options

namespace lamina::gemm {

const Kernel kAvx2Bf16 = {avx2::plan<Bf16>, avx2::prepare<Bf16>, avx2::columns<Bf16>};
const Kernel kAvx2Half = {avx2::plan<Half>, avx2::prepare<Half>, avx2::columns<Half>};
const Packing kAvx2Panels = {
    {avx2::panels::plan, avx2::panels::prepare, avx2::packed_columns}, avx2::packed_bytes, avx2::pack};

}  // namespace lamina::gemm
