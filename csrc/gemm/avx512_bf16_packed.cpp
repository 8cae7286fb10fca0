// bf16 by products of pairs (AVX512-BF16) from packed weights: bit for bit what avx512_bf16.cpp computes from weights as
// they lie, in fewer instructions.
//
// There the 16 chains of an output are the lanes of a vector, which in the end are added to each other. Here a lane is a
// column: a vector of w holds a pair of numbers of 16 columns, all of one chain. So a chain of 16 columns is summed at
// once, with one pair of x in every lane; then the chains are added, in the order in which lanes are added there.
//
// Packed weights: [blocks of 16 columns][chains, in the order of their addition][vectors of k][16 columns][2 numbers].
// x as prepared: [tiles of rows][chains, likewise][vectors of k][rows of the tile][2 numbers]. Zeros fill both up.
#include <immintrin.h>

#include <algorithm>

#include "gemm/linear.h"

// See linear.cpp.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma")
namespace lamina::gemm::avx512_bf16_packed {
namespace {

#include "gemm/transpose.h"

constexpr std::size_t kDepth = 32;  // numbers of k in a vector
constexpr std::size_t kChains = 16;  // of an output
constexpr std::size_t kBlock = 16;  // columns of a vector
constexpr std::size_t kWide = 3;  // blocks of a tile
constexpr std::size_t kMostRows = 8;  // of a tile: 8 x 3 sums, 3 vectors of w and one of x fill the registers
// Chains as they are added: (0 + 2) + (1 + 3), the same of 8 .. 11, those two, the same of 4 .. 7 and 12 .. 15, and all.
constexpr std::size_t kOrder[kChains] = {0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15};
constexpr int kLevels = 4;  // sums that wait for their partners

std::size_t steps(std::size_t k_size) { return (k_size + kDepth - 1) / kDepth; }

std::size_t size(std::size_t cols, std::size_t k_size) {
  return (cols + kBlock - 1) / kBlock * kBlock * steps(k_size) * kDepth * sizeof(Bf16);
}

// What there is of a vector of k.
inline __mmask32 part(std::size_t k, std::size_t k_size) {
  return k_size - k >= kDepth ? ~__mmask32(0) : (__mmask32(1) << (k_size - k)) - 1;
}

void pack(const Weights& w, void* to, std::size_t begin, std::size_t end) {
  const auto* const from = static_cast<const Bf16*>(w.at);
  const std::size_t vectors = steps(w.k_size);
  for (std::size_t n = begin; n < end; n += kBlock) {
    auto* const block = static_cast<std::uint32_t*>(to) + n * vectors * kChains;
    for (std::size_t j = 0; j < vectors; ++j) {
      const __mmask32 there = part(j * kDepth, w.k_size);
      __m512i r[kBlock];
      for (std::size_t i = 0; i < kBlock; ++i)
        r[i] = n + i < w.cols ? _mm512_maskz_loadu_epi16(there, from + (n + i) * w.ldw + j * kDepth)
                              : _mm512_setzero_si512();
      transpose(r);
      for (std::size_t c = 0; c < kChains; ++c) _mm512_storeu_si512(block + (c * vectors + j) * kBlock, r[kOrder[c]]);
    }
  }
}

Plan plan(const Problem& p) { return {kWide * kBlock, p.rows * steps(p.k_size) * kChains, 0}; }

// Rows of each tile: as equal as may be.
struct Tiles {
  std::size_t rows, count, done = 0, first = 0;

