// Products by quantized weights. Included once for each instruction set, inside a namespace that defines
// - Vec, as vec512.h does: kLanes floats, one a column, of which kVectors are multiplied at once;
// - X: a pair of numbers of a row of x;
// - Pairs: a pair of numbers of each of kLanes columns of w;
// - link(sum, x, pairs): x and pairs multiplied, the odd numbers first, and added to sum;
// - nibbles(from): 4-bit codes of kLanes columns;
// - table_of(values), pairs_of(nibbles, number, table): one of the four Pairs of these codes;
// - bytes(from): the Pairs of 8-bit codes of kLanes columns;
// - spread, put: rows of x to X, and sums to y;
// - kRows: the most rows of a tile, a power of two;
// - kSums: the vectors of sums that registers hold;
// - kDirect4, kDirect8: the rows up to which codes of 4 and of 8 bits are not unpacked first.

constexpr std::size_t kChunk = 128;  // rows whose sums wait in L1 while a block is used
static_assert(kChunk % kRowsPrepared == 0 && kRowsPrepared % kRows == 0, "a chunk has whole tiles");

// Rows of x in memory for a tile of `count`: the next power of two.
constexpr std::size_t places(std::size_t count) { return count > 4 ? 8 : count > 2 ? 4 : count; }

// Tiles of rows [begin, end), which prepare() made: `of` gets the first row, its place and how many there are.
template <class F>
inline void each_tile(std::size_t begin, std::size_t end, F of) {
  for (std::size_t piece = begin; piece < end; piece += kRowsPrepared) {
    const std::size_t rows = std::min(kRowsPrepared, end - piece);
    for (std::size_t m = 0, place = piece, tiles = (rows + kRows - 1) / kRows; tiles; --tiles) {
      const std::size_t count = (rows - m + tiles - 1) / tiles;
      of(piece + m, place, count);
      m += count, place += places(count);
    }
  }
}

// x: of each tile [block][pair][row] X, then of each tile [block][row] sums, if there are offsets.
struct Rows {
  explicit Rows(const Problem& p)
      : pairs(blocks(*p.form, p.k_size) * p.form->block / 2), sums(p.form->offsets ? blocks(*p.form, p.k_size) : 0),
        places(p.rows == 1 ? 1 : (p.rows + kRowsPrepared - 1) / kRowsPrepared * kRowsPrepared) {}

  std::size_t floats() const { return places * (pairs * sizeof(X) / sizeof(float) + sums); }
  X* at(float* x, std::size_t place) const { return reinterpret_cast<X*>(x) + place * pairs; }
  float* sums_at(float* x, std::size_t place) const {
    return x + places * pairs * sizeof(X) / sizeof(float) + place * sums;
  }

  std::size_t pairs, sums, places;  // of a row, and rows
};

