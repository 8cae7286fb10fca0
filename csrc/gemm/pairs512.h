// bf16 weights by vectors of pairs of numbers, as they lie or in panels of columns, with the same bits. Included once for
// each instruction set, inside a namespace that defines Pairs: how pairs are multiplied. Panels take less time.
//
// Every output is 16 chains, one a lane, each of pairs 32 numbers apart. A tail of k is a vector that ends with zeros.
// Lanes are added in one order. So a row's result depends, bit for bit, on that row alone, whatever the tile.
//
// A panel has [chain][link][column] pairs of numbers; a chain's pairs are its links. So a product fills a vector of
// columns, no lanes are left to add, and a thread reads its panels from one end to the other.

constexpr std::size_t kLanes = 16, kChains = 16, kDepth = 2 * kChains;  // numbers of k in a vector

namespace panels {

constexpr std::size_t kCols = 32;  // of a panel
constexpr std::size_t kTile = 8;  // rows whose sums are in registers: 8 x 2
static_assert(kTile == 8 && kRowsPrepared % kTile == 0, "prepare() makes tiles of up to 8 rows, whole ones apart");
constexpr std::size_t kBlock = 8 * kTile;  // rows whose sums of chains wait in L1 or L2
constexpr std::size_t kShort = 96;  // links of a chain of which two go together: both, of a panel, stay in L1
constexpr std::size_t kLevels = 4;  // sums of 1, 2, 4 and 8 chains wait for as many others
constexpr std::size_t kOrder[kChains] = {0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15};  // as lanes are added

inline std::size_t links(std::size_t k_size) { return (k_size + kDepth - 1) / kDepth; }

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

// A tile of `count` rows of x, at most kRows, as [chain][part of a pair][link][row]: as many links at once as fill the
// lanes.
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
    for (std::size_t r = 0; r < count; ++r) __builtin_prefetch(from + r * ld + (t + 4 * kLinks) * kDepth, 0, 3);
    transpose(lanes, pairs);
    const auto kept = static_cast<__mmask16>((1u << std::min(kLinks, n - t) * count) - 1);
    for (std::size_t c = 0; c < kChains; ++c)
      Pairs::put(to + (c * Pairs::kParts * n + t) * count, n * count, kept,
                 _mm512_maskz_compress_epi32(there, pairs[kOrder[c]]));
  }
}

// kTogether chains of kRows rows and a panel. x: of a tile of `count` rows. The first `lines` of the memory `ahead` are
// fetched meanwhile, no nearer than L2.
template <int kRows, int kTogether>
inline void chains(const std::uint32_t* x, std::size_t count, const std::uint16_t* w, std::size_t n, const char* ahead,
                   std::size_t lines, __m512 (&s)[kTogether][kRows][2]) {
  for (auto& chain : s)
    for (auto& row : chain) row[0] = row[1] = _mm512_setzero_ps();
  const auto link = [&](std::size_t t) __attribute__((always_inline)) {
#pragma GCC unroll 2
    for (int c = 0; c < kTogether; ++c) {
      const std::uint16_t* const from = w + (c * n + t) * 2 * kCols;
      const Pairs w0 = Pairs::of(_mm512_loadu_si512(from)), w1 = Pairs::of(_mm512_loadu_si512(from + kCols));
      const std::uint32_t* const pairs = x + (c * Pairs::kParts * n + t) * count;
      if constexpr (kTogether > 1)
        __builtin_prefetch(pairs + kChains * Pairs::kParts * n * count, 0, 3);  // of the next tile
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) {
        const Pairs pair = Pairs::all(pairs + m, n * count);
        s[c][m][0] = Pairs::add(s[c][m][0], pair, w0);
        s[c][m][1] = Pairs::add(s[c][m][1], pair, w1);
      }
    }
  };
  std::size_t t = 0;
  for (; t < n && 2 * t < lines; ++t) {
    __builtin_prefetch(ahead + 128 * t, 0, 2);
    __builtin_prefetch(ahead + 128 * t + 64, 0, 2);
    link(t);
  }
  for (; t + 4 <= n; t += 4) link(t), link(t + 1), link(t + 2), link(t + 3);
  for (; t < n; ++t) link(t);
}

