// The loops over keys and values of bf16 for many queries, by products of pairs; see Vectors. Included behind loops.h, in
// the same namespace. Keys are turned on the way, so that no sum is over lanes. Weights are rounded to bf16.
//
// Tokens meet their queries 32 at a time, counted from the chunk's first one, and those that are not there enter as
// zeros: so what a query gets is one chain of operations over its own tokens.
#include "avx512_transpose.h"

class Transposed {
 public:
  static constexpr int kMost = kTile;

  // A key is turned in the time of about four products with a query. All rows of the sequence in the step count, not
  // those of a task, so that bits do not depend on tasks.
  static bool fits(const Operator& op, int64_t rows) {
    return rows * op.group() >= kFew && op.qk_dim % kStep == 0 && op.v_dim % kStep == 0 && op.qk_dim <= kLongest &&
           op.v_dim <= kLongest;
  }
  static int64_t width(int64_t dim) { return dim / 2; }  // two numbers in a place

  // [count, dim / 2] pairs of numbers.
  static void load(const BFloat16* const* from, int count, int64_t dim, float* to) {
    for (int g = 0; g < count; ++g, to += dim / 2) __builtin_memcpy(to, from[g], std::size_t(2 * dim));
  }

  void score(int count, const float* q, const BFloat16* k, int64_t stride, int low, int high, int64_t dim, float* score,
             Ahead ahead) {
    for (int from = low & -kStep; from < high; from += kStep) {
      const __mmask32 there = range(low - from, high - from);
      if (!joins(scores_, there) || scores_.q != q || scores_.to != score + from) put_scores();
      turn(k + (from - low) * stride, stride, there, dim, ahead);
      scores_ = {scores_.there | there, count, dim, q, score + from};
      if (scores_.there == kAll) put_scores();
    }
  }

  void add(int count, const float* weight, const BFloat16* v, int64_t stride, int low, int high, bool first,
           int64_t dim, float* o, int64_t stride_o, Ahead ahead) {
    for (int from = low & -kStep; from < high; from += kStep) {
      const __mmask32 there = range(low - from, high - from);
      if (!joins(sums_, there) || sums_.weight != weight + from || sums_.to != o) put_sums();
      const BFloat16* row = v + (from - low) * stride;
      for (int64_t d = 0; d < dim; d += kStep, row += kStep) interleave(row, stride, there, values_[d / kStep], ahead);
      sums_ = {sums_.there | there, count, dim, weight + from, o, stride_o, sums_.there ? sums_.first : first};
      if (sums_.there == kAll) put_sums();
      first = false;
    }
  }

  // Behind all calls of one kind: ends those that wait for the other half of 32 tokens.
  void settle() { put_scores(), put_sums(); }

 private:
  static constexpr int kStep = 2 * W;  // numbers of a row, or tokens, at once
  static constexpr int kFew = 16, kLongest = 256;

  static constexpr __mmask32 kAll = ~__mmask32(0);

  // What is to be done with the tokens in keys_ or values_, once those of both halves are there, or no more will come.
  struct Scores {
    __mmask32 there;
    int count;
    int64_t dim;
    const float* q;
    float* to;
  };
  struct Sums {
    __mmask32 there;
    int count;
    int64_t dim;
    const float* weight;
    float* to;
    int64_t stride;
    bool first;
  };

  // Of 32 tokens, those that are there.
  static __mmask32 range(int low, int high) {
    const std::uint64_t upto = std::uint64_t(1) << min(high, kStep);
    return __mmask32(upto - (std::uint64_t(1) << max(low, 0)));
  }

  static bool has(__mmask32 there, int half) { return there >> half * W & 0xffff; }

  // Whether tokens may lie beside those that wait: in a half of their own.
  template <class Waiting>
  static bool joins(const Waiting& waiting, __mmask32 there) {
    return waiting.there && has(waiting.there, 0) != has(there, 0) && has(waiting.there, 1) != has(there, 1);
  }

  // f of eight queries and the first of them, and then of four, two and one.
  template <class F>
  [[gnu::always_inline]] static void by_eights(int count, F f) {
    int g = 0;
    for (; g + 8 <= count; g += 8) f(std::integral_constant<int, 8>(), g);
    if (count - g >= 4) f(std::integral_constant<int, 4>(), g), g += 4;
    if (count - g >= 2) f(std::integral_constant<int, 2>(), g), g += 2;
    if (count > g) f(std::integral_constant<int, 1>(), g);
  }

  // sum[i] += x[i * stride] . y, pairs of numbers.
  template <int G, int H>
  [[gnu::always_inline]] static void dots(V (&sum)[G][H], const Bits* y, const float* x, int64_t stride) {
    __m512bh part[H];
    for (int half = 0; half < H; ++half) part[half] = (__m512bh)_mm512_load_si512(y + half * kStep);
#pragma GCC unroll 8
    for (int i = 0; i < G; ++i) {
      const auto pair = (__m512bh)_mm512_set1_ps(x[i * stride]);
      for (int half = 0; half < H; ++half) sum[i][half] = (V)_mm512_dpbf16_ps((__m512)sum[i][half], part[half], pair);
    }
  }

