// The loops over keys and values of bf16 for many queries; see Vectors. Included after loops.h and avx512/power.h, in the
// same namespace, and before a Matrix: how what lies there is multiplied (amx_matrix.h, avx512/bf16_matrix.h).
//
// Scores lie token by token, a query in a lane. So what is done to them needs no sums over lanes. A head's values of a
// chunk are laid out once for all queries, and each sum o [queries, 16 numbers] stays in its register for the chunk.
// Weights are those of avx512/pairs.h: powers of two whose rounding to bf16 does not depend on other tokens. Their sums
// are added in its order, too.
//
// Values are multiplied in steps of 32 tokens, counted from the chunk's first one; missing ones have the weight 0. So a
// query gets one chain of operations over its own tokens here, too.

constexpr int kInStep = 2 * W;  // tokens, or numbers of a row

// A block's queries: up to 16, and the rest.
struct Halves {
  int first, second;

  explicit Halves(int count) : first(count < W ? count : W), second(count - first) {}
};

// Where 32 numbers of a token's values lie in a chunk: the row of its pair, half of which is the other token's. `W` rows
// further are those of odd index.
inline int64_t value_place(int token) { return (token / kInStep * 2 * W + token % kInStep / 2) * kInStep; }

// The first `count` of 16 places.
inline void put_row(V x, int count, float* to) {
  if (count == W)
    store(to, x);
  else
    _mm512_mask_storeu_ps(to, __mmask16((1u << count) - 1), (__m512)x);
}

template <class Matrix>
class Tiles {
 public:
  static constexpr int kMost = 2 * W, kStep = kInStep;
  static constexpr float kUnit = 1.44269504f;
  static constexpr bool kLate = true, kByHead = true;

  static bool fits(const Operator& op) { return op.qk_dim % kStep == 0 && op.v_dim % kStep == 0; }
  static int64_t width(int64_t dim) { return dim / 2; }  // two numbers in a place

  // Writes pairs of numbers as [dim / 2, queries]: first those of up to 16 queries, then those of the rest.
  static void load(const BFloat16* const* from, int count, int64_t dim, float* to) {
    for (int begin = 0, some; begin < count; begin += some) {
      some = int(min(count - begin, W));
      for (int64_t d = 0; d < dim; d += kStep) {
        __m512i r[W];
        for (int g = 0; g < W; ++g) r[g] = g < some ? _mm512_loadu_si512(from[begin + g] + d) : _mm512_setzero_si512();
        transpose(r);
        for (int i = 0; i < W; ++i, to += some) put_row((V)r[i], some, to);
      }
    }
  }

  // Writes the scores of tokens `low .. high` as [kChunk, queries]. Those of the queries after the 16th begin `W * kScores`
  // floats further.
  void score(int count, const float* q, const BFloat16* k, int64_t stride, int low, int high, int64_t dim, float* score,
             Ahead ahead, Ahead later) {
    matrix_.score(Halves(count), q, k, stride, low, high, dim, score, score + W * kScores, ahead, later);
  }

  // The chunk's values at `low .. high`, whose rows begin at v, to their places. These are tiles [dim / 32, 4, 2] of 16
  // pairs of tokens by 16 numbers. A tile has numbers of even index, the one after it those of odd index.
  static void lay_out(const BFloat16* v, int64_t stride, int low, int high, int64_t dim, float* to) {
    for (int t = low; t < high;) {
      const bool two = t % 2 == 0 && t + 2 <= high;
      Bits* at = reinterpret_cast<Bits*>(to) + value_place(t);
      for (int64_t d = 0; d < dim; d += kStep, at += kValues) {
        const __m512i x = _mm512_loadu_si512(v + d);
        if (two)
          put_pair(x, _mm512_loadu_si512(v + stride + d), at);
        else
          put_one(x, t % 2, at);
      }
      t += two ? 2 : 1, v += two ? 2 * stride : stride;
    }
  }

  // Zeros to the places of values that share a tile with `begin .. end` and are none of them.
  static void clear(int begin, int end, int64_t dim, float* to) {
    const auto zero = [&](int token) {
      Bits* at = reinterpret_cast<Bits*>(to) + value_place(token & -kStep);
      for (int64_t d = 0; d < dim; d += kStep, at += kValues) __builtin_memset(at, 0, 2 * sizeof(Bits) * kStep * W);
    };
    if (begin % kStep) zero(begin);
    if (end % kStep) zero(end);
  }

  // Scores, as `score` left them, at `begin .. end` to weights in bf16, in Matrix's places. views: null if all queries
  // see all of these tokens, and have no slopes.
  static void weights(const Operator& op, int count, const View* views, int begin, int end, float* score, float* lse,
                      float* totals) {
    const Halves halves(count);
    weigh(op, halves.first, views, begin, end, score, lse, totals);
    if (halves.second)
      weigh(op, halves.second, views ? views + W : views, begin, end, score + W * kScores, lse + W, totals + W);
  }