// 16 columns of y from n on, or what there is of them.
inline void store(const Problem& p, __m512 sum, std::size_t row, std::size_t n) {
  const auto there = static_cast<__mmask16>((1u << std::min(kLanes, p.cols - n)) - 1);
  if (p.b) {
    const __m256i b = _mm256_maskz_loadu_epi16(there, static_cast<const Bf16*>(p.b) + n);
    sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16)));
  }
  _mm256_mask_storeu_epi16(static_cast<Bf16*>(p.y) + row * p.cols + n, there, Pairs::rounded(sum));
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

// Of `count` rows of x, those that `at` names. `number`: of the first chain, a multiple of kTogether. Sums are added to
// those of chains before it; the last one's are y.
template <int kRows, int kTogether>
void tile(const Problem& p, const Place& at, std::size_t count, std::size_t number) {
  __m512 sums[kTogether][kRows][2];
  chains<kRows>(at.x, count, at.w, links(p.k_size), at.ahead, at.lines, sums);
  auto& s = sums[0];
  float* waiting = at.waiting;
  if constexpr (kTogether == 2) {
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m)
      for (int i = 0; i < 2; ++i) s[m][i] = _mm512_add_ps(s[m][i], sums[1][m][i]);
    waiting += at.level;
  }
  for (std::size_t done = number / kTogether; done & 1; done >>= 1, waiting += at.level)
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      s[m][0] = _mm512_add_ps(_mm512_loadu_ps(waiting + m * kCols), s[m][0]);
      s[m][1] = _mm512_add_ps(_mm512_loadu_ps(waiting + m * kCols + kLanes), s[m][1]);
    }
  if (number + kTogether < kChains) {
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

constexpr decltype(&tile<1, 1>) kTiles[kTile + 1] = {nullptr,    tile<1, 1>, tile<2, 1>, tile<3, 1>, tile<4, 1>,
                                                     tile<5, 1>, tile<6, 1>, tile<7, 1>, tile<8, 1>};

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
      const std::uint32_t* const pairs = x + (row * kChains + c * count) * length * Pairs::kParts;
      kTiles[count](p, {pairs, w, row, n, ahead, lines, waiting + m * kCols, rows * kCols}, count, c);
    }
  }
}

// The same of whole tiles, two chains at a time: half as many sums wait. A tile goes by halves.
void wide_block(const Problem& p, std::size_t first, std::size_t rows, std::size_t n, const std::uint16_t* w,
                float* waiting) {
  constexpr std::size_t kHalf = kTile / 2;
  const std::size_t length = links(p.k_size), halves = rows / kHalf;
  const std::size_t size = 2 * length * 2 * kCols, lines = (4 * length + halves - 1) / halves;
  const auto* const x = reinterpret_cast<const std::uint32_t*>(p.x);
  for (std::size_t c = 0; c < kChains; c += 2, w += size) {
    const char* ahead = reinterpret_cast<const char*>(w + size);
    for (std::size_t m = 0; m < rows; m += kHalf, ahead += lines * 64) {
      const std::size_t row = first + m, above = m % kTile;
      const std::uint32_t* const pairs = x + ((row - above) * kChains + c * kTile) * length * Pairs::kParts + above;
      tile<kHalf, 2>(p, {pairs, w, row, n, ahead, lines, waiting + m * kCols, rows * kCols}, kTile, c);
    }
  }
}

std::size_t bytes(std::size_t k_size) { return kCols * links(k_size) * kDepth * sizeof(Bf16); }

void pack(const Problem& p, std::size_t n, void* to) {
  for (std::size_t half = 0; half < kCols && n + half < p.cols; half += kLanes)
    interleave(static_cast<const std::uint16_t*>(p.w) + (n + half) * p.ldw, p.ldw, p.k_size,
               std::min(kLanes, p.cols - n - half), static_cast<std::uint32_t*>(to) + half);
}

// x: of each tile of rows, [chain][part of a pair][link][row].
Plan plan(const Problem& p) {
  const std::size_t x = p.rows * links(p.k_size) * kChains * Pairs::kParts;
  return {kCols, x, kLevels * std::min(p.rows, kBlock) * kCols};
}

void prepare(const Problem& p, const void* x, std::size_t begin, std::size_t end, float* to) {
  for (std::size_t m = begin; m < end; m += kTile) {
    const std::size_t count = std::min(kTile, end - m);
    const auto by_rows = count > 4 ? spread<8> : count > 2 ? spread<4> : count > 1 ? spread<2> : spread<1>;
    by_rows(static_cast<const std::uint16_t*>(x) + m * p.k_size, p.k_size, p.k_size, count,
            reinterpret_cast<std::uint32_t*>(to) + m * links(p.k_size) * kChains * Pairs::kParts);
  }
}

