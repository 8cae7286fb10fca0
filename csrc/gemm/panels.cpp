#include "gemm/panels.h"

#include <immintrin.h>

#include <algorithm>

// See linear.cpp.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma")
namespace lamina::gemm::panels {
namespace {

constexpr std::size_t kLanes = 16, kChains = 16, kDepth = 2 * kChains;  // numbers of k in a vector
constexpr std::size_t kTile = 8;           // rows whose sums are in registers: 8 x 2
static_assert(kTile == 8 && kRowsPrepared % kTile == 0, "prepare() makes tiles of up to 8 rows, whole ones apart");
constexpr std::size_t kBlock = 8 * kTile;  // rows whose sums of chains wait in L1 or L2
constexpr std::size_t kLevels = 4;         // sums of 1, 2, 4 and 8 chains wait for as many others
constexpr std::size_t kOrder[kChains] = {0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15};  // as lanes are added

std::size_t links(std::size_t k_size) { return (k_size + kDepth - 1) / kDepth; }

// 16 x 16 pairs.
inline void transpose(const __m512i (&from)[kLanes], __m512i (&to)[kLanes]) {
  __m512i a[kLanes], b[kLanes];
  for (std::size_t i = 0; i < kLanes; i += 2) {
    a[i] = _mm512_unpacklo_epi32(from[i], from[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(from[i], from[i + 1]);
  }
  for (std::size_t i = 0; i < kLanes; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]), b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]), b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  for (std::size_t j = 0; j < 4; ++j) {
    const __m512i even = _mm512_shuffle_i32x4(b[j], b[4 + j], 0x88), odd = _mm512_shuffle_i32x4(b[j], b[4 + j], 0xdd);
    const __m512i even8 = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0x88);
    const __m512i odd8 = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0xdd);
    to[j] = _mm512_shuffle_i32x4(even, even8, 0x88), to[8 + j] = _mm512_shuffle_i32x4(even, even8, 0xdd);
    to[4 + j] = _mm512_shuffle_i32x4(odd, odd8, 0x88), to[12 + j] = _mm512_shuffle_i32x4(odd, odd8, 0xdd);
  }
}

// The t-th vector of k of a row, with zeros after its end.
inline __m512i link_of(const std::uint16_t* row, std::size_t t, std::size_t k_size) {
  const std::size_t left = k_size - t * kDepth;
  const __mmask32 there = left >= kDepth ? ~__mmask32(0) : (__mmask32(1) << left) - 1;
  return _mm512_maskz_loadu_epi16(there, row + t * kDepth);
}

// `count` rows of w, at most 16, to half of a panel's pairs; 0 where there is no row.
void interleave(const std::uint16_t* from, std::size_t ld, std::size_t k_size, std::size_t count, std::uint32_t* to) {
  const std::size_t n = links(k_size);
  for (std::size_t t = 0; t < n; ++t) {
    __m512i rows[kLanes], pairs[kLanes];
    for (std::size_t r = 0; r < kLanes; ++r)
      rows[r] = r < count ? link_of(from + r * ld, t, k_size) : _mm512_setzero_si512();
    transpose(rows, pairs);
    for (std::size_t c = 0; c < kChains; ++c) _mm512_storeu_si512(to + (c * n + t) * kCols, pairs[kOrder[c]]);
  }
}

// A tile of `count` rows of x, at most kRows, as [chain][link][row] pairs: as many links at once as fill the lanes.
template <std::size_t kRows>
void spread(const std::uint16_t* from, std::size_t ld, std::size_t k_size, std::size_t count, std::uint32_t* to) {
  constexpr std::size_t kLinks = kLanes / kRows;
  const std::size_t n = links(k_size);
  __mmask16 there = 0;
  for (std::size_t lane = 0; lane < kLanes; ++lane) there |= static_cast<__mmask16>((lane % kRows < count) << lane);
  for (std::size_t t = 0; t < n; t += kLinks) {
    __m512i lanes[kLanes], pairs[kLanes];
    for (std::size_t link = 0; link < kLinks; ++link)
      for (std::size_t r = 0; r < kRows; ++r)
        lanes[link * kRows + r] =
            r < count && t + link < n ? link_of(from + r * ld, t + link, k_size) : _mm512_setzero_si512();
    transpose(lanes, pairs);
    const auto kept = static_cast<__mmask16>((1u << std::min(kLinks, n - t) * count) - 1);
    for (std::size_t c = 0; c < kChains; ++c)
      _mm512_mask_storeu_epi32(to + (c * n + t) * count, kept, _mm512_maskz_compress_epi32(there, pairs[kOrder[c]]));
  }
}

// One chain of kRows rows and a panel. Meanwhile `lines` of the memory `ahead` are fetched, no nearer than L2.
template <int kRows>
inline void chain(const std::uint32_t* x, const std::uint16_t* w, std::size_t n, const char* ahead, std::size_t lines,
                  __m512 (&s)[kRows][2]) {
  for (auto& row : s) row[0] = row[1] = _mm512_setzero_ps();
  for (std::size_t t = 0; t < n; ++t) {
    if (2 * t < lines) {
      __builtin_prefetch(ahead + 128 * t, 0, 2);
      __builtin_prefetch(ahead + 128 * t + 64, 0, 2);
    }
    const auto w0 = (__m512bh)_mm512_loadu_si512(w + t * 2 * kCols);
    const auto w1 = (__m512bh)_mm512_loadu_si512(w + t * 2 * kCols + kCols);
    for (int m = 0; m < kRows; ++m) {
      const auto pair = (__m512bh)_mm512_set1_epi32(static_cast<int>(x[t * kRows + m]));
      s[m][0] = _mm512_dpbf16_ps(s[m][0], pair, w0);
      s[m][1] = _mm512_dpbf16_ps(s[m][1], pair, w1);
    }
  }
}

