// The loops over keys and values of bf16 by matrix instructions; see Vectors. Included after loops.h, in the same
// namespace. Weights are rounded to bf16, too.
//
// Tokens are multiplied 32 at a time, counted from the chunk's first one; missing ones enter as zeros. So a query gets
// one chain of operations over its own tokens here, too.
//
// Registers:
// - 0, 1: scores [16 tokens, queries]
// - 2: q [16 pairs of numbers, queries]
// - 3, 7: k [16 tokens, 32 numbers] or v [16 pairs of tokens, 16 numbers]
// - 4: weights [queries, 32 tokens]
// - 5, 6: o [queries, 16 numbers]
class Tiles {
 public:
  static constexpr int kMost = 16, kStep = 2 * W;  // kStep: numbers of a row, or tokens, in a tile
  static constexpr float kUnit = 1;
  static constexpr bool kLate = false;

  // Fewer queries than make two blocks of vectors are not worth it while keys come from memory: loads of tiles wait for
  // their lines. All rows of the sequence in the step count, not those of a task, so that bits do not depend on tasks.
  static bool fits(const Operator& op, int64_t rows) {
    return rows * op.group() > Vectors<BFloat16, BFloat16>::kMost && op.qk_dim % kStep == 0 && op.v_dim % kStep == 0;
  }
  static int64_t width(int64_t dim) { return dim / 2; }  // two numbers in a place

  Tiles() = default;
  Tiles(const Tiles&) = delete;
  ~Tiles() { _tile_release(); }

  // [dim / 2, count] pairs of numbers.
  static void load(const BFloat16* const* from, int count, int64_t dim, float* to) {
    for (int64_t d = 0; d < dim; d += 2)
      for (int g = 0; g < count; ++g) __builtin_memcpy(to++, from[g] + d, sizeof *to);
  }

  void score(int count, const float* q, const BFloat16* k, int64_t stride, int low, int high, int64_t dim, float* score,
             Ahead ahead) {
    set_for(count);
    alignas(64) Bits space[kStep][kStep];
    for (int from = low & -kStep; from < high; from += kStep) {
      const Range range(low - from, high - from);
      const BFloat16* row = k + (from - low) * stride;
      _tile_zero(0);
      _tile_zero(1);
      for (int64_t d = 0; d < dim; d += kStep, row += kStep) {
        const void *at = row, *behind = row + W * stride;
        int64_t bytes = 2 * stride;
        if (range.whole()) {
          touch(row, stride, ahead);
        } else {
          copy(row, stride, range, space);
          at = space, behind = space[W], bytes = sizeof space[0];
        }
        _tile_loadd(2, q + d / 2 * count, 4 * count);
        _tile_loadd(3, at, bytes);
        _tile_dpbf16ps(0, 3, 2);
        _tile_loadd(7, behind, bytes);
        _tile_dpbf16ps(1, 7, 2);
      }
      Score& one = scores_[scored_++ % kSlots];
      one.to = score + from, one.range = range;
      _tile_stored(0, one.sums, 4 * count);
      _tile_stored(1, one.sums + W * count, 4 * count);
      if (scored_ > kDelay) put_scores(scores_[(scored_ - 1 - kDelay) % kSlots]);
    }
  }

  static Softmax weights(float top, int begin, int end, float* score) { return softmax(top, begin, end, score); }

  void add(int count, const float* weight, const BFloat16* v, int64_t stride, int low, int high, bool first,
           int64_t dim, float* o, int64_t stride_o, Ahead ahead) {
    set_for(count);
    for (int from = low & -kStep; from < high; from += kStep, first = false) {
      const Range range(low - from, high - from);
      const BFloat16* row = v + (from - low) * stride;
      Bits(*const weights)[kStep] = weights_[weighed_++ % kSlots];
      for (int g = 0; g < count; ++g) {
        const float* at = weight + g * kScores + from;
        const __m512 a = _mm512_maskz_loadu_ps(range.mask(0), at), b = _mm512_maskz_loadu_ps(range.mask(1), at + W);
        _mm512_store_si512(weights[g], (__m512i)_mm512_cvtne2ps_pbh(b, a));
      }
      for (int64_t d = 0; d < dim; d += kStep, row += kStep) {
        Sum& one = sums_[added_++ % kSlots];
        one.weights = weights, one.to = o + d, one.stride = stride_o, one.first = first;
        interleave(row, stride, range, one.pairs, ahead);
        if (added_ > kDelay) put_sum(sums_[(added_ - 1 - kDelay) % kSlots]);
      }
    }
  }

  // Called after all calls of one kind: completes them. A load of a tile waits for stores that have not reached the cache.
  // So each result is used a little later than it is made.
  void settle() {
    for (int64_t i = max(scored_ - kDelay, 0); i < scored_; ++i) put_scores(scores_[i % kSlots]);
    for (int64_t i = max(added_ - kDelay, 0); i < added_; ++i) put_sum(sums_[i % kSlots]);
    scored_ = added_ = 0;
  }

 private:
  // Of 32 tokens, those that are there.
  struct Range {
    int low, high;

    Range() = default;
    Range(int low, int high) : low(low > 0 ? low : 0), high(high < kStep ? high : kStep) {}
    bool whole() const { return high - low == kStep; }
    bool has(int i) const { return i >= low && i < high; }
    __mmask16 mask(int half) const {
      const std::uint64_t all = (std::uint64_t(1) << high) - (std::uint64_t(1) << low);
      return __mmask16(all >> half * W);
    }
  };

