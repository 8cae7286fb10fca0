// The loops over keys and values of bf16 by matrix instructions; see Vectors. Included after loops.h, in the same
// namespace.
//
// Scores lie token by token, a query in a lane. So what is done to them needs no sums over lanes. A head's values of a
// chunk are laid out once for all queries, and each sum o [queries, 16 numbers] stays in its register for the chunk.
// Weights are those of avx512/pairs.h: powers of two whose rounding to bf16 does not depend on other tokens.
//
// Values are multiplied 32 tokens at a time, counted from the chunk's first one; missing ones have the weight 0. So a
// query gets one chain of operations over its own tokens here, too.
class Tiles {
 public:
  static constexpr int kMost = 2 * W, kStep = 2 * W;  // kStep: numbers of a row, or tokens, in a tile
  static constexpr float kUnit = 1.44269504f;
  static constexpr bool kLate = true, kByHead = true;

  // Fewer queries than make two blocks of vectors are not worth it while keys come from memory: loads of tiles wait for
  // their lines. All rows of the sequence in the step count, not those of a task, so that bits do not depend on tasks.
  static bool fits(const Operator& op, int64_t rows) {
    return rows * op.group() > Vectors<BFloat16, BFloat16>::kMost && op.qk_dim % kStep == 0 && op.v_dim % kStep == 0;
  }
  static int64_t width(int64_t dim) { return dim / 2; }  // two numbers in a place

  Tiles() = default;
  Tiles(const Tiles&) = delete;
  ~Tiles() { _tile_release(); }

  // Writes pairs of numbers as [dim / 2, queries]: first those of up to 16 queries, then those of the rest.
  static void load(const BFloat16* const* from, int count, int64_t dim, float* to) {
    for (int begin = 0; begin < count; begin += W)
      for (int64_t d = 0; d < dim; d += 2)
        for (int g = begin; g < count && g < begin + W; ++g) __builtin_memcpy(to++, from[g] + d, sizeof *to);
  }

  // Writes the scores of tokens `low .. high` as [kChunk, queries]. Those of the queries after the 16th begin `W * kScores`
  // floats further.
  void score(int count, const float* q, const BFloat16* k, int64_t stride, int low, int high, int64_t dim, float* score,
             Ahead ahead) {
    const Halves halves(count);
    set_for({W, W, halves.first, halves.second});
    for (int from = low & -W; from < high;) {
      const BFloat16* const row = k + (from - low) * stride;
      const bool both = from >= low && from + 2 * W <= high;
      const Range range{low - from, high - from};
      const auto f = both            ? halves.second ? scores<true, true> : scores<true, false>
                     : halves.second ? scores<false, true>
                                     : scores<false, false>;
      f(halves, q, row, stride, range, dim, score + from * halves.first, score + W * kScores + from * halves.second,
        ahead);
      from += both ? 2 * W : W;
    }
  }

  // The chunk's values at `low .. high`, whose rows begin at v, to their places. These are tiles [dim / 32, 4, 2] of 16
  // pairs of tokens by 16 numbers. A tile has numbers of even index, the one after it those of odd index.
  static void lay_out(const BFloat16* v, int64_t stride, int low, int high, int64_t dim, float* to, Ahead ahead) {
    for (int t = low; t < high;) {
      const bool two = t % 2 == 0 && t + 2 <= high;
      Bits* at = reinterpret_cast<Bits*>(to) + place(t);
      for (int64_t d = 0; d < dim; d += kStep, at += kValues) {
        const __m512i x = _mm512_loadu_si512(v + d);
        if (two)
          put_pair(x, _mm512_loadu_si512(v + stride + d), at);
        else
          put_one(x, t % 2, at);
        ahead.template fetch<64>();
        if (two) ahead.template fetch<64>();
      }
      t += two ? 2 : 1, v += two ? 2 * stride : stride;
    }
  }

  // Zeros to the places of values that share a tile with `begin .. end` and are none of them.
  static void clear(int begin, int end, int64_t dim, float* to) {
    const auto zero = [&](int token) {
      Bits* at = reinterpret_cast<Bits*>(to) + place(token & -kStep);
      for (int64_t d = 0; d < dim; d += kStep, at += kValues) __builtin_memset(at, 0, 2 * sizeof(Bits) * kStep * W);
    };
    if (begin % kStep) zero(begin);
    if (end % kStep) zero(end);
  }

