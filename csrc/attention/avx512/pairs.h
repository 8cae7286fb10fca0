// The loops over keys and values of bf16 by pairs of numbers; see Vectors. Included after loops.h, in the same namespace,
// and after the variant's Product: how pairs are multiplied (bf16_product.h, float_product.h).
//
// A score is four chains, each over every fourth number of 4 x 4 pairs, so four keys next to each other leave four sums
// to add. o takes tokens 2 i and 2 i + 1 of a chunk at once, one of which may be missing. So a query gets one chain of
// operations over its own tokens, both in a prompt and in decoding.
//
// A product of bf16 takes weights rounded to it. They are powers of two times numbers that depend only on their own
// scores, and o is divided by their sum at the end. So their rounding does not depend on other tokens. Where a sequence
// is cut into stored and new tokens changes o only by fp32's rounding.
class Pairs {
 public:
  static constexpr int kMost = 8, kStep = 2 * W;
  static constexpr float kUnit = 1.44269504f;
  static constexpr bool kLate = true, kByHead = false;

  static int64_t width(int64_t dim) { return 2 * Product::kParts * padded(dim); }

  // Of each 32 numbers 4 x `count` vectors; the j-th has the pairs j, 4 + j, 8 + j and 12 + j, each four times.
  static void load(const BFloat16* const* from, int count, int64_t dim, float* to) {
    constexpr int kVector = Product::kParts * W;
    for (int64_t d = 0; d < dim; d += kStep, to += 4 * count * kVector)
      for (int g = 0; g < count; ++g) {
        const __m512i x = line(from[g] + d, dim - d);
        Product::store_query(to + g * kVector, _mm512_shuffle_epi32(x, _MM_PERM_AAAA));
        Product::store_query(to + (count + g) * kVector, _mm512_shuffle_epi32(x, _MM_PERM_BBBB));
        Product::store_query(to + (2 * count + g) * kVector, _mm512_shuffle_epi32(x, _MM_PERM_CCCC));
        Product::store_query(to + (3 * count + g) * kVector, _mm512_shuffle_epi32(x, _MM_PERM_DDDD));
      }
  }

  static void score(int count, const float* q, const BFloat16* k, int64_t stride, int low, int high, int64_t dim,
                    float* score, Ahead ahead) {
    by_count(count, [&](auto number) { scores<decltype(number)::value>(q, k, stride, low, high, dim, score, ahead); });
  }

  // Scores in powers of two to weights as Product takes them.
  static Softmax weights(float top, int begin, int end, float* score) {
    const float near = top > -__FLT_MAX__ ? top : 0;
    const float shift = kApart * __builtin_rintf(near / kApart);
    V total = {};
    for (int t = begin; t < end; t += kStep) {
      const V a = attention::load(score + t), b = attention::load(score + t + W);
      const V x = power(a - set(shift)), y = power(b - set(shift));
      total = Product::store_weights(total, x, y, score + t / 2 * Product::kParts);
    }
    const float sum = fold(total, [](auto a, auto b) __attribute__((always_inline)) { return a + b; });
    return {top > -__FLT_MAX__ ? shift * 0.693147180f : top, sum > 0 ? sum : 1};
  }

  static void add(int count, const float* weight, const BFloat16* v, int64_t stride, int low, int high, bool first,
                  int64_t dim, float* o, int64_t stride_o, Ahead ahead) {
    by_count(count, [&](auto number) {
      accumulate<decltype(number)::value>(weight, v, stride, low, high, first, dim, o, stride_o, ahead);
    });
  }

 private:
  static constexpr int kKeys = 8;  // at once

  template <class F>
  static void by_count(int count, F f) {
    switch (count) {
      case 1: return f(std::integral_constant<int, 1>());
      case 2: return f(std::integral_constant<int, 2>());
      case 3: return f(std::integral_constant<int, 3>());
      case 4: return f(std::integral_constant<int, 4>());
      case 5: return f(std::integral_constant<int, 5>());
      case 6: return f(std::integral_constant<int, 6>());
      case 7: return f(std::integral_constant<int, 7>());
      default: return f(std::integral_constant<int, 8>());
    }
  }

  // The first of `left` numbers, then zeros; nothing is read beyond them.
  static __m512i line(const BFloat16* at, int64_t left) {
    return left >= kStep ? _mm512_loadu_si512(at) : _mm512_maskz_loadu_epi16((__mmask32(1) << left) - 1, at);
  }

