#include "gemm/avx2_panels.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace lamina::gemm::avx2::panels {
namespace {

constexpr std::size_t kChains = kLanes, kVectors = kCols / kLanes;
constexpr std::size_t kTile = 4;     // rows whose sums are in registers: 4 x 3, with 3 vectors of w and one of x
constexpr std::size_t kBlock = 512;  // rows whose sums of chains wait, 48 KiB
static_assert(kRowsPrepared % kTile == 0, "only the last tiles that prepare() makes have fewer rows");

// Tiles of up to kRowsPrepared rows, as equal as may be: `of` gets the first row and how many they are.
template <class F>
inline void each_tile(std::size_t rows, F of) {
  for (std::size_t m = 0, tiles = (rows + kTile - 1) / kTile; tiles; --tiles) {
    const std::size_t count = (rows - m + tiles - 1) / tiles;
    of(m, count);
    m += count;
  }
}

// `count` links of eight rows, [chain][link] with kCols pairs from one link to the next and `stride` to the next chain.
// Meanwhile it prefetches the numbers `behind` further on.
[[gnu::noinline]] void turn(const std::uint16_t* from, std::size_t ld, std::size_t count, std::size_t behind,
                            std::uint32_t* to, std::size_t stride) {
  const auto half = [](const std::uint16_t* at) { return reinterpret_cast<const float*>(at); };
  for (std::size_t t = 0; t < count; ++t, from += kLink, to += kCols) {
    const std::uint16_t* const low = from + 4 * ld;
    if (t % 2 == 0)
      for (const std::uint16_t* row : {from, low})
#pragma GCC unroll 4
        for (std::size_t r = 0; r < 4; ++r) __builtin_prefetch(row + r * ld + behind, 0, 2);
#pragma GCC unroll 2
    for (std::size_t c = 0; c < kChains; c += 4) {
      __m256 rows[4], chains[4];
#pragma GCC unroll 4
      for (std::size_t r = 0; r < 4; ++r) {
        const __m128 upper = _mm_loadu_ps(half(from + r * ld + 2 * c)),
                     lower = _mm_loadu_ps(half(low + r * ld + 2 * c));
        rows[r] = _mm256_insertf128_ps(_mm256_castps128_ps256(upper), lower, 1);
      }
      transpose(rows, chains);
      float* const at = reinterpret_cast<float*>(to + c * stride);
#pragma GCC unroll 4
      for (std::size_t i = 0; i < 4; ++i) _mm256_storeu_ps(at + i * stride, chains[i]);
    }
  }
}

// Links [begin, end) of eight rows, of which there are `cols`, one by one; 0 where there is no column, or number:
// a row has k_left.
void copy(const std::uint16_t* from, std::size_t ld, std::size_t k_left, std::size_t cols, std::size_t begin,
          std::size_t end, std::uint32_t* to, std::size_t stride) {
  for (std::size_t k = begin * kLink; k < end * kLink; ++k)
    for (std::size_t i = 0; i < kLanes; ++i) {
      std::uint32_t& pair = to[k % kLink / 2 * stride + k / kLink * kCols + i];
      const std::uint32_t number = i < cols && k < k_left ? from[i * ld + k] : 0;
      pair = k % 2 ? pair | number << 16 : number;
    }
}

// Links [begin, begin + count) of a block, [chain][link][column]. Some links of all columns go before the next ones, so
// that lines of w and of the panel are whole while they are in L1.
void pack_block(const Problem& p, std::size_t n, std::size_t begin, std::size_t count, std::uint32_t* to) {
  constexpr std::size_t kSome = 4;
  const std::size_t stride = count * kCols, whole = std::min(begin + count, p.k_size / kLink) - begin;
  for (std::size_t t = 0; t < count; t += kSome)
    for (std::size_t first = 0; first < kCols; first += kLanes) {
      const auto* const from = static_cast<const std::uint16_t*>(p.w) + (n + first) * p.ldw + (begin + t) * kLink;
      std::uint32_t* const at = to + t * kCols + first;
      const std::size_t some = std::min(kSome, count - t),
                        cols = std::min(kLanes, p.cols - std::min(p.cols, n + first));
      const std::size_t turned = cols < kLanes ? 0 : std::min(some, whole - std::min(whole, t));
      turn(from, p.ldw, turned, kCols * p.ldw, at, stride);
      if (turned < some) copy(from, p.ldw, p.k_size - (begin + t) * kLink, cols, turned, some, at, stride);
    }
}

// One number of k of kRows rows and a panel. Sums, w and x fill the registers, so the mask is in memory, and a row is
// one statement: GCC would keep two rows' x at a time.
constexpr std::uint32_t kHigh = 0xffff0000u;
alignas(32) constexpr std::uint32_t kUpper[] = {kHigh, kHigh, kHigh, kHigh, kHigh, kHigh, kHigh, kHigh};

template <std::size_t kRows, bool kOdd>
[[gnu::always_inline]] inline void step(const float* x, const std::uint32_t* w, __m256 (&s)[kRows][kVectors]) {
  __m256 v[kVectors];
#pragma GCC unroll 3
  for (std::size_t j = 0; j < kVectors; ++j) {
    v[j] = _mm256_loadu_ps(reinterpret_cast<const float*>(w + j * kLanes));
    if constexpr (kOdd)
      asm volatile("vandps %1, %0, %0" : "+x"(v[j]) : "m"(kUpper));
    else
      asm volatile("vpslld $16, %0, %0" : "+x"(v[j]));
  }
#pragma GCC unroll 4
  for (std::size_t m = 0; m < kRows; ++m) {
    __m256 row;
    asm volatile("vbroadcastss %4, %3\n\tvfmadd231ps %5, %3, %0\n\tvfmadd231ps %6, %3, %1\n\tvfmadd231ps %7, %3, %2"
                 : "+x"(s[m][0]), "+x"(s[m][1]), "+x"(s[m][2]), "=&x"(row)
                 : "m"(x[m]), "x"(v[0]), "x"(v[1]), "x"(v[2]));
  }
}

// One chain of kRows rows and a panel, to `sums`. Meanwhile `lines` of the memory `ahead` are fetched, no nearer than L2.
template <std::size_t kRows>
void chain(const float* x, const std::uint32_t* w, std::size_t count, const char* ahead, std::size_t lines,
           float* sums) {
  __m256 s[kRows][kVectors];
#pragma GCC unroll 4
  for (std::size_t m = 0; m < kRows; ++m)
#pragma GCC unroll 3
    for (std::size_t j = 0; j < kVectors; ++j) s[m][j] = _mm256_setzero_ps();
  for (std::size_t t = 0; t < count; ++t, x += 2 * kRows, w += kCols) {
    if (2 * t < lines) {
      __builtin_prefetch(ahead + 128 * t, 0, 2);
      __builtin_prefetch(ahead + 128 * t + 64, 0, 2);
    }
    step<kRows, false>(x, w, s);
    step<kRows, true>(x + kRows, w, s);
  }
#pragma GCC unroll 4
  for (std::size_t m = 0; m < kRows; ++m)
#pragma GCC unroll 3
    for (std::size_t j = 0; j < kVectors; ++j) _mm256_store_ps(sums + m * kCols + j * kLanes, s[m][j]);
}

constexpr decltype(&chain<1>) kTiles[kTile + 1] = {nullptr, chain<1>, chain<2>, chain<3>, chain<4>};

// Eight columns of y from n on, or what there is of them.
inline void store(const Problem& p, __m256 sum, std::size_t row, std::size_t n) {
  const std::size_t count = std::min(kLanes, p.cols - n);
  Bf16* const y = static_cast<Bf16*>(p.y) + row * p.cols + n;
  if (p.b) {
    Bf16 bias[kLanes] = {};
    std::memcpy(bias, static_cast<const Bf16*>(p.b) + n, count * sizeof *bias);
    sum = _mm256_add_ps(sum, evens(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bias)))));
  }
  const __m128i result = rounded(sum);
  if (count == kLanes)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(y), result);
  else
    std::memcpy(y, &result, count * sizeof *y);
}

