// The loops over keys and values of bf16 by products of pairs; see Vectors. Included after loops.h, in the same
// namespace.
//
// A score is four chains, each over every fourth number of 4 x 4 pairs, so four keys next to each other leave four sums
// to add. o takes tokens 2 i and 2 i + 1 of a chunk at once, one of which may be missing. So a query gets one chain of
// operations over its own tokens, both in a prompt and in decoding.
//
// Weights are rounded to bf16. They are powers of two times numbers that depend only on their own scores, and o is
// divided by their sum at the end. So their rounding does not depend on other tokens. Where a sequence is cut into stored
// and new tokens changes o only by fp32's rounding.
class Pairs {
 public:
  static constexpr int kMost = 8, kStep = 2 * W;
  static constexpr float kUnit = 1.44269504f;
  static constexpr bool kLate = true;

  static int64_t width(int64_t dim) { return 2 * padded(dim); }

  // Of each 32 numbers 4 x `count` vectors; the j-th has the pairs j, 4 + j, 8 + j and 12 + j, each four times.
  static void load(const BFloat16* const* from, int count, int64_t dim, float* to) {
    for (int64_t d = 0; d < dim; d += kStep, to += 4 * count * W)
      for (int g = 0; g < count; ++g) {
        const __m512i x = line(from[g] + d, dim - d);
        store(to + g * W, (V)_mm512_shuffle_epi32(x, _MM_PERM_AAAA));
        store(to + (count + g) * W, (V)_mm512_shuffle_epi32(x, _MM_PERM_BBBB));
        store(to + (2 * count + g) * W, (V)_mm512_shuffle_epi32(x, _MM_PERM_CCCC));
        store(to + (3 * count + g) * W, (V)_mm512_shuffle_epi32(x, _MM_PERM_DDDD));
      }
  }

  static void score(int count, const float* q, const BFloat16* k, int64_t stride, int low, int high, int64_t dim,
                    float* score, Ahead ahead) {
    by_count(count, [&](auto number) { scores<decltype(number)::value>(q, k, stride, low, high, dim, score, ahead); });
  }

  // Scores in powers of two to weights of bf16, a pair in the place of a score.
  static Softmax weights(float top, int begin, int end, float* score) {
    const float near = top > -__FLT_MAX__ ? top : 0;
    const float shift = kApart * __builtin_rintf(near / kApart), n = __builtin_rintf(near - shift) - 1;
    const auto one = (__m512bh)_mm512_set1_epi16(0x3f80);
    __m512 total = _mm512_setzero_ps();
    for (int t = begin; t < end; t += kStep) {
      const V a = attention::load(score + t), b = attention::load(score + t + W);
      const auto x = (__m512)power(a - set(shift), set(n)), y = (__m512)power(b - set(shift), set(n));
      const __m512bh pairs = _mm512_cvtne2ps_pbh(y, x);
      total = _mm512_dpbf16_ps(total, pairs, one);
      store(score + t / 2, (V)pairs);
    }
    const float sum = fold((V)total, [](auto a, auto b) __attribute__((always_inline)) { return a + b; });
    return {top > -__FLT_MAX__ ? (shift + n) * 0.693147180f : top, sum < 1 ? 1 : sum};
  }

  static void add(int count, const float* weight, const BFloat16* v, int64_t stride, int low, int high, bool first,
                  int64_t dim, float* o, int64_t stride_o, Ahead ahead) {
    by_count(count, [&](auto number) {
      accumulate<decltype(number)::value>(weight, v, stride, low, high, first, dim, o, stride_o, ahead);
    });
  }

  static void settle() {}

 private:
  static constexpr int kKeys = 8;  // at once
  // Scores less a multiple of this are near 0, whatever they are; it is most often 0 itself.
  static constexpr float kApart = 64;

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

  // 2^(x - n) to 1e-4 of it, whose last bits x alone decides; 0 where it is no normal number.
  static V power(V x, V n) {
    const V y = max(set(-200), x), k = (V)_mm512_roundscale_ps((__m512)y, _MM_FROUND_NO_EXC), r = y - k;
    V p = set(0.05500895f);
    for (float c : {0.24221101f, 0.69328293f, 1.0f}) p = fma(p, r, set(c));
    return (V)_mm512_scalef_ps((__m512)p, (__m512)(k - n));
  }

  // Four rows of 32 numbers to vectors as `load` makes them, of which the four places of a pair have those of four rows.
  [[gnu::always_inline]] static void weave(__m512i x, __m512i y, __m512i z, __m512i w, __m512bh* to) {
    const __m512i a = _mm512_unpacklo_epi32(x, y), b = _mm512_unpacklo_epi32(z, w);
    const __m512i c = _mm512_unpackhi_epi32(x, y), d = _mm512_unpackhi_epi32(z, w);
    to[0] = (__m512bh)_mm512_unpacklo_epi64(a, b), to[1] = (__m512bh)_mm512_unpackhi_epi64(a, b);
    to[2] = (__m512bh)_mm512_unpacklo_epi64(c, d), to[3] = (__m512bh)_mm512_unpackhi_epi64(c, d);
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
        __m512bh keys[2][4];
        for (int h = 0; h < 2; ++h)
          weave(line(at + row[4 * h], left), line(at + row[4 * h + 1], left), line(at + row[4 * h + 2], left),
                line(at + row[4 * h + 3], left), keys[h]);
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j)
#pragma GCC unroll 8
          for (int g = 0; g < G; ++g, x += W) {
            const auto y = (__m512bh)attention::load(x);
            sum[g][0] = (V)_mm512_dpbf16_ps((__m512)sum[g][0], y, keys[0][j]);
            sum[g][1] = (V)_mm512_dpbf16_ps((__m512)sum[g][1], y, keys[1][j]);
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

  // sum += x . the pair w. The compiler would load w once for two of these, into a register of its own.
  [[gnu::always_inline]] static void add_both(V& sum, __m512bh x, const float& w) {
    asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(x), "m"(w));
  }

  // weight: pairs, from the chunk's first token on.
  template <int G>  // not inline, where registers would be spilled
  [[gnu::noinline]] static void accumulate(const float* weight, const BFloat16* v, int64_t stride, int low, int high,
                                           bool first, int64_t dim, float* o, int64_t stride_o, Ahead ahead) {
    constexpr int N = 32;  // tokens before o is written back
    const __m512i up = _mm512_broadcast_i32x4(_mm_setr_epi32(0x0100'0000, 0x0504'0000, 0x0908'0000, 0x0d0c'0000));
    const __m512i down = _mm512_broadcast_i32x4(_mm_setr_epi32(0x0302, 0x0706, 0x0b0a, 0x0f0e));
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
        const float* w = weight + from / 2;
        // Of two tokens, the even numbers and the odd ones.
        const auto two = [&](__m512i x, __m512i y) __attribute__((always_inline)) {
          const auto even = (__m512bh)_mm512_mask_shuffle_epi8(x, 0xcccccccccccccccc, y, up);
          const auto odd = (__m512bh)_mm512_mask_shuffle_epi8(y, 0x3333333333333333, x, down);
#pragma GCC unroll 8
          for (int g = 0; g < G; ++g) {
            add_both(a[g], even, w[g * kScores]);
            add_both(b[g], odd, w[g * kScores]);
          }
          ++w;
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