  // Four rows of 32 numbers to vectors as `load` makes them, of which the four places of a pair have those of four rows.
  [[gnu::always_inline]] static void weave(__m512i x, __m512i y, __m512i z, __m512i w, __m512i* to) {
    const __m512i a = _mm512_unpacklo_epi32(x, y), b = _mm512_unpacklo_epi32(z, w);
    const __m512i c = _mm512_unpackhi_epi32(x, y), d = _mm512_unpackhi_epi32(z, w);
    to[0] = _mm512_unpacklo_epi64(a, b), to[1] = _mm512_unpackhi_epi64(a, b);
    to[2] = _mm512_unpacklo_epi64(c, d), to[3] = _mm512_unpackhi_epi64(c, d);
  }

  // In each four lanes, the sum over half of the fours of a, or of b.
  [[gnu::always_inline]] static V join(V a, V b) {
    const auto x = (__m512)a, y = (__m512)b;
    return (V)_mm512_shuffle_f32x4(x, y, 0x88) + (V)_mm512_shuffle_f32x4(x, y, 0xdd);
  }

  template <int G>
  [[gnu::noinline]] static void scores(const float* q, const BFloat16* k, int64_t stride, int low, int high,
                                       int64_t dim, float* score, Ahead ahead) {
    for (int t = low; t < high; t += kKeys, k += kKeys * stride) {
      int64_t row[kKeys];  // after the last one, that one again
      for (int i = 0; i < kKeys; ++i) row[i] = min(i, high - t - 1) * stride;
      V sum[G][2] = {};
      const float* x = q;
      const auto step = [&](const BFloat16* at, int64_t left) __attribute__((always_inline)) {
        __m512i keys[2][4];
        for (int h = 0; h < 2; ++h)
          weave(line(at + row[4 * h], left), line(at + row[4 * h + 1], left), line(at + row[4 * h + 2], left),
                line(at + row[4 * h + 3], left), keys[h]);
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          const Product a(keys[0][j]), b(keys[1][j]);
#pragma GCC unroll 8
          for (int g = 0; g < G; ++g, x += Product::kParts * W) {
            const Product y(x);
            sum[g][0] = y.times(a, sum[g][0]);
            sum[g][1] = y.times(b, sum[g][1]);
          }
        }
        ahead.template fetch<kKeys * 64>();
      };
      int64_t d = 0;
      for (; d + kStep <= dim; d += kStep) step(k + d, kStep);
      if (d < dim) step(k + d, dim - d);
#pragma GCC unroll 8
      for (int g = 0; g < G; g += 2) {
        const V a = join(sum[g][0], sum[g][1]), b = g + 1 < G ? join(sum[g + 1][0], sum[g + 1][1]) : a;
        const auto both = (__m512)join(a, b);
        _mm256_storeu_ps(score + g * kScores + t, _mm512_castps512_ps256(both));
        if (g + 1 < G) _mm256_storeu_ps(score + (g + 1) * kScores + t, _mm512_extractf32x8_ps(both, 1));
      }
    }
  }

  // weight: as `weights` left them, from the chunk's first token on.
  template <int G>  // not inline, where registers would be spilled
  [[gnu::noinline]] static void accumulate(const float* weight, const BFloat16* v, int64_t stride, int low, int high,
                                           bool first, int64_t dim, float* o, int64_t stride_o, Ahead ahead) {
    constexpr int N = 32;  // tokens before o is written back
    for (int from = low; from < high;) {
      const int upto = int(min((from + N) & -2, high));
      const bool empty = first && from == low;
      for (int64_t d = 0; d < dim; d += kStep) {
        const int64_t left = dim - d;
        V a[G], b[G];
#pragma GCC unroll 8
        for (int g = 0; g < G; ++g) {
          const float* at = o + g * stride_o + d;
          a[g] = empty ? V{} : attention::load(at), b[g] = empty ? V{} : attention::load(at + W);
        }
        const float* w = weight + from / 2 * Product::kParts;
        const auto two = [&](__m512i x, __m512i y) __attribute__((always_inline)) {
          const typename Product::Values values(x, y);
#pragma GCC unroll 8
          for (int g = 0; g < G; ++g) values.add(w + g * kScores, a[g], b[g]);
          w += Product::kParts;
          ahead.template fetch<128>();
        };
        const BFloat16* row = v + (from - low) * stride + d;
        int t = from;
        if (t & 1) two(_mm512_setzero_si512(), line(row, left)), ++t, row += stride;
        if (left >= kStep)
          for (; t + 2 <= upto; t += 2, row += 2 * stride)
            two(_mm512_loadu_si512(row), _mm512_loadu_si512(row + stride));
        else
          for (; t + 2 <= upto; t += 2, row += 2 * stride) two(line(row, left), line(row + stride, left));
        if (t < upto) two(line(row, left), _mm512_setzero_si512());
#pragma GCC unroll 8
        for (int g = 0; g < G; ++g) store_pair(o + g * stride_o + d, {a[g], b[g]});
      }
      from = upto;
    }
  }
};
