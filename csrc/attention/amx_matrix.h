// Products by matrix instructions, for tiles.h.
class Matrix {
 public:
  Matrix() = default;
  Matrix(const Matrix&) = delete;
  ~Matrix() { _tile_release(); }

  // As Tiles's.
  void score(const Halves& halves, const float* q, const BFloat16* k, int64_t stride, int low, int high, int64_t dim,
             float* score, float* score2, Ahead& ahead, Ahead& later) {
    set_for({W, W, halves.first, halves.second});
    for (int from = low & -W; from < high;) {
      const BFloat16* const row = k + (from - low) * stride;
      const bool both = from >= low && from + 2 * W <= high;
      const Range range{low - from, high - from};
      const auto f = both            ? halves.second ? scores<true, true> : scores<true, false>
                     : halves.second ? scores<false, true>
                                     : scores<false, false>;
      f(halves, q, row, stride, range, dim, score + from * halves.first, score2 + from * halves.second, ahead, later);
      from += both ? 2 * W : W;
    }
  }

  // Weights of 32 tokens, 16 times pairs of `count` queries, to their places: [count, 32].
  class Weights {
   public:
    Weights(int count, float* to) : count_(count), to_(to) {}
    void put(int i, __m512i pairs) { rows_[i] = pairs; }
    void finish() {
      transpose(rows_);
      for (int g = 0; g < count_; ++g) _mm512_store_si512(to_ + g * W, rows_[g]);
    }

   private:
    int count_;
    float* to_;
    __m512i rows_[W];
  };

  // 32 numbers of each o, times its share.
  void add(const Halves& halves, const float* weight, const float* weight2, const float* shares, const Bits* values,
           int begin, int end, float* o, int64_t stride) {
    set_for({halves.first, halves.second, W, W});
    const auto f = halves.second ? sums<true> : sums<false>;
    f(halves, weight, weight2, values, begin, end, o, stride);
    for (int g = 0; g < halves.first + halves.second; ++g, o += stride) {
      const V share = set(shares[g]);
      store(o, load(o) * share), store(o + W, load(o + W) * share);
    }
  }

 private:
  // The tokens `low .. high` of a tile are there.
  struct Range {
    int low, high;

    bool has(int i) const { return i >= low && i < high; }
    bool whole() const { return low <= 0 && high >= W; }
    void copy(const float* from, int width, float* to) const {
      for (int i = int(max(low, 0)) * width; i < int(min(high, W)) * width; ++i) to[i] = from[i];
    }
  };

  // Rows of the left operands, and columns of the right ones, of what is multiplied: 0 where there is only one.
  struct Shape {
    int rows, rows2, cols, cols2;

    bool operator!=(const Shape& other) const { return __builtin_memcmp(this, &other, sizeof other); }
  };

  struct alignas(64) Config {
    std::uint8_t palette = 1, start = 0, reserved[14] = {};
    std::uint16_t bytes[16] = {};
    std::uint8_t rows[16] = {};
  };

  // Registers:
  // - 0 .. 3: results [rows, cols], [rows, cols2], [rows2, cols], [rows2, cols2]
  // - 4, 5: left operands, with 64 bytes in a row: keys [16 tokens, 32 numbers] or weights [queries, 32 tokens]
  // - 6, 7: right operands, with 16 rows: queries [16 pairs of numbers, queries] or values [16 pairs of tokens, 16]
  void set_for(const Shape& shape) {
    if (!(shape != shape_)) return;
    Config config;
    const auto set = [&](int i, int rows, int width) {
      const bool there = rows && width;
      config.rows[i] = std::uint8_t(there ? rows : 0), config.bytes[i] = std::uint16_t(there ? 4 * width : 0);
    };
    set(0, shape.rows, shape.cols), set(1, shape.rows, shape.cols2);
    set(2, shape.rows2, shape.cols), set(3, shape.rows2, shape.cols2);
    set(4, shape.rows, W), set(5, shape.rows2, W), set(6, W, shape.cols), set(7, W, shape.cols2);
    written(&config);
    _tile_loadconfig(&config);
    shape_ = shape;
  }