  struct alignas(64) Config {
    std::uint8_t palette = 1, start = 0, reserved[14] = {};
    std::uint16_t bytes[16] = {};
    std::uint8_t rows[16] = {};
  };

  struct Score {
    float* to;  // [count, kScores]
    Range range;
    alignas(64) float sums[kStep * W];  // [tokens, count]
  };

  struct Sum {
    const Bits (*weights)[kStep];
    float* to;
    int64_t stride;
    bool first;
    alignas(64) Bits pairs[2][W][kStep];
  };

  void set_for(int count) {
    if (count == count_) return;
    settle();
    Config config;
    const auto set = [&](int i, int rows, int width) {
      config.rows[i] = std::uint8_t(rows), config.bytes[i] = std::uint16_t(4 * width);
    };
    for (int i : {0, 1, 2}) set(i, W, count);
    for (int i : {3, 7}) set(i, W, W);
    for (int i : {4, 5, 6}) set(i, count, W);
    written(&config);
    _tile_loadconfig(&config);
    count_ = count;
  }

  // Line by line into L1 before a tile is loaded, whose lines would wait for each other; and on with what comes next.
  static void touch(const BFloat16* row, int64_t stride, Ahead& ahead) {
    for (int i = 0; i < kStep; ++i, row += stride) {
      ahead.template fetch<64>();
      (void)*reinterpret_cast<const volatile Bits*>(row);
    }
  }

  static void copy(const BFloat16* row, int64_t stride, const Range& range, Bits (*to)[kStep]) {
    for (int i = 0; i < kStep; ++i) _mm512_store_si512(to[i], line(row + i * stride, range.has(i)));
    written(to);
  }

  static __m512i line(const BFloat16* at, bool there) {
    return there ? _mm512_loadu_si512(at) : _mm512_setzero_si512();
  }

  // 32 rows of 32 numbers as pairs of the same number of two tokens: the even numbers, and the odd ones.
  static void interleave(const BFloat16* row, int64_t stride, const Range& range, Bits (*to)[W][kStep], Ahead& ahead) {
    const auto put = [&](int i, __m512i x, __m512i y) {
      const __m512i up = _mm512_broadcast_i32x4(_mm_setr_epi32(0x0100'0000, 0x0504'0000, 0x0908'0000, 0x0d0c'0000));
      const __m512i down = _mm512_broadcast_i32x4(_mm_setr_epi32(0x0302, 0x0706, 0x0b0a, 0x0f0e));
      _mm512_store_si512(to[0][i], _mm512_mask_shuffle_epi8(x, 0xcccccccccccccccc, y, up));
      _mm512_store_si512(to[1][i], _mm512_mask_shuffle_epi8(y, 0x3333333333333333, x, down));
    };
    if (range.whole())
      for (int i = 0; i < W; ++i, row += 2 * stride) {
        ahead.template fetch<128>();
        put(i, line(row, true), line(row + stride, true));
      }
    else
      for (int i = 0; i < W; ++i, row += 2 * stride)
        put(i, line(row, range.has(2 * i)), line(row + stride, range.has(2 * i + 1)));
    written(to);
  }

  // Scores [32 tokens, count] to [count, kScores], where tokens are there.
  void put_scores(const Score& one) const {
    const float* at = one.sums;
    for (int half = 0; half < 2; ++half, at += W * count_)
      for (int g = 0; g < count_; g += 4) {
        const auto four = [&](int token) { return _mm_loadu_ps(at + token * count_ + g); };
        V x[4];
        for (int i = 0; i < 4; ++i) {  // in each four lanes, a token's scores
          __m512 y = _mm512_castps128_ps512(four(i));
          y = _mm512_insertf32x4(y, four(i + 4), 1);
          y = _mm512_insertf32x4(y, four(i + 8), 2);
          x[i] = (V)_mm512_insertf32x4(y, four(i + 12), 3);
        }
        const __m512d a = (__m512d)_mm512_unpacklo_ps(x[0], x[1]), b = (__m512d)_mm512_unpacklo_ps(x[2], x[3]);
        const __m512d c = (__m512d)_mm512_unpackhi_ps(x[0], x[1]), d = (__m512d)_mm512_unpackhi_ps(x[2], x[3]);
        const __m512d y[] = {_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b), _mm512_unpacklo_pd(c, d),
                             _mm512_unpackhi_pd(c, d)};
        for (int i = 0; i < 4 && g + i < count_; ++i)
          _mm512_mask_storeu_ps(one.to + (g + i) * kScores + half * W, one.range.mask(half), (__m512)y[i]);
      }
  }

  static void put_sum(const Sum& one) {
    if (one.first) {
      _tile_zero(5);
      _tile_zero(6);
    } else {
      _tile_loadd(5, one.to, 4 * one.stride);
      _tile_loadd(6, one.to + W, 4 * one.stride);
    }
    _tile_loadd(4, one.weights, sizeof one.weights[0]);
    _tile_loadd(3, one.pairs[0], sizeof one.pairs[0][0]);
    _tile_dpbf16ps(5, 4, 3);
    _tile_loadd(7, one.pairs[1], sizeof one.pairs[0][0]);
    _tile_dpbf16ps(6, 4, 7);
    _tile_stored(5, one.to, 4 * one.stride);
    _tile_stored(6, one.to + W, 4 * one.stride);
  }

  static constexpr int kSlots = 4, kDelay = 2;

  int count_ = 0;  // queries that the registers are set for
  int64_t scored_ = 0, weighed_ = 0, added_ = 0;
  Score scores_[kSlots];
  Sum sums_[kSlots];
  alignas(64) Bits weights_[kSlots][W][kStep];
};
