// Products of quantized weights and rows of x that become int8 (Form::int8_x). Included once for each instruction set,
// inside a namespace that defines
// - Vec, as vec512.h does: kLanes floats, one a column, of which kVectors are multiplied at once;
// - Ints: sums of kLanes columns in int32, with all(a), and of(ints), which are floats;
// - Codes: four numbers of k of each of kLanes columns, unsigned bytes, with codes(from), low(codes), high(codes), which are
//   the two halves of bytes;
// - dot(sum, codes, x): four products with the int8 of x added to sum;
// - magnitudes(x, most), largest(most): the largest bits of |x| so far, by lane, and of all lanes;
// - rounded(x, scale), total(ints): kLanes numbers of x as int8, in kLanes / 4 dwords, whose sum is added to `sum`;
// - kRows: the most rows of a tile.

constexpr std::size_t kChunk = 128;  // rows whose x stays in L2 for all columns
static_assert(kChunk % kRowsPrepared == 0, "a chunk has whole pieces");

// Tiles of rows [begin, end), as equal as may be: `of` gets the first row and how many there are.
template <class F>
inline void each_tile(std::size_t begin, std::size_t end, F of) {
  for (std::size_t piece = begin; piece < end; piece += kRowsPrepared) {
    const std::size_t rows = std::min(kRowsPrepared, end - piece);
    for (std::size_t m = 0, tiles = (rows + kRows - 1) / kRows; tiles; --tiles) {
      const std::size_t count = (rows - m + tiles - 1) / tiles;
      of(piece + m, count);
      m += count;
    }
  }
}

// x: of each tile [four numbers of k][row], then of each tile [block][row] sums, then [row] scales.
struct Rows {
  explicit Rows(const Problem& p)
      : fours(blocks(*p.form, p.k_size) * p.form->block / 4), sums(p.form->by_channel ? 1 : blocks(*p.form, p.k_size)),
        rows(p.rows) {}

  std::size_t floats() const { return rows * (fours + sums + 1); }
  std::uint32_t* at(float* x, std::size_t row) const { return reinterpret_cast<std::uint32_t*>(x) + row * fours; }
  std::int32_t* sums_at(float* x, std::size_t row) const {
    return reinterpret_cast<std::int32_t*>(x) + rows * fours + row * sums;
  }
  float* scales(float* x) const { return x + rows * (fours + sums); }

  std::size_t fours, sums, rows;  // of a row, and rows
};

// kLanes numbers of x from k on, with zeros after the end.
template <class W>
inline Vec numbers_of(const W* x, std::size_t k, std::size_t k_size) {
  if (k + kLanes <= k_size) return Vec::load(x + k);
  W last[kLanes] = {};
  for (std::size_t i = 0; k + i < k_size; ++i) last[i] = x[k + i];
  return Vec::load(last);
}

// Row `r` of a tile of `count`.
template <class W>
float prepare_row(const Problem& p, const Rows& rows, const W* x, std::size_t r, std::size_t count, std::uint32_t* to,
                  std::int32_t* sums) {
  constexpr std::uint32_t kInfinity = 0x7f800000u;
  const std::size_t own = 4 * rows.fours / rows.sums;  // numbers of k with one sum
  auto most = no_magnitude();
  for (std::size_t k = 0; k < p.k_size; k += kLanes) most = magnitudes(numbers_of(x, k, p.k_size), most);
  const std::uint32_t bits = largest(most);
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  scale = bits < kInfinity ? scale / 127.5f : std::numeric_limits<float>::quiet_NaN();
  const Vec divisor = Vec::all(bits >= kInfinity ? std::numeric_limits<float>::infinity() : scale == 0 ? 1.0f : scale);
  for (std::size_t b = 0; b < rows.sums; ++b) {
    auto sum = Ints::all(0);
    for (std::size_t k = b * own; k < (b + 1) * own; k += kLanes) {
      std::uint32_t fours[kLanes / 4] = {};
      if (k < p.k_size && bits < kInfinity) rounded(numbers_of(x, k, p.k_size), divisor, &sum, fours);
      const std::size_t there = std::min<std::size_t>(kLanes, (b + 1) * own - k) / 4;
      for (std::size_t i = 0; i < there; ++i) to[(k / 4 + i) * count + r] = fours[i];
    }
    sums[b * count + r] = total(sum);
  }
  return scale;
}

template <class W>
void prepare(const Problem& p, const void* from, std::size_t begin, std::size_t end, float* to) {
  const Rows rows(p);
  each_tile(begin, end, [&](std::size_t m, std::size_t count) {
    for (std::size_t r = 0; r < count; ++r)
      rows.scales(to)[m + r] = prepare_row(p, rows, static_cast<const W*>(from) + (m + r) * p.k_size, r, count,
                                           rows.at(to, m), rows.sums_at(to, m));
  });
}

// kLanes scales or offsets from a column on.
inline Vec parameter(const char* from, Type type, std::size_t column) {
  if (type == Type::kFloat) return Vec::load(reinterpret_cast<const float*>(from) + column);
  const void* const at = from + 2 * column;
  return type == Type::kHalf ? Vec::load(static_cast<const Half*>(at)) : Vec::load(static_cast<const Bf16*>(at));
}

