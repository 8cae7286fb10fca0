// bf16 by matrix instructions: a tile of w is what lies in memory, x is laid out for it once a call. Packed, tiles lie one
// after the other. Linear layers of few rows so take the time in which a core reads their weights. Other types are
// AVX-512's.
#include <immintrin.h>

#include <algorithm>

#include "cpu.h"
#include "gemm/linear.h"

// See linear.cpp.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma")
namespace lamina::gemm::amx {
namespace {

#include "transpose512.h"

constexpr std::size_t kDepth = 32, kBytes = 64;  // of k in a tile
constexpr std::size_t kTile = 16;  // rows of a tile
static_assert(kRowsPrepared % kTile == 0, "tiles are prepared whole");
constexpr std::size_t kWide = 2 * kTile;  // columns of y at once
constexpr std::size_t kInL2 = 5 << 18;  // bytes of x that `block` keeps in L2
constexpr std::size_t kManyRows = 256;
// What is multiplied at once then: rows, columns and slices of k, which stay in L2 with their sums.
constexpr std::size_t kBlockRows = 256, kBlockCols = 256, kBlockSlices = 32;

using Sums = float[2][2][kTile][kTile];  // of columns of y, `kWide` of them, by rows of two tiles of x

// Registers:
// - 0, 1: w [16 columns of y, 64 bytes]
// - 2, 3: x [16 pairs of k, rows of x]
// - 4 .. 7: y^T [16 columns, rows of x], by w and x
struct alignas(64) Config {
  std::uint8_t palette = 1, start = 0, reserved[14] = {};
  std::uint16_t bytes[16] = {};
  std::uint8_t rows[16] = {};

  // `left`, `right`: rows of x in registers 2 and 3.
  Config(std::size_t left, std::size_t right) {
    const auto set = [&](int i, std::size_t width) {
      rows[i] = width ? kTile : 0, bytes[i] = static_cast<std::uint16_t>(4 * width);
    };
    set(0, kTile), set(1, kTile);
    set(2, left), set(4, left), set(6, left);
    set(3, right), set(5, right), set(7, right);
  }
};

std::size_t slices(const Problem& p) { return (p.k_size + kDepth - 1) / kDepth; }

// Columns n .. n + kWide of w as they were packed: [tiles of k][columns][kDepth].
const char* panel(const Problem& p, std::size_t n) { return static_cast<const char*>(p.w) + n * slices(p) * kBytes; }

// Where rows `first ..` of x lie once they are laid out: [slices, 16 pairs of k, rows of the tile], a dword for a pair.
const std::uint32_t* laid_out(const Problem& p, std::size_t first) {
  return reinterpret_cast<const std::uint32_t*>(p.x) + first * slices(p) * kTile;
}

// Rows that are multiplied in blocks: whole pairs of tiles, where there are many.
std::size_t in_blocks(const Problem& p) {
  return p.packed && p.rows >= kManyRows ? p.rows / (2 * kTile) * 2 * kTile : 0;
}

Plan plan(const Problem& p) {
  return {kWide, p.rows * slices(p) * kTile, std::min(in_blocks(p), kBlockRows) * kBlockCols};
}

void prepare(const Problem& p, const void* x, std::size_t begin, std::size_t end, float* to) {
  const auto* const from = static_cast<const std::uint16_t*>(x);
  for (std::size_t first = begin; first < end; first += kTile) {
    const std::size_t rows = std::min(kTile, end - first);
    const auto there = static_cast<__mmask16>((1u << rows) - 1);
    auto* at = reinterpret_cast<std::uint32_t*>(to) + first * slices(p) * kTile;
    for (std::size_t k = 0; k < p.k_size; k += kDepth) {
      const __mmask32 some = p.k_size - k >= kDepth ? ~__mmask32(0) : (__mmask32(1) << (p.k_size - k)) - 1;
      __m512i r[kTile];
      for (std::size_t m = 0; m < kTile; ++m)
        r[m] = m < rows ? _mm512_maskz_loadu_epi16(some, from + (first + m) * p.k_size + k) : _mm512_setzero_si512();
      transpose(r);
      for (std::size_t pair = 0; pair < kTile; ++pair, at += rows) _mm512_mask_storeu_epi32(at, there, r[pair]);
    }
  }
}

// Columns of w under way, at k: `cols` that there are, each of `left` numbers from here on.
struct Weights {
  const char* at;
  std::size_t stride, step;  // bytes from one column to the next, and from one tile of k to the next
  std::size_t cols, left;
  std::size_t apart;  // columns that do not lie one after the other