// Sum of a block of a row; lane i has numbers i, i + 8, ...
template <class W>
inline float sum_of(const W* x, std::size_t count) {
  float lanes[8] = {};
  for (std::size_t k = 0; k < count; ++k) lanes[k % 8] += to_float(x[k]);
  for (std::size_t width = 4; width; width /= 2)
    for (std::size_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

template <class W>
void prepare(const Problem& p, const void* from, std::size_t begin, std::size_t end, float* to) {
  const Rows rows(p);
  const std::size_t block = p.form->block, all = blocks(*p.form, p.k_size);
  each_tile(begin, end, [&](std::size_t m, std::size_t place, std::size_t count) {
    const W* const x = static_cast<const W*>(from) + m * p.k_size;
    spread(x, p.k_size, count, places(count), rows.pairs, rows.at(to, place));
    if (rows.sums)
      for (std::size_t b = 0; b < all; ++b)
        for (std::size_t r = 0; r < count; ++r)
          rows.sums_at(to, place)[b * places(count) + r] =
              sum_of(x + r * p.k_size + b * block, std::min(block, p.k_size - b * block));
  });
}

// Codes of 4 bits, of 8, or Pairs that were made of them: kStep numbers of k at a time.
struct FourBits {
  static constexpr std::size_t kStep = kCodesTogether, kSize = 4 * kLanes, kDirect = kDirect4;
  using Codes = Nibbles;
  static Codes load(const char* at) { return nibbles(at); }
  static Pairs pairs(Codes codes, int number, const Table& table) { return pairs_of(codes, number, table); }
};
struct EightBits {
  static constexpr std::size_t kStep = 2, kSize = 2 * kLanes, kDirect = kDirect8;
  using Codes = Pairs;
  static Codes load(const char* at) { return bytes(at); }
  static Pairs pairs(Codes codes, int, const Table&) { return codes; }
};
struct Unpacked {
  static constexpr std::size_t kStep = 8, kSize = kStep / 2 * sizeof(Pairs);
  using Codes = const Pairs*;
  static Codes load(const char* at) { return reinterpret_cast<const Pairs*>(at); }
  static Pairs pairs(Codes codes, int number, const Table&) { return codes[number]; }
};

// What a tile works on.
struct Place {
  const char *codes, *parameters;  // of its first block
  const char* ahead;               // codes that are fetched meanwhile, or null
  const X* x;
  std::size_t next;  // x of the next tile lies so far ahead; 0: there is none
  const float* sums;  // of x
  float* y;  // [row][kCols]
};

// kLanes scales or offsets from a column on.
inline Vec parameter(const char* from, Type type, std::size_t column) {
  if (type == Type::kFloat) return Vec::load(reinterpret_cast<const float*>(from) + column);
  const void* const at = from + 2 * column;
  return type == Type::kHalf ? Vec::load(static_cast<const Half*>(at)) : Vec::load(static_cast<const Bf16*>(at));
}

constexpr std::size_t kAhead = 4096;  // bytes of codes that are fetched ahead, for each block under way

// kBlocks blocks, whose sums are under way together, of kRows rows and kVectors vectors of columns.
template <int kRows, int kBlocks, class Source>
inline void tile(const Form& form, const Layout& layout, const Table& table, Place at, std::size_t step,
                 std::size_t column) {
  constexpr std::size_t kPlaces = places(kRows);
  constexpr std::size_t kStepSize = kCols / kLanes * Source::kSize;  // of all columns
  const std::size_t x_step = form.block / 2 * kPlaces;
  const char* codes = at.codes + column / kLanes * Source::kSize;
  const char* ahead = at.ahead;
  const X* x = at.x;
  Vec s[kBlocks][kRows][kVectors];
#pragma GCC unroll 4
  for (int b = 0; b < kBlocks; ++b)
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) s[b][m][v] = Vec::zero();
  for (std::size_t k = 0; k < form.block; k += Source::kStep, codes += kStepSize, x += Source::kStep / 2 * kPlaces) {
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      if (at.next)
#pragma GCC unroll 4
        for (std::size_t i = 0; i < Source::kStep / 2 * kPlaces * sizeof(X); i += 64)
          __builtin_prefetch(reinterpret_cast<const char*>(x + at.next) + i);
      if (ahead)
#pragma GCC unroll 4
        for (std::size_t i = 0; i < kStepSize; i += 64, ahead += 64) __builtin_prefetch(ahead, 0, 2);
      typename Source::Codes c[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) c[v] = Source::load(codes + b * step + v * Source::kSize);
#pragma GCC unroll 4
      for (int pair = 0; pair < int(Source::kStep / 2); ++pair) {
        Pairs w[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) w[v] = Source::pairs(c[v], pair, table);
#pragma GCC unroll 8
        for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) s[b][m][v] = link(s[b][m][v], x[b * x_step + pair * kPlaces + m], w[v]);
      }
    }
  }
  // Parameters lie between codes of blocks.
  if (ahead)
    for (const char* const end = at.ahead + kBlocks * step; ahead < end; ahead += 64) __builtin_prefetch(ahead, 0, 2);
  const bool offsets = form.offsets;
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    Vec scale[kBlocks], offset[kBlocks];
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      const char* const parameters = at.parameters + b * layout.parameters;
      scale[b] = parameter(parameters, form.scales, column + v * kLanes);
      offset[b] = offsets ? parameter(parameters + layout.values, form.scales, column + v * kLanes) : Vec::zero();
    }
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      float* const y = at.y + m * kCols + column + v * kLanes;
      Vec sum = Vec::load(y);
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) {
        sum = Vec::fma(scale[b], s[b][m][v], sum);
        if (offsets) sum = Vec::fma(offset[b], Vec::all(at.sums[b * kPlaces + m]), sum);
      }
      Vec::store(y, sum);
    }
  }
}

template <int kCount, int kBlocks, class Source>
void tiles(const Form& form, const Layout& layout, const Table& table, Place at, std::size_t step) {
  for (std::size_t column = 0; column < kCols; column += kVectors * kLanes)
    tile<kCount, kBlocks, Source>(form, layout, table, at, step, column);
}

template <int kBlocks, class Source, int kCount = kRows>
void tile_of(std::size_t rows, const Form& form, const Layout& layout, const Table& table, const Place& at,
             std::size_t step) {
  if constexpr (kBlocks == 1 || kBlocks * kCount * kVectors <= kSums)
    if (rows == kCount) return tiles<kCount, kBlocks, Source>(form, layout, table, at, step);
  if constexpr (kCount > 1) tile_of<kBlocks, Source, kCount - 1>(rows, form, layout, table, at, step);
}

// Of a pair of k and a vector of columns among those that Unpacked reads: [some pairs][vector][pair].
inline std::size_t unpacked_index(std::size_t pair, std::size_t vector) {
  constexpr std::size_t kTogether = Unpacked::kStep / 2;
  return (pair / kTogether * (kCols / kLanes) + vector) * kTogether + pair % kTogether;
}