// Sums of a chain to those that wait, or with them to y. first, last: of all chains.
inline void add(const Problem& p, const float* sums, std::size_t row, std::size_t rows, std::size_t n, float* waiting,
                bool first, bool last) {
  for (std::size_t m = 0; m < rows; ++m)
    for (std::size_t j = 0; j < kCols && n + j < p.cols; j += kLanes) {
      float* const at = waiting + m * kCols + j;
      __m256 sum = _mm256_load_ps(sums + m * kCols + j);
      if (!first) sum = _mm256_add_ps(_mm256_loadu_ps(at), sum);
      if (last)
        store(p, sum, row + m, n + j);
      else
        _mm256_storeu_ps(at, sum);
    }
}

// Rows [first, first + rows) and links [begin, begin + count), all chains. Of each, w comes from memory once, and every
// tile fetches its part of the next one where `fetched`.
void block(const Problem& p, std::size_t first, std::size_t rows, std::size_t n, std::size_t begin, std::size_t count,
           const std::uint32_t* w, bool fetched, float* waiting) {
  alignas(32) float sums[kTile * kCols];
  const std::size_t all = links(p.k_size), tiles = (rows + kTile - 1) / kTile;
  const std::size_t lines = fetched ? (count * kCols / 16 + tiles) / tiles : 0;
  for (std::size_t c = 0; c < kChains; ++c, w += count * kCols) {
    const char* ahead = reinterpret_cast<const char*>(w + count * kCols);
    for (std::size_t m = 0; m < rows; m += kRowsPrepared)
      each_tile(std::min(kRowsPrepared, rows - m), [&](std::size_t inside, std::size_t size) {
        const std::size_t row = first + m + inside;
        const float* const x = p.x + (row * kChains * all + (begin * kChains + c * count) * size) * 2;
        kTiles[size](x, w, count, ahead, lines, sums);
        add(p, sums, row, size, n, waiting + (m + inside) * kCols, begin + c == 0,
            begin + count == all && c + 1 == kChains);
        ahead += lines * 64;
      });
  }
}