// Rows [begin, end).
void multiply(const Problem& p, std::size_t begin, std::size_t end, std::size_t n, const void* w, float* scratch) {
  for (std::size_t first = begin, rows; first < end; first += rows) {
    rows = std::min(kBlock, end - first);
    const bool wide = rows >= kTile && links(p.k_size) <= kShort;
    if (wide) rows -= rows % kTile;
    (wide ? wide_block : block)(p, first, rows, n, static_cast<const std::uint16_t*>(w), scratch);
  }
}

// How many rows of x meet all columns before the next ones: they stay in L2.
std::size_t rows_kept(const Problem& p) {
  constexpr std::size_t kInL2 = 512 << 10;
  return std::max<std::size_t>(1, kInL2 / (kBlock * links(p.k_size) * kChains * Pairs::kParts * 4)) * kBlock;
}

}  // namespace panels

constexpr std::size_t kQuad = 4;  // columns whose lanes are added together
constexpr std::size_t kWide = 8;  // columns of a tile of one or two rows, which need as many sums under way

// For more rows than Pairs::kFewRows a panel is made of w on the way.
Plan plan(const Problem& p) {
  if (p.rows <= Pairs::kFewRows) return {kWide, 0, 0};
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
inline Pairs load(const Bf16* from, __mmask32 there) {
  return Pairs::of(kWhole ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi16(there, from));
}

template <bool kWhole, int kRows, int kCols, int kSums>
inline void step(const Problem& p, const Place& at, std::size_t k, __mmask32 there, __m512 (&s)[kRows][kSums]) {
  Pairs w[kCols];
  for (int n = 0; n < kCols; ++n) w[n] = load<kWhole>(at.w + n * p.ldw + k, there);
  for (int m = 0; m < kRows; ++m) {
    const Pairs x = load<kWhole>(at.x + m * p.k_size + k, there);
    for (int n = 0; n < kCols; ++n) s[m][n] = Pairs::add(s[m][n], x, w[n]);
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
      _mm_mask_storeu_epi16(at.y + m * p.cols + q * kQuad, kStored,
                            _mm256_castsi256_si128(Pairs::rounded(_mm512_castps128_ps512(y))));
    }
}

template <int kCols, int kAhead>
void tile_of(std::size_t rows, const Problem& p, const Place& at) {
  if (rows == 1) return tile<1, kCols, kAhead>(p, at);
  if (rows == 2) return tile<2, kCols, kAhead>(p, at);
  if constexpr (kCols <= int(kQuad)) {
    if (rows == 3) return tile<3, kCols, kAhead>(p, at);
    if (rows == 4) return tile<4, kCols, kAhead>(p, at);
    if constexpr (Pairs::kMostRows > 4) {
      if (rows == 5) return tile<5, kCols, kAhead>(p, at);
      return tile<6, kCols, kAhead>(p, at);
    }
  }
}

// All rows of x against kCols columns of y, in tiles as equal as may be. Each fetches its part of the strip after next.
template <int kCols>
void strip(const Problem& p, std::size_t n) {
  const std::size_t tiles = (p.rows + Pairs::kMostRows - 1) / Pairs::kMostRows;
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
    panels::multiply(p, 0, p.rows, n, panel, scratch);
  }
}

void columns(const Problem& p, std::size_t begin, std::size_t end, float* scratch) {
  if (p.rows > Pairs::kFewRows) return by_panels(p, begin, end, scratch);
  std::size_t n = begin;
  if (p.rows <= 2)
    for (; n + kWide <= end; n += kWide) strip<kWide>(p, n);
  for (; n + kQuad <= end; n += kQuad) strip<kQuad>(p, n);
  for (; n < end; ++n) strip<1>(p, n);
}

#include "gemm/packed.h"

void packed_columns(const Problem& p, std::size_t begin, std::size_t end, float* scratch) {
  const std::size_t kept = panels::rows_kept(p);
  for (std::size_t first = 0; first < p.rows; first += kept)
    for (std::size_t n = begin; n < end; n += panels::kCols)
      panels::multiply(p, first, std::min(first + kept, p.rows), n, panel_at(p.w, n, p.k_size), scratch);
}

constexpr Kernel kAsTheyLie = {plan, panels::prepare, columns};
constexpr Packing kPacking = {{panels::plan, panels::prepare, packed_columns}, packed_bytes, pack};