  // o [count, stride_o] = weights at `begin .. end` . values, as `weights` and `lay_out` left them, over their totals.
  void add(int count, const float* weight, const float* values, const float* totals, int begin, int end, int64_t dim,
           float* o, int64_t stride_o) {
    written(weight), written(values);
    float shares[kMost];
    for (int g = 0; g < count; ++g) shares[g] = 1 / totals[g];
    const Bits* at = reinterpret_cast<const Bits*>(values);
    for (int64_t d = 0; d < dim; d += kStep, at += kValues)
      matrix_.add(Halves(count), weight, weight + W * kScores, shares, at, begin, end, o + d, stride_o);
  }

 private:
  static constexpr int64_t kValues = kChunk * kStep;  // numbers of a chunk, 32 of each row

  // Of 32 numbers of two tokens, pairs of those of even index, and of those of odd index, to their rows.
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

  // A score's weight. kShifted: the score is less `shift` first, rounded twice as pairs.h does.
  template <bool kShifted>
  static V weight(const float* score, float factor, V shift) {
    V x = attention::load(score) * factor;
    if constexpr (kShifted) {
      asm("" : "+v"(x));
      x -= shift;
    }
    return power(x);
  }

  // Scores at `begin .. end`, in whole steps, to weights in Matrix's places. Returns the sums of these.
  template <bool kShifted>
  static V powers(int count, int begin, int end, float* score, float factor, V shift) {
    const __m512i both = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                          21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const auto ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    V sums[W] = {};  // of the pairs of all steps
    for (int from = begin & -kStep; from < end; from += kStep) {
      float* const at = score + from * count;
      typename Matrix::Weights weights(count, at);
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) {
        const V x = weight<kShifted>(at + 2 * i * count, factor, shift);
        const V y = weight<kShifted>(at + (2 * i + 1) * count, factor, shift);
        const __m512i pairs = _mm512_permutexvar_epi16(both, (__m512i)_mm512_cvtne2ps_pbh((__m512)y, (__m512)x));
        sums[i] = (V)_mm512_dpbf16_ps((__m512)sums[i], (__m512bh)pairs, ones);
        weights.put(i, pairs);
      }
      weights.finish();
    }
    for (int n = W / 2; n; n /= 2)
      for (int i = 0; i < n; ++i) sums[i] += sums[i + n];
    return sums[0];
  }

  // Of up to 16 queries, a lane each: scores [kChunk, count].
  static void weigh(const Operator& op, int count, const View* views, int begin, int end, float* score, float* lse,
                    float* totals) {
    const auto there = __mmask16((1u << count) - 1);
    const auto put = [&](int t, V x) { put_row(x, count, score + t * count); };
    const bool bent = op.softcap > 0 || op.slopes || op.scale <= 0;
    const float factor = bent ? 1 : op.scale * kUnit;
    const V most = see(op, bent, count, views, begin, end, score, put);
    const V top = most * factor, least = set(-__FLT_MAX__), near = top > least ? top : V{};
    const V shift = (V)_mm512_roundscale_ps((__m512)(near / kApart), _MM_FROUND_NO_EXC) * kApart;
    const bool shifted = _mm512_mask_test_epi32_mask(there, (__m512i)shift, _mm512_set1_epi32(0x7fffffff));
    for (int t = begin & -kStep; t < begin; ++t) put(t, set(kNone));
    for (int t = end; t % kStep; ++t) put(t, set(kNone));
    const V total = (shifted ? powers<true> : powers<false>)(count, begin, end, score, factor, shift);
    _mm512_mask_storeu_ps(totals, there, (__m512)(total > 0.0f ? total : set(1)));
    _mm512_mask_storeu_ps(lse, there, (__m512)(top > least ? shift * 0.693147180f : top));
  }

  // As kernel.h's `see`, of queries in lanes: each one's highest score. Scores are left as they are where they are only
  // to be scaled.
  template <class Put>
  static V see(const Operator& op, bool bent, int count, const View* views, int begin, int end, float* score, Put put) {
    V low = set(float(begin)), high = set(float(end)), self = {}, slope = {}, most = set(kNone);
    const bool straight = !(op.softcap > 0 || op.slopes);
    for (int g = 0; views && g < count; ++g) {
      const View& view = views[g];
      low[g] = float(view.low), high[g] = float(view.high), self[g] = view.self, slope[g] = view.slope;
    }
    int t = begin;
    if (!bent) {  // those that all queries see
      int from = begin, upto = end;
      for (int g = 0; views && g < count; ++g) from = max(from, views[g].low), upto = min(upto, views[g].high);
      V tops[] = {most, most, most, most};  // or each would wait for the one before it
      if (from == begin)
        for (; t + 4 <= upto; t += 4)
          for (int i = 0; i < 4; ++i) tops[i] = max(tops[i], attention::load(score + (t + i) * count));
      most = max(max(tops[0], tops[1]), max(tops[2], tops[3]));
    }
    for (; t < end; ++t) {
      V x = attention::load(score + t * count);
      if (bent) {
        x = x * (straight ? op.scale * kUnit : op.scale);
        if (op.softcap > 0) x = tanh(x / op.softcap) * op.softcap;
        if (op.slopes) x += slope * (float(t) - self);
        if (!straight) x = x * kUnit;
      }
      x = (set(float(t)) >= low) & (set(float(t)) < high) ? x : set(kNone);
      most = max(most, x);
      put(t, x);
    }
    return most;
  }

  Matrix matrix_;
};
