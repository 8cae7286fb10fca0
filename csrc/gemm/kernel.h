// Rows of x times rows of w as dot products: y[m][n] = sum_k x[m][k] w[n][k]. Included once for each instruction set,
// inside a namespace that defines Vec, as vec512.h does, and kTileRows, the most rows of a tile.
//
// Every output is one chain: its products are added in the same order whatever the tile that it falls into, the number
// of rows and the number of threads. So a row's result depends, bit for bit, on that row alone.

constexpr std::size_t kFewRows = 4;           // up to here each weight is used straight from the load
constexpr std::size_t kSomeRows = 16;         // up to here a widened strip stays in L1
constexpr std::size_t kPanelBytes = 1 << 17;  // of widened weights in L2
constexpr std::size_t kStrip = 3;             // columns of a tile

// Columns done at a time, a multiple of kStrip.
inline std::size_t panel_cols(const Problem& p) {
  if (p.rows <= kFewRows) return 8 * kStrip;
  if (p.rows <= kSomeRows) return kStrip;
  const std::size_t fit = kPanelBytes / (sizeof(float) * p.k_size) / kStrip * kStrip;
  return fit < kStrip ? kStrip : fit > 64 * kStrip ? 64 * kStrip : fit;
}

// x as floats; of scratch, the sums of a panel, and the panel widened.
inline Plan plan(const Problem& p) {
  const std::size_t panel = panel_cols(p);
  return {panel, p.type == Type::kFloat ? 0 : p.rows * p.k_size, panel * (p.rows + p.k_size)};
}

// One tile of kRows rows of x and kCols rows of w; both walk along k, which is contiguous. kAhead: w comes from memory,
// so the strip that follows is fetched meanwhile.
template <int kRows, int kCols, bool kAhead, class W>
void tile(const float* x, std::size_t ldx, const W* w, std::size_t ldw, std::size_t k_size, float* out,
          std::size_t ldo) {
  Vec sums[kRows][kCols];
  for (auto& row : sums)
    for (auto& s : row) s = Vec::zero();
  std::size_t k = 0;
  for (; k + Vec::kWidth <= k_size; k += Vec::kWidth) {
    if (kAhead && k % (64 / sizeof(W)) == 0)
      for (int n = 0; n < kCols; ++n) __builtin_prefetch(w + (kCols + n) * ldw + k);
    Vec wk[kCols];
    for (int n = 0; n < kCols; ++n) wk[n] = Vec::load(w + n * ldw + k);
    for (int m = 0; m < kRows; ++m) {
      const Vec xk = Vec::load(x + m * ldx + k);
      for (int n = 0; n < kCols; ++n) sums[m][n] = Vec::fma(xk, wk[n], sums[m][n]);
    }
  }
  for (int m = 0; m < kRows; ++m)
    for (int n = 0; n < kCols; ++n) {
      float s = Vec::sum(sums[m][n]);
      for (std::size_t t = k; t < k_size; ++t) s = std::fma(x[m * ldx + t], to_float(w[n * ldw + t]), s);
      out[m * ldo + n] = s;
    }
}

// All rows of x against kCols rows of w.
template <int kRows, int kCols, bool kAhead, class W>
void strip(const Problem& p, const W* w, std::size_t ldw, float* out, std::size_t ldo) {
  std::size_t m = 0;
  for (; m + kRows <= p.rows; m += kRows)
    tile<kRows, kCols, kAhead>(p.x + m * p.k_size, p.k_size, w, ldw, p.k_size, out + m * ldo, ldo);
  if constexpr (kRows > 1) {
    Problem rest = p;
    rest.x += m * p.k_size;
    rest.rows -= m;
    strip<kRows == 2 ? 1 : 2, kCols, kAhead>(rest, w, ldw, out + m * ldo, ldo);
  }
}

template <bool kAhead, class W>
void strips(const Problem& p, const W* w, std::size_t ldw, std::size_t cols, float* out, std::size_t ldo) {
  constexpr int kRows = kTileRows, kWide = 2 * kStrip;
  std::size_t n = 0;
  if (p.rows <= 2)  // a narrow strip would have too few sums under way to hide the latency of an addition
    for (; n + kWide <= cols; n += kWide) strip<2, kWide, kAhead>(p, w + n * ldw, ldw, out + n, ldo);
  for (; n + kStrip <= cols; n += kStrip) strip<kRows, kStrip, kAhead>(p, w + n * ldw, ldw, out + n, ldo);
  for (; n < cols; ++n) strip<kRows, 1, kAhead>(p, w + n * ldw, ldw, out + n, ldo);
}

// Many rows: a panel of w stays in the cache as floats while tiles of x pass over it, each read once.
inline void panel_pass(const Problem& p, const float* w, std::size_t ldw, std::size_t cols, float* out,
                       std::size_t ldo) {
  constexpr int kRows = kTileRows;
  for (std::size_t m = 0; m < p.rows; m += kRows) {
    Problem part = p;
    part.x = p.x + m * p.k_size;
    part.rows = std::min<std::size_t>(kRows, p.rows - m);
    strips<false>(part, w, ldw, cols, out + m * ldo, ldo);
  }
}

template <class W>
void widen(const W* from, float* to, std::size_t count) {
  std::size_t i = 0;
  for (; i + Vec::kWidth <= count; i += Vec::kWidth) {
    if (i % (64 / sizeof(W)) == 0) __builtin_prefetch(from + i + 4096);
    Vec::store(to + i, Vec::load(from + i));
  }
  for (; i < count; ++i) to[i] = to_float(from[i]);
}

// Columns [begin, end) of y.
template <class W>
void columns(const Problem& p, std::size_t begin, std::size_t end, float* scratch) {
  const auto* w = static_cast<const W*>(p.w);
  const std::size_t panel = panel_cols(p);
  float* const out = scratch;
  float* const widened = scratch + p.rows * panel;
  for (std::size_t n = begin; n < end; n += panel) {
    const std::size_t cols = std::min(panel, end - n);
    const W* rows = w + n * p.ldw;
    if (p.rows <= kFewRows) {
      strips<true>(p, rows, p.ldw, cols, out, panel);
    } else if constexpr (std::is_same_v<W, float>) {
      panel_pass(p, rows, p.ldw, cols, out, panel);
    } else {
      for (std::size_t c = 0; c < cols; ++c) widen(rows + c * p.ldw, widened + c * p.k_size, p.k_size);
      panel_pass(p, widened, p.k_size, cols, out, panel);
    }
    store(p, out, panel, n, cols);
  }
}

template <class W>
void prepare(const Problem& p, const void* x, std::size_t begin, std::size_t end, float* to) {
  widen(static_cast<const W*>(x) + begin * p.k_size, to + begin * p.k_size, (end - begin) * p.k_size);
}

template <class W>
constexpr Kernel kernel = {plan, prepare<W>, columns<W>};