// 16 columns of y from n on, or what there is of them.
inline void store(const Problem& p, __m512 sum, std::size_t row, std::size_t n) {
  const auto there = static_cast<__mmask16>((1u << std::min(kLanes, p.cols - n)) - 1);
  if (p.b) {
    const __m256i b = _mm256_maskz_loadu_epi16(there, static_cast<const Bf16*>(p.b) + n);
    sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16)));
  }
  _mm256_mask_storeu_epi16(static_cast<Bf16*>(p.y) + row * p.cols + n, there, (__m256i)_mm512_cvtneps_pbh(sum));
}

// The operands of a tile: x and w of a chain, and y from row `row` and column `n` on. It also has the memory to prefetch,
// and pending sums, `level` floats from one kind to the next.
struct Place {
  const std::uint32_t* x;
  const std::uint16_t* w;
  std::size_t row, n;
  const char* ahead;
  std::size_t lines;
  float* waiting;
  std::size_t level;
};

// `number`: of the chain. Its sums are added to those of chains before it; the last one's are y.
template <int kRows>
void tile(const Problem& p, const Place& at, std::size_t number) {
  __m512 s[kRows][2];
  chain<kRows>(at.x, at.w, links(p.k_size), at.ahead, at.lines, s);
  float* waiting = at.waiting;
  for (std::size_t chains = number; chains & 1; chains >>= 1, waiting += at.level)
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      s[m][0] = _mm512_add_ps(_mm512_loadu_ps(waiting + m * kCols), s[m][0]);
      s[m][1] = _mm512_add_ps(_mm512_loadu_ps(waiting + m * kCols + kLanes), s[m][1]);
    }
  if (number + 1 < kChains) {
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      _mm512_storeu_ps(waiting + m * kCols, s[m][0]);
      _mm512_storeu_ps(waiting + m * kCols + kLanes, s[m][1]);
    }
    return;
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
    store(p, s[m][0], at.row + m, at.n);
    if (at.n + kLanes < p.cols) store(p, s[m][1], at.row + m, at.n + kLanes);
  }
}

constexpr decltype(&tile<1>) kTiles[kTile + 1] = {nullptr, tile<1>, tile<2>, tile<3>, tile<4>,
                                                  tile<5>, tile<6>, tile<7>, tile<8>};

// Rows [first, first + rows). Of each chain w comes from memory once, and every tile fetches its part of the next one.
void block(const Problem& p, std::size_t first, std::size_t rows, std::size_t n, const std::uint16_t* w,
           float* waiting) {
  const std::size_t length = links(p.k_size), tiles = (rows + kTile - 1) / kTile;
  const std::size_t size = length * 2 * kCols, lines = (2 * length + tiles - 1) / tiles;
  const auto* const x = reinterpret_cast<const std::uint32_t*>(p.x);
  for (std::size_t c = 0; c < kChains; ++c, w += size) {
    const char* ahead = reinterpret_cast<const char*>(w + size);
    for (std::size_t m = 0; m < rows; m += kTile, ahead += lines * 64) {
      const std::size_t count = std::min(kTile, rows - m), row = first + m;
      const std::uint32_t* const pairs = x + row * length * kChains + c * length * count;
      kTiles[count](p, {pairs, w, row, n, ahead, lines, waiting + m * kCols, rows * kCols}, c);
    }
  }
}

}  // namespace

std::size_t bytes(std::size_t k_size) { return kCols * links(k_size) * kDepth * sizeof(Bf16); }

void pack(const Problem& p, std::size_t n, void* to) {
  for (std::size_t half = 0; half < kCols && n + half < p.cols; half += kLanes)
    interleave(static_cast<const std::uint16_t*>(p.w) + (n + half) * p.ldw, p.ldw, p.k_size,
               std::min(kLanes, p.cols - n - half), static_cast<std::uint32_t*>(to) + half);
}

// x: of each tile of rows, [chain][link][row] pairs.
Plan plan(const Problem& p) {
  return {kCols, p.rows * links(p.k_size) * kChains, kLevels * std::min(p.rows, kBlock) * kCols};
}

void prepare(const Problem& p, const void* x, std::size_t begin, std::size_t end, float* to) {
  for (std::size_t m = begin; m < end; m += kTile) {
    const std::size_t count = std::min(kTile, end - m);
    const auto by_rows = count > 4 ? spread<8> : count > 2 ? spread<4> : count > 1 ? spread<2> : spread<1>;
    by_rows(static_cast<const std::uint16_t*>(x) + m * p.k_size, p.k_size, p.k_size, count,
            reinterpret_cast<std::uint32_t*>(to) + m * links(p.k_size) * kChains);
  }
}

void multiply(const Problem& p, std::size_t n, const void* w, float* scratch) {
  for (std::size_t first = 0; first < p.rows; first += kBlock)
    block(p, first, std::min(kBlock, p.rows - first), n, static_cast<const std::uint16_t*>(w), scratch);
}

}  // namespace lamina::gemm::panels
#pragma GCC pop_options