  // Scores, as `score` left them, at `begin .. end` to weights in their places: of each 32 tokens [queries, 32] in bf16.
  static void weights(const Operator& op, int count, const View* views, int begin, int end, float* score, float* lse,
                      float* totals) {
    const Halves halves(count);
    weigh(op, halves.first, views, begin, end, score, lse, totals);
    if (halves.second) weigh(op, halves.second, views + W, begin, end, score + W * kScores, lse + W, totals + W);
  }

  // o [count, stride_o] = weights at `begin .. end` . values, as `weights` and `lay_out` left them.
  void add(int count, const float* weight, const float* values, int begin, int end, int64_t dim, float* o,
           int64_t stride_o) {
    const Halves halves(count);
    written(weight), written(values);
    set_for({halves.first, halves.second, W, W});
    const auto f = halves.second ? sums<true> : sums<false>;
    const Bits* at = reinterpret_cast<const Bits*>(values);
    for (int64_t d = 0; d < dim; d += kStep, at += kValues) f(halves, weight, at, begin, end, o + d, stride_o);
  }

 private:
  static constexpr int64_t kValues = kChunk * kStep;  // numbers of a chunk, 32 of each row

  // A block's queries: up to 16, and the rest.
  struct Halves {
    int first, second;

    explicit Halves(int count) : first(count < W ? count : W), second(count - first) {}
  };

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

  static int64_t place(int token) { return (token / kStep * 2 * W + token % kStep / 2) * kStep; }