  // 16 tokens, or 32 (kTokens) that are all there, by one half of the queries or both (kQueries).
  template <bool kTokens, bool kQueries>
  static void scores(const Halves& halves, const float* q, const BFloat16* row, int64_t stride, const Range& range,
                     int64_t dim, float* to, float* to2, Ahead& ahead, Ahead& later) {
    alignas(64) Bits space[W][kInStep];
    alignas(64) float results[2][W * W];
    const bool whole = kTokens || range.whole();
    const float* q2 = q + dim / 2 * W;
    _tile_zero(0);
    if constexpr (kQueries) {
      _tile_zero(1);
    }
    if constexpr (kTokens) {
      _tile_zero(2);
    }
    if constexpr (kTokens && kQueries) {
      _tile_zero(3);
    }
    for (int64_t d = 0; d < dim; d += kInStep, row += kInStep) {
      const void* at = row;
      int64_t bytes = 2 * stride;
      if (whole)
        touch(row, stride, kTokens ? 2 * W : W, ahead, later);
      else
        copy(row, stride, range, space), at = space, bytes = sizeof space[0];
      _tile_loadd(6, q + d / 2 * halves.first, 4 * halves.first);
      _tile_loadd(4, at, bytes);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (kQueries) {
        _tile_loadd(7, q2 + d / 2 * halves.second, 4 * halves.second);
        _tile_dpbf16ps(1, 4, 7);
      }
      if constexpr (kTokens) {
        _tile_loadd(5, row + W * stride, bytes);
        _tile_dpbf16ps(2, 5, 6);
      }
      if constexpr (kTokens && kQueries) {
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, whole ? to : results[0], 4 * halves.first);
    if constexpr (kQueries) {
      _tile_stored(1, whole ? to2 : results[1], 4 * halves.second);
    }
    if (!whole) {  // other tokens of the tile have scores already
      range.copy(results[0], halves.first, to);
      range.copy(results[1], halves.second, to2);
    }
    if constexpr (kTokens) {
      _tile_stored(2, to + W * halves.first, 4 * halves.first);
    }
    if constexpr (kTokens && kQueries) {
      _tile_stored(3, to2 + W * halves.second, 4 * halves.second);
    }
  }

  // Line by line into L1 before a tile is loaded, whose lines would wait for each other; and on with what comes next.
  static void touch(const BFloat16* row, int64_t stride, int rows, Ahead& ahead, Ahead& later) {
    for (int i = 0; i < rows; ++i, row += stride) {
      ahead.template fetch<64, 3>(), later.template fetch<64>();
      (void)*reinterpret_cast<const volatile Bits*>(row);
    }
  }

  static void copy(const BFloat16* row, int64_t stride, const Range& range, Bits (*to)[kInStep]) {
    for (int i = 0; i < W; ++i)
      _mm512_store_si512(to[i], range.has(i) ? _mm512_loadu_si512(row + i * stride) : _mm512_setzero_si512());
    written(to);
  }

  // 32 numbers of o, by one half of the queries or both.
  template <bool kQueries>
  static void sums(const Halves& halves, const float* weight, const float* weight2, const Bits* values, int begin,
                   int end, float* o, int64_t stride) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kQueries) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int from = begin & -kInStep; from < end; from += kInStep) {
      const Bits* const at = values + value_place(from);
      _tile_loadd(4, weight + from * halves.first, sizeof at[0] * kInStep);
      _tile_loadd(6, at, sizeof at[0] * kInStep);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, at + W * kInStep, sizeof at[0] * kInStep);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (kQueries) {
        _tile_loadd(5, weight2 + from * halves.second, sizeof at[0] * kInStep);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, o, 4 * stride);
    _tile_stored(1, o + W, 4 * stride);
    if constexpr (kQueries) {
      _tile_stored(2, o + W * stride, 4 * stride);
      _tile_stored(3, o + W * stride + W, 4 * stride);
    }
  }

  Shape shape_{};
};