  explicit Tiles(std::size_t all) : rows(all), count((all + kMostRows - 1) / kMostRows) {}
  std::size_t next() const { return (rows - first + count - done - 1) / (count - done); }
  void pass(std::size_t taken) { first += taken, ++done; }
};

void prepare(const Problem& p, const void* x, float* to) {
  const auto* const from = static_cast<const Bf16*>(x);
  const std::size_t vectors = steps(p.k_size);
  for (Tiles tiles(p.rows); tiles.done < tiles.count;) {
    const std::size_t rows = tiles.next();
    const auto there = static_cast<__mmask16>((1u << rows) - 1);
    auto* const tile = reinterpret_cast<std::uint32_t*>(to) + tiles.first * vectors * kChains;
    for (std::size_t j = 0; j < vectors; ++j) {
      const __mmask32 some = part(j * kDepth, p.k_size);
      __m512i r[kBlock];
      for (std::size_t m = 0; m < kBlock; ++m)
        r[m] = m < rows ? _mm512_maskz_loadu_epi16(some, from + (tiles.first + m) * p.k_size + j * kDepth)
                        : _mm512_setzero_si512();
      transpose(r);
      for (std::size_t c = 0; c < kChains; ++c)
        _mm512_mask_storeu_epi32(tile + (c * vectors + j) * rows, there, r[kOrder[c]]);
    }
    tiles.pass(rows);
  }
}

// Where a tile works: x as prepared for it, its first block of w, w that is to be fetched meanwhile, its first column
// of y and of the bias.
struct Place {
  const std::uint32_t *x, *w, *ahead;
  std::size_t row, col;
};

template <int kRows, int kBlocks>
using Sums = __m512[kRows][kBlocks];

// Loops over sums are unrolled at once, lest GCC 12 keep the sums in memory: that took a tenth of the time.
template <int kRows, int kBlocks>
inline void add(Sums<kRows, kBlocks>& to, const Sums<kRows, kBlocks>& other) {
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 8
    for (int b = 0; b < kBlocks; ++b) to[m][b] = _mm512_add_ps(other[m][b], to[m][b]);
}

template <int kRows, int kBlocks>
inline void store(const Problem& p, const Place& at, const Sums<kRows, kBlocks>& sums) {
#pragma GCC unroll 8
  for (int b = 0; b < kBlocks; ++b) {
    const std::size_t n = at.col + b * kBlock;
    const __mmask16 there = p.cols - n >= kBlock ? 0xffff : static_cast<__mmask16>((1u << (p.cols - n)) - 1);
    __m512 bias = _mm512_setzero_ps();
    if (p.b) {
      const __m256i raw = _mm256_maskz_loadu_epi16(there, static_cast<const Bf16*>(p.b) + n);
      bias = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
    }
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const __m512 y = p.b ? _mm512_add_ps(sums[m][b], bias) : sums[m][b];
      auto* const to = static_cast<Bf16*>(p.y) + (at.row + m) * p.cols + n;
      _mm256_mask_storeu_epi16(to, there, (__m256i)_mm512_cvtneps_pbh(y));
    }
  }
}

// kTogether chains are summed at once, as many as give sums enough to hide the latency of one. kAhead lines are fetched
// for each vector of w, in the order of memory, as in avx512_bf16.cpp.
template <int kRows, int kBlocks, int kTogether, int kAhead>
void tile(const Problem& p, const Place& at) {
  const std::size_t vectors = steps(p.k_size), block = vectors * kChains * kBlock;
  Sums<kRows, kBlocks> waiting[kLevels];
  const std::uint32_t *x = at.x, *w = at.w, *ahead = at.ahead;
  for (std::size_t chain = 0; chain < kChains; chain += kTogether) {
    Sums<kRows, kBlocks> s[kTogether];
#pragma GCC unroll 8
    for (auto& one : s)
#pragma GCC unroll 8
      for (auto& row : one)
#pragma GCC unroll 8
        for (auto& v : row) v = _mm512_setzero_ps();
    for (std::size_t j = 0; j < vectors; ++j, w += kBlock, x += kRows)
#pragma GCC unroll 8
      for (int c = 0; c < kTogether; ++c) {
        for (int i = 0; i < kAhead; ++i, ahead += kBlock) __builtin_prefetch(ahead, 0, 2);
        __m512bh wk[kBlocks];
        for (int b = 0; b < kBlocks; ++b) wk[b] = (__m512bh)_mm512_loadu_si512(w + c * vectors * kBlock + b * block);
#pragma GCC unroll 8
        for (int m = 0; m < kRows; ++m) {
          const auto xk = (__m512bh)_mm512_set1_epi32(static_cast<int>(x[c * vectors * kRows + m]));
#pragma GCC unroll 8
          for (int b = 0; b < kBlocks; ++b) s[c][m][b] = _mm512_dpbf16_ps(s[c][m][b], xk, wk[b]);
        }
      }
    w += (kTogether - 1) * vectors * kBlock, x += (kTogether - 1) * vectors * kRows;
    if constexpr (kTogether > 1) add<kRows, kBlocks>(s[0], s[1]);
    if constexpr (kTogether > 2) add<kRows, kBlocks>(s[2], s[3]), add<kRows, kBlocks>(s[0], s[2]);
    int level = 0;
    for (std::size_t done = chain / kTogether; done & 1; done >>= 1) add<kRows, kBlocks>(s[0], waiting[level++]);
    if (chain + kTogether == kChains) return store<kRows, kBlocks>(p, at, s[0]);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 8
      for (int b = 0; b < kBlocks; ++b) waiting[level][m][b] = s[0][m][b];
  }
}

template <int kBlocks, int kAhead>
void tile_of(std::size_t rows, const Problem& p, const Place& at) {
  switch (rows) {
    case 1: return tile<1, kBlocks, 4, kAhead>(p, at);
    case 2: return tile<2, kBlocks, 4, kAhead>(p, at);
    case 3: return tile<3, kBlocks, 2, kAhead>(p, at);
    case 4: return tile<4, kBlocks, 2, kAhead>(p, at);
    case 5: return tile<5, kBlocks, 1, kAhead>(p, at);
    case 6: return tile<6, kBlocks, 1, kAhead>(p, at);
    case 7: return tile<7, kBlocks, 1, kAhead>(p, at);
    default: return tile<8, kBlocks, 1, kAhead>(p, at);
  }
}

// All rows of x against kBlocks blocks of columns. Each tile fetches its part of the blocks that come next.
template <int kBlocks>
void strip(const Problem& p, std::size_t n) {
  const std::size_t block = steps(p.k_size) * kChains * kBlock;  // dwords
  const auto* const x = reinterpret_cast<const std::uint32_t*>(p.x);
  const auto* const w = static_cast<const std::uint32_t*>(p.w) + n / kBlock * block;
  std::size_t fetched = 0;  // blocks
  for (Tiles tiles(p.rows); tiles.done < tiles.count;) {
    const std::size_t rows = tiles.next(), ahead = (tiles.done + 1) * kBlocks / tiles.count - fetched;
    const Place at{x + tiles.first * block / kBlock, w, w + (kBlocks + fetched) * block, tiles.first, n};
    if (ahead == 0) tile_of<kBlocks, 0>(rows, p, at);
    if (ahead == 1) tile_of<kBlocks, 1>(rows, p, at);
    if (ahead > 1) tile_of<kBlocks, kBlocks>(rows, p, at);
    tiles.pass(rows), fetched += ahead;
  }
}

void columns(const Problem& p, std::size_t begin, std::size_t end, float*) {
  std::size_t n = begin;
  for (; n + (kWide - 1) * kBlock < end; n += kWide * kBlock) strip<kWide>(p, n);
  if (n + kBlock < end) strip<2>(p, n), n += 2 * kBlock;
  if (n < end) strip<1>(p, n);
}

}  // namespace

}  // namespace lamina::gemm::avx512_bf16_packed
#pragma GCC pop_options

namespace lamina::gemm {

const Packing kAvx512Bf16Packed = {
    16,
    avx512_bf16_packed::size,
    avx512_bf16_packed::pack,
    {avx512_bf16_packed::plan, avx512_bf16_packed::prepare, avx512_bf16_packed::columns}};

}  // namespace lamina::gemm
