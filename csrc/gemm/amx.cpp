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

constexpr std::size_t kDepth = 32, kBytes = 64;  // of k in a tile
constexpr std::size_t kTile = 16;  // rows of a tile
static_assert(kRowsPrepared % kTile == 0, "tiles are prepared whole");
constexpr std::size_t kWide = 2 * kTile;  // columns of y at once
constexpr std::size_t kInL2 = 5 << 18;  // bytes of x

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

Plan plan(const Problem& p) { return {kWide, p.rows * slices(p) * kTile, 0}; }

// Dwords [16, 16], a row in a register, become [16, 16]^T.
inline void transpose(__m512i (&r)[kTile]) {
  __m512i t[kTile];
  for (std::size_t i = 0; i < kTile; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (std::size_t i = 0; i < kTile; i += 4)
    for (std::size_t j = 0; j < 2; ++j) {
      r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  for (std::size_t j = 0; j < 4; ++j) {  // quarter q of r[i + j] is column 4 q + j of rows i .. i + 3
    const __m512i even = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88), odd = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
    const __m512i even8 = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
    const __m512i odd8 = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
    t[j] = _mm512_shuffle_i32x4(even, even8, 0x88);
    t[4 + j] = _mm512_shuffle_i32x4(odd, odd8, 0x88);
    t[8 + j] = _mm512_shuffle_i32x4(even, even8, 0xdd);
    t[12 + j] = _mm512_shuffle_i32x4(odd, odd8, 0xdd);
  }
  for (std::size_t i = 0; i < kTile; ++i) r[i] = t[i];
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

// Sums [16 columns of y from n on, 16 rows] as `rows` rows of y from `m` on, with the bias.
void store(const Problem& p, const float (*sums)[kTile], std::size_t m, std::size_t rows, std::size_t n) {
  const __mmask16 some = p.cols - n >= kTile ? ~__mmask16(0) : static_cast<__mmask16>((1u << (p.cols - n)) - 1);
  written(sums);
  __m512i r[kTile];
  for (std::size_t i = 0; i < kTile; ++i) r[i] = _mm512_loadu_si512(sums[i]);
  transpose(r);
  __m512 bias = _mm512_setzero_ps();
  if (p.b) {
    const __m256i b = _mm256_maskz_loadu_epi16(some, static_cast<const Bf16*>(p.b) + n);
    bias = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
  }
  for (std::size_t i = 0; i < rows; ++i) {
    const __m512 sum = _mm512_castsi512_ps(r[i]), y = p.b ? _mm512_add_ps(sum, bias) : sum;
    _mm256_mask_storeu_epi16(static_cast<Bf16*>(p.y) + (m + i) * p.cols + n, some, (__m256i)_mm512_cvtneps_pbh(y));
  }
}

// Rows [begin, end) of x and some columns of y. All of these rows meet some columns before the next ones, at most
// 2 * kTile at once. All of them fetch their part of what comes next.
void block(const Problem& p, std::size_t begin, std::size_t end, std::size_t from, std::size_t to) {
  float sums[2][2][kTile][kTile];
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
      for (std::size_t i = 0; i < 2 && n + i * kTile < to; ++i) {
        store(p, sums[i][0], first, left, n + i * kTile);
        if (right) store(p, sums[i][1], first + kTile, right, n + i * kTile);
      }
    }
  }
}

// As many rows of x as stay in L2 meet all columns before the next ones: up to some hundred, w comes from memory once.
void columns(const Problem& p, std::size_t begin, std::size_t end, float*) {
  written(p.x);
  const std::size_t kept = std::max<std::size_t>(1, kInL2 / (2 * kTile * slices(p) * kBytes)) * 2 * kTile;
  for (std::size_t first = 0; first < p.rows; first += kept)
    block(p, first, std::min(first + kept, p.rows), begin, end);
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