// Eight pairs of each of kTile rows, a link of each chain, `stride` floats from one to the next.
inline void spread(const Bf16* x, std::size_t ld, float* to, std::size_t stride) {
  for (std::size_t odd = 0; odd < 2; ++odd) {
    __m256 rows[kTile], chains[kTile];
    for (std::size_t m = 0; m < kTile; ++m) {
      const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + m * ld));
      rows[m] = odd ? odds(pairs) : evens(pairs);
    }
    transpose(rows, chains);
    for (std::size_t c = 0; c < 4; ++c) {
      _mm_storeu_ps(to + c * stride + odd * kTile, _mm256_castps256_ps128(chains[c]));
      _mm_storeu_ps(to + (c + 4) * stride + odd * kTile, _mm256_extractf128_ps(chains[c], 1));
    }
  }
}

}  // namespace

std::size_t bytes(std::size_t k_size) { return kCols * links(k_size) * kLink * sizeof(Bf16); }

void pack(const Problem& p, std::size_t n, void* to) {
  each_block(p.k_size, [&](std::size_t begin, std::size_t count) {
    pack_block(p, n, begin, count, static_cast<std::uint32_t*>(to) + begin * kChains * kCols);
  });
}

// x: of each tile of rows, [block of k][chain][link][even, odd][row] floats.
Plan plan(const Problem& p) {
  const std::size_t part = p.packed ? 0 : std::min(links(p.k_size) * kLink, kDepth) / 2 * kCols;
  return {kCols, p.rows * links(p.k_size) * kLink, std::min(p.rows, kBlock) * kCols + part};
}

void prepare(const Problem& p, const void* from, std::size_t begin, std::size_t end, float* to) {
  each_tile(end - begin, [&](std::size_t m, std::size_t size) {
    const Bf16* const x = static_cast<const Bf16*>(from) + (begin + m) * p.k_size;
    float* const tile = to + (begin + m) * links(p.k_size) * kLink;
    each_block(p.k_size, [&](std::size_t first, std::size_t count) {
      const std::size_t stride = count * 2 * size;
      for (std::size_t t = 0; t < count; ++t) {
        const std::size_t k = (first + t) * kLink;
        float* const at = tile + (first * kChains + t) * 2 * size;
        if (size == kTile && k + kLink <= p.k_size) {
          spread(x + k, p.k_size, at, stride);
          continue;
        }
        for (std::size_t i = 0; i < kLink; ++i)
          for (std::size_t r = 0; r < size; ++r)
            at[i / 2 * stride + i % 2 * size + r] = k + i < p.k_size ? to_float(x[r * p.k_size + k + i]) : 0.0f;
      }
    });
  });
}

void multiply(const Problem& p, std::size_t n, const void* w, float* scratch) {
  auto* const room = reinterpret_cast<std::uint32_t*>(scratch + std::min(p.rows, kBlock) * kCols);
  for (std::size_t first = 0; first < p.rows; first += kBlock)
    each_block(p.k_size, [&](std::size_t begin, std::size_t count) {
      if (!w) pack_block(p, n, begin, count, room);
      const auto* const part = w ? static_cast<const std::uint32_t*>(w) + begin * kChains * kCols : room;
      block(p, first, std::min(kBlock, p.rows - first), n, begin, count, part, w != nullptr, scratch);
    });
}

}  // namespace lamina::gemm::avx2::panels
#pragma GCC pop_options