  // 16 tokens, or 32 (kTokens) that are all there, by one half of the queries or both (kQueries).
  template <bool kTokens, bool kQueries>
  static void scores(const Halves& halves, const float* q, const BFloat16* row, int64_t stride, const Range& range,
                     int64_t dim, float* to, float* to2, Ahead& ahead) {
    alignas(64) Bits space[W][kStep];
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
    for (int64_t d = 0; d < dim; d += kStep, row += kStep) {
      const void* at = row;
      int64_t bytes = 2 * stride;
      if (whole)
        touch(row, stride, kTokens ? 2 * W : W, ahead);
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
  static void touch(const BFloat16* row, int64_t stride, int rows, Ahead& ahead) {
    for (int i = 0; i < rows; ++i, row += stride) {
      ahead.template fetch<64>();
      (void)*reinterpret_cast<const volatile Bits*>(row);
    }
  }

  static void copy(const BFloat16* row, int64_t stride, const Range& range, Bits (*to)[kStep]) {
    for (int i = 0; i < W; ++i)
      _mm512_store_si512(to[i], range.has(i) ? _mm512_loadu_si512(row + i * stride) : _mm512_setzero_si512());
    written(to);
  }

  // Of 32 numbers of two tokens, pairs of those of even index, and of those of odd index, to a row of two tiles.
  static void put_pair(__m512i x, __m512i y, Bits* to) {
    const __m512i up = _mm512_broadcast_i32x4(_mm_setr_epi32(0x0100'0000, 0x0504'0000, 0x0908'0000, 0x0d0c'0000));
    const __m512i down = _mm512_broadcast_i32x4(_mm_setr_epi32(0x0302, 0x0706, 0x0b0a, 0x0f0e));
    _mm512_store_si512(to, _mm512_mask_shuffle_epi8(x, 0xcccccccccccccccc, y, up));
    _mm512_store_si512(to + W * kStep, _mm512_mask_shuffle_epi8(y, 0x3333333333333333, x, down));
  }

  // The same of the second token alone, or of the first.
  static void put_one(__m512i x, bool second, Bits* to) {
    const __mmask32 places = second ? 0xaaaaaaaa : 0x55555555;
    _mm512_mask_storeu_epi16(to, places, second ? _mm512_slli_epi32(x, W) : x);
    _mm512_mask_storeu_epi16(to + W * kStep, places, second ? x : _mm512_srli_epi32(x, W));
  }

  static V round(V x) { return (V)_mm512_roundscale_ps((__m512)x, _MM_FROUND_NO_EXC); }

  // Scores in powers of two, rounded as the highest one is: no power of a difference from it is above 1.
  static V scaled(const float* score, float factor) {
    V x = attention::load(score) * factor;
    asm("" : "+v"(x));  // or the compiler would round once, after the subtraction
    return x;
  }

  // Of up to 16 queries, a lane each: scores [kChunk, count].
  static void weigh(const Operator& op, int count, const View* views, int begin, int end, float* score, float* lse,
                    float* totals) {
    const auto there = __mmask16((1u << count) - 1);
    const auto put = [&](int t, V x) { _mm512_mask_storeu_ps(score + t * count, there, (__m512)x); };
    const bool bent = op.softcap > 0 || op.slopes || op.scale <= 0;
    const float factor = bent ? 1 : op.scale * kUnit;
    const V most = see(op, bent, count, views, begin, end, score, put);
    const V top = most * factor, least = set(-__FLT_MAX__), near = top > least ? top : V{};
    const V shift = round(near / kApart) * kApart, n = round(near - shift) - 1.0f;
    for (int t = begin & -kStep; t < begin; ++t) put(t, set(kNone));
    for (int t = end; t % kStep; ++t) put(t, set(kNone));
    const __m512i both = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                          21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const auto ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    V total = {};
    for (int from = begin & -kStep; from < end; from += kStep) {
      float* const at = score + from * count;
      __m512i r[W];  // pairs of tokens
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) {
        const V x = power(scaled(at + 2 * i * count, factor) - shift, n);
        const V y = power(scaled(at + (2 * i + 1) * count, factor) - shift, n);
        r[i] = _mm512_permutexvar_epi16(both, (__m512i)_mm512_cvtne2ps_pbh((__m512)y, (__m512)x));
        total = (V)_mm512_dpbf16_ps((__m512)total, (__m512bh)r[i], ones);
      }
      transpose(r);
      for (int g = 0; g < count; ++g) _mm512_store_si512(at + g * W, r[g]);
    }
    _mm512_mask_storeu_ps(totals, there, (__m512)(total < 1.0f ? set(1) : total));
    _mm512_mask_storeu_ps(lse, there, (__m512)(top > least ? (shift + n) * 0.693147180f : top));
  }

  // As kernel.h's `see`, of queries in lanes: each one's highest score. Scores are left as they are where they are only
  // to be scaled.
  template <class Put>
  static V see(const Operator& op, bool bent, int count, const View* views, int begin, int end, float* score, Put put) {
    V low = {}, high = {}, self = {}, slope = {}, most = set(kNone);
    bool whole = true;
    for (int g = 0; g < count; ++g) {
      const View& view = views[g];
      low[g] = float(view.low), high[g] = float(view.high), self[g] = view.self, slope[g] = view.slope;
      whole = whole && view.low <= begin && view.high >= end;
    }
    if (!bent && whole) {
      V tops[] = {most, most, most, most};  // or each would wait for the one before it
      int t = begin;
      for (; t + 4 <= end; t += 4)
        for (int i = 0; i < 4; ++i) tops[i] = max(tops[i], attention::load(score + (t + i) * count));
      for (; t < end; ++t) most = max(most, attention::load(score + t * count));
      return max(max(most, max(tops[0], tops[1])), max(tops[2], tops[3]));
    }
    for (int t = begin; t < end; ++t) {
      V x = attention::load(score + t * count);
      if (bent) {
        x = x * op.scale;
        if (op.softcap > 0) x = tanh(x / op.softcap) * op.softcap;
        if (op.slopes) x += slope * (float(t) - self);
        x = x * kUnit;
      }
      x = (set(float(t)) >= low) & (set(float(t)) < high) ? x : set(kNone);
      most = max(most, x);
      put(t, x);
    }
    return most;
  }

  // 32 numbers of o, by one half of the queries or both.
  template <bool kQueries>
  static void sums(const Halves& halves, const float* weight, const Bits* values, int begin, int end, float* o,
                   int64_t stride) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kQueries) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int from = begin & -kStep; from < end; from += kStep) {
      const Bits* const at = values + place(from);
      _tile_loadd(4, weight + from * halves.first, sizeof at[0] * kStep);
      _tile_loadd(6, at, sizeof at[0] * kStep);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, at + W * kStep, sizeof at[0] * kStep);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (kQueries) {
        _tile_loadd(5, weight + W * kScores + from * halves.second, sizeof at[0] * kStep);
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
