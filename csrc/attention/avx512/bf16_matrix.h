// Products by AVX512-BF16, for tiles.h: a pair of a key, or of a weight, meets vectors of queries, or of values.
//
// All sums have the order of pairs.h. So a score is four chains, of which two are computed at once. The first two wait in
// registers for the others.
class Matrix {
 public:
  // As Tiles's.
  static void score(const Halves& halves, const float* q, const BFloat16* k, int64_t stride, int low, int high,
                    int64_t dim, float* score, float* score2, Ahead& ahead, Ahead& later) {
    const auto f = halves.second ? scores<4, true> : scores<8, false>;
    f(halves, q, k, stride, low, high, dim, score, score2, ahead, later);
  }

  // Weights of 32 tokens, in place of their scores: 16 times pairs of `count` queries, as they are.
  class Weights {
   public:
    Weights(int count, float* to) : count_(count), to_(to) {}
    void put(int i, __m512i pairs) { put_row((V)pairs, count_, to_ + i * count_); }
    void finish() {}

   private:
    int count_;
    float* to_;
  };

  // 32 numbers of each o, times its share.
  static void add(const Halves& halves, const float* weight, const float* weight2, const float* shares,
                  const Bits* values, int begin, int end, float* o, int64_t stride) {
    add_half(halves.first, weight, shares, values, begin, end, o, stride);
    if (halves.second) add_half(halves.second, weight2, shares + W, values, begin, end, o + W * stride, stride);
  }

 private:
  static constexpr int kChains = 2, kLinks = 4, kQueries = 8;  // kLinks: of a chain in each 32 numbers

  static __m512bh pairs(const float* at) { return (__m512bh)attention::load(at); }
  static __m512bh pair(const void* at) {
    int x;
    __builtin_memcpy(&x, at, sizeof x);
    return (__m512bh)_mm512_set1_epi32(x);
  }
  static V times(V sum, __m512bh x, __m512bh y) { return (V)_mm512_dpbf16_ps((__m512)sum, x, y); }

  // T tokens at once, by one half of the queries or both.
  template <int T, bool kSecond>
  static void scores(const Halves& halves, const float* q, const BFloat16* k, int64_t stride, int low, int high,
                     int64_t dim, float* score, float* score2, Ahead& ahead, Ahead& later) {
    constexpr int Q = kSecond ? 2 : 1;
    const float* const queries[] = {q, q + dim / 2 * W};
    const int counts[] = {halves.first, halves.second};
    float* const to[] = {score, score2};
    for (int t = low; t < high; t += T, k += T * stride) {
      const BFloat16* row[T];  // after the last one, that one again
      for (int i = 0; i < T; ++i) row[i] = k + min(i, high - t - 1) * stride;
      V total[T][Q];
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        V sum[kChains][T][Q] = {};
        for (int64_t d = half * kChains * kLinks; d < dim / 2; d += W) {
#pragma GCC unroll 4
          for (int j = 0; j < kLinks; ++j)
#pragma GCC unroll 2
            for (int c = 0; c < kChains; ++c) {
              const int64_t at = d + c * kLinks + j;
              __m512bh x[Q];
#pragma GCC unroll 2
              for (int g = 0; g < Q; ++g) x[g] = pairs(queries[g] + at * counts[g]);
#pragma GCC unroll 8
              for (int i = 0; i < T; ++i) {
                const __m512bh y = pair(row[i] + 2 * at);
#pragma GCC unroll 2
                for (int g = 0; g < Q; ++g) sum[c][i][g] = times(sum[c][i][g], x[g], y);
              }
            }
          if (half)
            later.template fetch<T * 64>();
          else
            ahead.template fetch<T * 64, 3>();
        }
#pragma GCC unroll 8
        for (int i = 0; i < T; ++i)
#pragma GCC unroll 2
          for (int g = 0; g < Q; ++g) {
            const V both = sum[0][i][g] + sum[1][i][g];
            total[i][g] = half ? total[i][g] + both : both;
          }
      }
#pragma GCC unroll 8
      for (int i = 0; i < T; ++i)
        if (t + i < high)
#pragma GCC unroll 2
          for (int g = 0; g < Q; ++g) put_row(total[i][g], counts[g], to[g] + (t + i) * counts[g]);
    }
  }

  static void add_half(int count, const float* weight, const float* shares, const Bits* values, int begin, int end,
                       float* o, int64_t stride) {
    for (int g = 0; g < count;) {
      const int left = count - g, blocks = (left + kQueries - 1) / kQueries, some = (left + blocks - 1) / blocks;
      const auto f = sums_of(some);
      f(count, weight + g, shares + g, values, begin, end, o + g * stride, stride);
      g += some;
    }
  }

  // o [G, 32].
  template <int G>
  static void sums(int count, const float* weight, const float* shares, const Bits* values, int begin, int end,
                   float* o, int64_t stride) {
    V a[G] = {}, b[G] = {};
    for (int from = begin & -kInStep; from < end; from += kInStep) {
      const int last = int(min(end - from + 1, kInStep)) / 2;
      for (int i = int(max(begin - from, 0)) / 2; i < last; ++i) {
        const Bits* const at = values + value_place(from) + i * kInStep;
        const float* const w = weight + (from + i) * count;
        const __m512bh x = (__m512bh)_mm512_load_si512(at), y = (__m512bh)_mm512_load_si512(at + W * kInStep);
#pragma GCC unroll 8
        for (int g = 0; g < G; ++g) {
          const __m512bh z = pair(w + g);
          a[g] = times(a[g], z, x), b[g] = times(b[g], z, y);
        }
      }
    }
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) {
      const V share = set(shares[g]);
      store(o + g * stride, a[g] * share), store(o + g * stride + W, b[g] * share);
    }
  }

  static decltype(&sums<1>) sums_of(int count) {
    constexpr decltype(&sums<1>) all[] = {sums<1>, sums<2>, sums<3>, sums<4>, sums<5>, sums<6>, sums<7>, sums<8>};
    return all[count - 1];
  }
};