  Weights(const Problem& p, std::size_t n) {
    if (p.packed) {
      at = panel(p, n), stride = kBytes, step = kWide * kBytes;
      cols = kWide, left = slices(p) * kDepth, apart = 0;
    } else {
      at = static_cast<const char*>(p.w) + 2 * n * p.ldw, stride = 2 * p.ldw, step = kBytes;
      cols = apart = std::min(kWide, p.cols - n), left = p.k_size;
    }
  }
};

// Up to `kTile` columns of w, 32 numbers each, in the layout of tiles: in place, or in `space` with zeros after them.
struct Tile {
  const void* at;
  std::size_t stride;

  Tile(const Weights& w, std::size_t first, std::uint16_t (*space)[kDepth])
      : at(w.at + first * w.stride), stride(w.stride) {
    const std::size_t cols = first < w.cols ? std::min(kTile, w.cols - first) : 0;
    if (cols == kTile && w.left >= kDepth) return;
    const __mmask32 some = w.left >= kDepth ? ~__mmask32(0) : (__mmask32(1) << w.left) - 1;
    for (std::size_t i = 0; i < kTile; ++i)
      _mm512_storeu_si512(space[i], _mm512_maskz_loadu_epi16(i < cols ? some : 0, w.at + (first + i) * w.stride));
    written(space);
    at = space, stride = sizeof space[0];
  }
};

// sums [2, 2, 16, 16] = columns of y, `kWide` of them, by the rows of x that the registers are set for. `ahead`: w that
// comes next, `lines` of which are fetched between the products of a step of k. Columns that lie apart are brought to
// L1 line by line first: the loads of a whole tile at once would wait for each other.
template <bool kTwo>
void products(const Problem& p, std::size_t n, std::size_t first, std::size_t left, std::size_t right,
              const char* ahead, std::size_t lines, float (*sums)[2][kTile][kTile]) {
  std::uint16_t space[2][kTile][kDepth];
  Weights w(p, n);
  const std::uint32_t *a = laid_out(p, first), *b = kTwo ? laid_out(p, first + kTile) : nullptr;
  _tile_zero(4);
  _tile_zero(6);
  if constexpr (kTwo) {
    _tile_zero(5);
    _tile_zero(7);
  }
  for (;; w.at += w.step, w.left -= kDepth) {
    for (std::size_t i = 0; i < lines; ++i, ahead += kBytes) __builtin_prefetch(ahead, 0, 2);
    for (std::size_t i = 0; i < w.apart; ++i) (void)*reinterpret_cast<const volatile char*>(w.at + i * w.stride);
    const Tile low(w, 0, space[0]), high(w, kTile, space[1]);
    _tile_loadd(2, a, 4 * left);
    if constexpr (kTwo) {
      _tile_loadd(3, b, 4 * right);
    }
    _tile_loadd(0, low.at, low.stride);
    _tile_dpbf16ps(4, 0, 2);
    if constexpr (kTwo) {
      _tile_dpbf16ps(5, 0, 3);
    }
    _tile_loadd(1, high.at, high.stride);
    _tile_dpbf16ps(6, 1, 2);
    if constexpr (kTwo) {
      _tile_dpbf16ps(7, 1, 3);
    }
    a += kTile * left, b += kTile * right;
    if (w.left <= kDepth) break;
  }
  _tile_stored(4, sums[0][0], sizeof sums[0][0][0]);
  _tile_stored(6, sums[1][0], sizeof sums[0][0][0]);
  if constexpr (kTwo) {
    _tile_stored(5, sums[0][1], sizeof sums[0][0][0]);
    _tile_stored(7, sums[1][1], sizeof sums[0][0][0]);
  }
}

// Sums of `kWide` columns of y from n on, by 16 rows: `low` and `high` [16 columns, 16 rows]. They become `rows` rows of
// y from `m` on, with the bias.
void store(const Problem& p, const float (*low)[kTile], const float (*high)[kTile], std::size_t m, std::size_t rows,
           std::size_t n) {
  const std::size_t cols = std::min(kWide, p.cols - n);
  const auto column = [&](std::size_t i) {
    const __m512 sums = _mm512_load_ps(i < kTile ? low[i] : high[i - kTile]);
    return p.b && i < cols ? _mm512_add_ps(sums, _mm512_set1_ps(to_float(static_cast<const Bf16*>(p.b)[n + i]))) : sums;
  };
  const __m512i both = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                        5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  written(low), written(high);
  __m512i r[kTile];  // a pair of columns each
  for (std::size_t i = 0; i < kTile; ++i)
    r[i] = _mm512_permutexvar_epi16(both, (__m512i)_mm512_cvtne2ps_pbh(column(2 * i + 1), column(2 * i)));
  transpose(r);
  const __mmask32 some = cols == kWide ? ~__mmask32(0) : (__mmask32(1) << cols) - 1;
  auto* const y = static_cast<Bf16*>(p.y) + m * p.cols + n;
  for (std::size_t i = 0; i < rows; ++i) _mm512_mask_storeu_epi16(y + i * p.cols, some, r[i]);
}

// Rows [begin, end) of x and some columns of y. All of these rows meet some columns before the next ones, at most
// 2 * kTile at once. All of them fetch their part of what comes next.
void block(const Problem& p, std::size_t begin, std::size_t end, std::size_t from, std::size_t to) {
  alignas(64) float sums[2][2][kTile][kTile];
  const std::size_t times = (end - begin + 2 * kTile - 1) / (2 * kTile), lines = (kWide + times - 1) / times;
  std::size_t set_for = 0;  // rows of x
  for (std::size_t n = from; n < to; n += kWide) {
    const Weights w(p, n);
    const char* ahead = w.at + kWide * (p.packed ? slices(p) * kBytes : w.stride);
    for (std::size_t first = begin; first < end; first += 2 * kTile, ahead += slices(p) * lines * kBytes) {
      const std::size_t rows = std::min(2 * kTile, end - first), left = std::min(kTile, rows), right = rows - left;
      if (rows != set_for) {
        const Config config(left, right);
        written(&config);
        _tile_loadconfig(&config);
        set_for = rows;
      }
      (right ? products<true> : products<false>)(p, n, first, left, right, ahead, lines, sums);
      store(p, sums[0][0], sums[1][0], first, left, n);
      if (right) store(p, sums[0][1], sums[1][1], first + kTile, right, n);
    }
  }
}

// As `products` of packed columns and two whole tiles of x, for `count` slices from `slice` on. They are added to what
// `sums` has, unless these are the first slices. x is brought from L2 a little before it is used, `ahead` to L2.
void add_products(const Problem& p, std::size_t n, std::size_t first, std::size_t slice, std::size_t count,
                  const char* ahead, std::size_t lines, Sums& sums) {
  const char* w = panel(p, n) + slice * kWide * kBytes;
  const std::uint32_t* a = laid_out(p, first) + slice * kTile * kTile;
  const std::uint32_t* b = laid_out(p, first + kTile) + slice * kTile * kTile;
  if (slice) {
    _tile_loadd(4, sums[0][0], kBytes);
    _tile_loadd(5, sums[0][1], kBytes);
    _tile_loadd(6, sums[1][0], kBytes);
    _tile_loadd(7, sums[1][1], kBytes);
  } else {
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
  }
  for (; count; --count, w += kWide * kBytes, a += kTile * kTile, b += kTile * kTile) {
    for (std::size_t i = 0; i < lines; ++i, ahead += kBytes) __builtin_prefetch(ahead, 0, 2);
    for (std::size_t i = 2 * kTile; i < 3 * kTile; ++i) {
      __builtin_prefetch(a + i * kTile, 0, 3);
      __builtin_prefetch(b + i * kTile, 0, 3);
    }
    _tile_loadd(2, a, kBytes);
    _tile_loadd(0, w, kBytes);
    _tile_dpbf16ps(4, 0, 2);
    _tile_loadd(3, b, kBytes);
    _tile_dpbf16ps(5, 0, 3);
    _tile_loadd(1, w + kTile * kBytes, kBytes);
    _tile_dpbf16ps(6, 1, 2);
    _tile_dpbf16ps(7, 1, 3);
  }
  _tile_stored(4, sums[0][0], kBytes);
  _tile_stored(5, sums[0][1], kBytes);
  _tile_stored(6, sums[1][0], kBytes);
  _tile_stored(7, sums[1][1], kBytes);
}

// Multiplies many rows by packed w, block by block. A block's x, w and sums stay in L2 until it is done.
void blocks(const Problem& p, std::size_t rows, std::size_t from, std::size_t to, Sums* sums) {
  const Config config(kTile, kTile);
  written(&config);
  _tile_loadconfig(&config);
  const std::size_t all = slices(p);
  for (std::size_t begin = 0; begin < rows; begin += kBlockRows)
    for (std::size_t left = from; left < to; left += kBlockCols) {
      const std::size_t end = std::min(begin + kBlockRows, rows), right = std::min(left + kBlockCols, to);
      const std::size_t times = (end - begin) / (2 * kTile);
      for (std::size_t slice = 0; slice < all; slice += kBlockSlices) {
        const std::size_t count = std::min(kBlockSlices, all - slice), lines = (kWide + times - 1) / times;
        for (std::size_t n = left; n < right; n += kWide) {
          const char* ahead = n + kWide < right     ? panel(p, n + kWide) + slice * kWide * kBytes
                              : slice + count < all ? panel(p, left) + (slice + count) * kWide * kBytes
                                                    : panel(p, right < to ? right : from);
          Sums* at = sums + (n - left) / kWide * times;
          for (std::size_t first = begin; first < end; first += 2 * kTile, ++at, ahead += lines * count * kBytes) {
            add_products(p, n, first, slice, count, ahead, lines, *at);
            if (slice + count < all) continue;
            store(p, (*at)[0][0], (*at)[1][0], first, kTile, n);
            store(p, (*at)[0][1], (*at)[1][1], first + kTile, kTile, n);
          }
        }
      }
    }
}

// Many rows of packed w go by `blocks`. Of the others, as many rows of x as stay in L2 meet all columns before the next
// ones: up to some hundred, w comes from memory once.
void columns(const Problem& p, std::size_t begin, std::size_t end, float* scratch) {
  written(p.x);
  std::size_t first = in_blocks(p);
  if (first) blocks(p, first, begin, end, reinterpret_cast<Sums*>(scratch));
  const std::size_t kept = std::max<std::size_t>(1, kInL2 / (2 * kTile * slices(p) * kBytes)) * 2 * kTile;
  for (; first < p.rows; first += kept) block(p, first, std::min(first + kept, p.rows), begin, end);
  _tile_release();
}

std::size_t packed_bytes(std::size_t cols, std::size_t k_size) {
  return (cols + kWide - 1) / kWide * kWide * ((k_size + kDepth - 1) / kDepth) * kBytes;
}

void pack(const Problem& p, std::size_t begin, std::size_t end, void* to) {
  Problem packed = p;
  packed.w = to;
  for (std::size_t n = begin; n < end; n += kWide) {
    char* at = const_cast<char*>(panel(packed, n));
    for (std::size_t k = 0; k < p.k_size; k += kDepth)
      for (std::size_t i = 0; i < kWide; ++i, at += kBytes) {
        const std::size_t left = n + i < p.cols ? p.k_size - k : 0;
        const __mmask32 some = left >= kDepth ? ~__mmask32(0) : (__mmask32(1) << left) - 1;
        const auto* const from = static_cast<const Bf16*>(p.w) + (left ? (n + i) * p.ldw + k : 0);
        _mm512_storeu_si512(at, _mm512_maskz_loadu_epi16(some, from));
      }
  }
}

}  // namespace

}  // namespace lamina::gemm::amx
#pragma GCC pop_options

namespace lamina::gemm {

const Kernel kAmx = {amx::plan, amx::prepare, amx::columns};
const Packing kAmxPanels = {kAmx, amx::packed_bytes, amx::pack};

}  // namespace lamina::gemm