// What a tile works on: a panel, x and its sums, y [row][kCols]. Meanwhile `lines` of every 128 bytes are fetched that
// lie `ahead` of codes: the next panel comes from memory while all tiles multiply.
struct Place {
  const char* panel;
  const std::uint32_t* x;
  const std::int32_t* sums;
  float* y;
  std::size_t ahead;
  int lines;
};

// kCount rows and kVectors vectors of columns from `column` on.
template <int kCount, int kBits>
inline void tile(const Form& form, const Layout& layout, const Rows& rows, const Place& at, std::size_t column) {
  constexpr std::size_t kStep = kBits == 8 ? 4 : 8, kSize = 4 * kLanes;  // numbers of k, bytes of a vector of columns
  const std::size_t own = 4 * rows.fours / rows.sums;
  const std::int32_t bias = kBits == 8 ? 128 : -static_cast<std::int32_t>(form.values[0]);
  const char *codes_at = at.panel + layout.codes + column / kLanes * kSize, *parameters = at.panel;
  const std::uint32_t* x = at.x;
  Vec y[kCount][kVectors];
#pragma GCC unroll 16
  for (int m = 0; m < kCount; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) y[m][v] = Vec::zero();
  for (std::size_t b = 0; b < rows.sums; ++b, parameters += layout.parameters) {
    const std::int32_t* const sums = at.sums + b * kCount;
    Ints s[kCount][kVectors];
#pragma GCC unroll 16
    for (int m = 0; m < kCount; ++m)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) s[m][v] = Ints::all(-bias * sums[m]);
    if (at.lines) __builtin_prefetch(parameters + at.ahead, 0, 2);
    if (at.lines > 1) __builtin_prefetch(parameters + at.ahead + 64, 0, 2);
    const char* from = codes_at + b * layout.step;
    for (std::size_t k = 0; k < own; k += kStep, from += kCols * 4, x += kStep / 4 * kCount) {
      if (at.lines) __builtin_prefetch(from + at.ahead, 0, 2);
      if (at.lines > 1) __builtin_prefetch(from + at.ahead + 64, 0, 2);
      Codes w[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) w[v] = codes(from + v * kSize);
      if constexpr (kBits == 8) {
#pragma GCC unroll 16
        for (int m = 0; m < kCount; ++m)
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) s[m][v] = dot(s[m][v], w[v], x[m]);
      } else {
#pragma GCC unroll 16
        for (int m = 0; m < kCount; ++m)
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) s[m][v] = dot(s[m][v], low(w[v]), x[m]);
#pragma GCC unroll 16
        for (int m = 0; m < kCount; ++m)
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) s[m][v] = dot(s[m][v], high(w[v]), x[kCount + m]);
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const Vec scale = parameter(parameters, form.scales, column + v * kLanes);
#pragma GCC unroll 16
      for (int m = 0; m < kCount; ++m) y[m][v] = Vec::fma(scale, Ints::of(s[m][v]), y[m][v]);
      if (form.offsets) {
        const Vec offset = parameter(parameters + layout.values, form.scales, column + v * kLanes);
#pragma GCC unroll 16
        for (int m = 0; m < kCount; ++m) y[m][v] = Vec::fma(offset, Vec::all(static_cast<float>(sums[m])), y[m][v]);
      }
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < kCount; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) Vec::store(at.y + m * kCols + column + v * kLanes, y[m][v]);
}

template <int kBits, int kCount = kRows>
void tile_of(std::size_t count, const Form& form, const Layout& layout, const Rows& rows, const Place& at) {
  if (count == kCount) {
    for (std::size_t column = 0; column < kCols; column += kVectors * kLanes)
      tile<kCount, kBits>(form, layout, rows, at, column);
    return;
  }
  if constexpr (kCount > 1) tile_of<kBits, kCount - 1>(count, form, layout, rows, at);
}

template <class W>
Plan plan(const Problem& p) {
  return {kCols, Rows(p).floats(), kRows * kCols};
}

template <class W>
void columns(const Problem& p, std::size_t begin, std::size_t end, float* scratch) {
  const Form& form = *p.form;
  const Layout layout(form);
  const Rows rows(p);
  float* const x = const_cast<float*>(p.x);
  const std::size_t size = layout.panel(blocks(form, p.k_size));
  const auto by_bits = form.bits == 4 ? tile_of<4> : tile_of<8>;
  const std::size_t ahead = p.rows > 2 || form.bits == 4 ? size : 4096;
  for (std::size_t first = 0, last; first < p.rows; first = last) {
    last = std::min(first + kChunk, p.rows);
    for (std::size_t n = begin; n < end; n += kCols)
      each_tile(first, last, [&](std::size_t m, std::size_t count) {
        const char* const panel = static_cast<const char*>(p.w) + n / kCols * size;
        const bool is_first = m == first, is_last = m + count == last;
        const int lines = is_first && is_last ? 2 : is_first || is_last;
        by_bits(count, form, layout, rows,
                {panel, rows.at(x, m), rows.sums_at(x, m), scratch, ahead + (is_first ? 0 : 64), lines});
        for (std::size_t r = 0; r < count; ++r)
          put(scratch + r * kCols, rows.scales(x)[m + r], static_cast<const W*>(p.b), n, std::min(kCols, end - n),
              static_cast<W*>(p.y) + (m + r) * p.cols + n);
      });
  }
}

template <class W>
constexpr Kernel kernel = {plan<W>, prepare<W>, columns<W>};