// A block's codes to Pairs. Meanwhile the next one's are fetched.
template <class Source>
void unpack(const Form& form, const Layout& layout, const Table& table, const char* codes, Pairs* to) {
  for (std::size_t k = 0; k < form.block; k += Source::kStep)
    for (std::size_t v = 0; v < kCols / kLanes; ++v, codes += Source::kSize) {
      const auto c = Source::load(codes);
      __builtin_prefetch(codes + layout.step, 0, 2);
#pragma GCC unroll 4
      for (int pair = 0; pair < int(Source::kStep / 2); ++pair)
        to[unpacked_index(k / 2 + pair, v)] = Source::pairs(c, pair, table);
    }
}

// Blocks whose sums are under way together: a sum of a block waits for the one before it.
inline std::size_t blocks_together(std::size_t rows) {
  std::size_t count = 4;
  while (count > 1 && count * rows * kVectors > kSums) count /= 2;
  return count;
}

// Rows [begin, end), at most kChunk, of a panel's columns, to y [row][kCols].
template <class Source>
void multiply(const Problem& p, std::size_t begin, std::size_t end, const char* panel, const Table& table, float* y,
              Pairs* unpacked) {
  const Form& form = *p.form;
  const Layout layout(form);
  const Rows rows(p);
  float* const x = const_cast<float*>(p.x);
  const std::size_t all = blocks(form, p.k_size), together = blocks_together(p.rows);
  std::fill(y, y + (end - begin) * kCols, 0.0f);
  for (std::size_t b = 0, count = 1; b < all; b += count) {
    for (count = together; count > all - b;) count /= 2;
    const char* const codes = panel + layout.codes + b * layout.step;
    if (p.rows > Source::kDirect) unpack<Source>(form, layout, table, codes, unpacked);
    each_tile(begin, end, [&](std::size_t m, std::size_t place, std::size_t size) {
      const X* const pairs = rows.at(x, place) + b * form.block / 2 * places(size);
      const float* const sums = rows.sums_at(x, place) + b * places(size);
      Place at{codes,
               panel + b * layout.parameters,
               m == begin ? codes + together * kAhead : nullptr,
               pairs,
               end - begin > kRows ? rows.pairs * places(size) : 0,
               sums,
               y + (m - begin) * kCols};
      if (p.rows > Source::kDirect) {
        at.codes = reinterpret_cast<const char*>(unpacked), at.ahead = nullptr;
        tile_of<1, Unpacked>(size, form, layout, table, at, 0);
      } else if (count == 4) {
        tile_of<4, Source>(size, form, layout, table, at, layout.step);
      } else if (count == 2) {
        tile_of<2, Source>(size, form, layout, table, at, layout.step);
      } else {
        tile_of<1, Source>(size, form, layout, table, at, layout.step);
      }
    });
  }
}

// Scratch: y of a chunk, then a block's Pairs at a multiple of kLine bytes.
constexpr std::size_t kLine = 64;
inline std::size_t waiting(const Problem& p) { return std::min(p.rows, kChunk) * kCols; }
inline Pairs* unpacked_at(const Problem& p, float* scratch) {
  const auto at = reinterpret_cast<std::uintptr_t>(scratch + waiting(p));
  return reinterpret_cast<Pairs*>((at + kLine - 1) / kLine * kLine);
}

template <class W>
Plan plan(const Problem& p) {
  const bool direct = p.rows <= (p.form->bits == 4 ? kDirect4 : kDirect8);
  const std::size_t unpacked = direct ? 0 : kLine + p.form->block / 2 * (kCols / kLanes) * sizeof(Pairs);
  const Rows rows(p);
  const bool as_it_lies = std::is_same_v<X, PairOf<W>> && p.rows == 1 && !rows.sums && 2 * rows.pairs == p.k_size;
  return {kCols, as_it_lies ? 0 : rows.floats(), waiting(p) + unpacked / sizeof(float)};
}

template <class W>
void columns(const Problem& p, std::size_t begin, std::size_t end, float* scratch) {
  const Layout layout(*p.form);
  const std::size_t size = layout.panel(blocks(*p.form, p.k_size));
  const Table table = table_of(p.form->values);
  const auto by_bits = p.form->bits == 4 ? multiply<FourBits> : multiply<EightBits>;
  for (std::size_t m = 0; m < p.rows; m += kChunk)  // their x stays in L2 for all columns
    for (std::size_t n = begin; n < end; n += kCols) {
      const std::size_t last = std::min(m + kChunk, p.rows), count = std::min(kCols, end - n);
      by_bits(p, m, last, static_cast<const char*>(p.w) + n / kCols * size, table, scratch, unpacked_at(p, scratch));
      for (std::size_t row = m; row < last; ++row)
        put(scratch + (row - m) * kCols, static_cast<const W*>(p.b), n, count, static_cast<W*>(p.y) + row * p.cols + n);
    }
}

template <class W>
constexpr Kernel kernel = {plan<W>, prepare<W>, columns<W>};
