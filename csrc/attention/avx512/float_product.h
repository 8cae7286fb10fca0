// Products of pairs of bf16 where AVX-512 multiplies floats alone, for pairs.h: numbers are widened in registers.
class Product {
 public:
  static constexpr int kParts = 2;  // floats that a pair of a query, or of weights, takes

  explicit Product(__m512i keys) : even_(low(keys)), odd_(high(keys)) {}
  explicit Product(const float* query) : even_(attention::load(query)), odd_(attention::load(query + W)) {}

  static void store_query(float* to, __m512i pairs) { store(to, low(pairs)), store(to + W, high(pairs)); }
  V times(const Product& y, V sum) const { return fma(odd_, y.odd_, fma(even_, y.even_, sum)); }

  // Weights x of 16 tokens, and y of those that follow. Returns `total` plus them.
  static V store_weights(V total, V x, V y, float* to) {
    store(to, x), store(to + W, y);
    return total + x + y;
  }

  // 32 numbers of V of two tokens.
  class Values {
   public:
    Values(__m512i x, __m512i y) : even_{low(x), low(y)}, odd_{high(x), high(y)} {}

    // Adds both tokens by their weights w: numbers of even index to a, of odd index to b.
    [[gnu::always_inline]] void add(const float* w, V& a, V& b) const {
      const V x = set(w[0]), y = set(w[1]);
      a = fma(y, even_[1], fma(x, even_[0], a));
      b = fma(y, odd_[1], fma(x, odd_[0], b));
    }

   private:
    V even_[2], odd_[2];
  };

 private:
  static V low(__m512i pairs) { return (V)_mm512_slli_epi32(pairs, 16); }
  static V high(__m512i pairs) { return (V)_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))); }

  V even_, odd_;
};