  // Scores of the tokens that wait, in H halves from `half` on.
  template <int H>
  void put_scores(int half) const {
    by_eights(scores_.count, [&](auto number, int g) __attribute__((always_inline)) {
      constexpr int G = decltype(number)::value;
      const int64_t pairs = scores_.dim / 2;
      const float* const x = scores_.q + g * pairs;
      V sum[G][H] = {};
      for (int64_t d = 0; d < pairs; ++d) dots<G>(sum, keys_[d][half], x + d, pairs);
#pragma GCC unroll 8
      for (int i = 0; i < G; ++i)
        for (int h = 0; h < H; ++h)
          _mm512_mask_storeu_ps(scores_.to + (g + i) * kScores + (half + h) * W,
                                __mmask16(scores_.there >> (half + h) * W), (__m512)sum[i][h]);
    });
  }

  void put_scores() {
    if (has(scores_.there, 0) && has(scores_.there, 1))
      put_scores<2>(0);
    else if (scores_.there)
      put_scores<1>(has(scores_.there, 1));
    scores_.there = 0;
  }

  void put_sums() {
    const int begin = has(sums_.there, 0) ? 0 : W / 2, end = has(sums_.there, 1) ? W : W / 2;  // pairs of tokens
    alignas(64) float weights[kTile][W];
    for (int g = 0; sums_.there && g < sums_.count; ++g) {
      const float* at = sums_.weight + g * kScores;
      const __m512 a = _mm512_maskz_loadu_ps(__mmask16(sums_.there), at);
      const __m512 b = _mm512_maskz_loadu_ps(__mmask16(sums_.there >> W), at + W);
      _mm512_store_ps(weights[g], (__m512)_mm512_cvtne2ps_pbh(b, a));
    }
    for (int64_t d = 0; sums_.there && d < sums_.dim; d += kStep)
      by_eights(sums_.count, [&](auto number, int g) __attribute__((always_inline)) {
        constexpr int G = decltype(number)::value;
        float* const to = sums_.to + g * sums_.stride + d;
        V sum[G][2] = {};
        if (!sums_.first)
#pragma GCC unroll 8
          for (int i = 0; i < G; ++i)
            for (int half = 0; half < 2; ++half) sum[i][half] = (V)_mm512_loadu_ps(to + i * sums_.stride + half * W);
        for (int t = begin; t < end; ++t) dots<G>(sum, values_[d / kStep][t][0], weights[g] + t, W);
#pragma GCC unroll 8
        for (int i = 0; i < G; ++i) store_pair(to + i * sums_.stride, {sum[i][0], sum[i][1]});
      });
    sums_.there = 0;
  }

  static __m512i line(const BFloat16* at, bool there) {
    return there ? _mm512_loadu_si512(at) : _mm512_setzero_si512();
  }

  // Keys as [pairs of numbers, tokens], in the halves that have some.
  void turn(const BFloat16* row, int64_t stride, __mmask32 there, int64_t dim, Ahead& ahead) {
    for (int64_t d = 0; d < dim; d += kStep, row += kStep)
      for (int half = 0; half < 2; ++half) {
        if (!has(there, half)) continue;
        __m512i rows[W], pairs[W];
        for (int t = 0; t < W; ++t) {
          const int token = half * W + t;
          rows[t] = line(row + token * stride, there >> token & 1);
          ahead.template fetch<64>();
        }
        transpose(rows, pairs);
        for (int i = 0; i < W; ++i) _mm512_store_si512(keys_[d / 2 + i][half], pairs[i]);
      }
  }

  // Rows of 32 numbers as pairs of the same number of two tokens, in the halves that have some: the even numbers, and
  // the odd ones.
  static void interleave(const BFloat16* row, int64_t stride, __mmask32 there, Bits (&to)[W][2][kStep], Ahead& ahead) {
    for (int t = 0; t < W; ++t, row += 2 * stride) {
      if (!has(there, t / (W / 2))) continue;
      ahead.template fetch<128>();
      const __m512i x = line(row, there >> 2 * t & 1), y = line(row + stride, there >> (2 * t + 1) & 1);
      _mm512_store_si512(to[t][0], _mm512_mask_blend_epi16(0xaaaaaaaa, x, _mm512_slli_epi32(y, 16)));
      _mm512_store_si512(to[t][1], _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(x, 16), y));
    }
  }

  Scores scores_ = {};
  Sums sums_ = {};
  alignas(64) Bits keys_[kLongest / 2][2][kStep];
  alignas(64) Bits values_[kLongest / kStep][W][2][kStep];
};
