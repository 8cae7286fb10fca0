// Products of pairs by AVX512-BF16, for pairs.h.
class Product {
 public:
  static constexpr int kParts = 1;  // floats that a pair of a query, or of weights, takes

  explicit Product(__m512i keys) : x_((__m512bh)keys) {}
  explicit Product(const float* query) : x_((__m512bh)attention::load(query)) {}

  static void store_query(float* to, __m512i pairs) { store(to, (V)pairs); }
  V times(const Product& y, V sum) const { return (V)_mm512_dpbf16_ps((__m512)sum, x_, y.x_); }

  // Weights x of 16 tokens, and y of those that follow, as pairs of bf16. Returns `total` plus what is stored.
  static V store_weights(V total, V x, V y, float* to) {
    const __m512bh pairs = _mm512_cvtne2ps_pbh((__m512)y, (__m512)x);
    store(to, (V)pairs);
    return (V)_mm512_dpbf16_ps((__m512)total, pairs, (__m512bh)_mm512_set1_epi16(0x3f80));
  }

  // 32 numbers of V of two tokens.
  class Values {
   public:
    Values(__m512i x, __m512i y) {
      const __m512i up = _mm512_broadcast_i32x4(_mm_setr_epi32(0x0100'0000, 0x0504'0000, 0x0908'0000, 0x0d0c'0000));
      const __m512i down = _mm512_broadcast_i32x4(_mm_setr_epi32(0x0302, 0x0706, 0x0b0a, 0x0f0e));
      even_ = (__m512bh)_mm512_mask_shuffle_epi8(x, 0xcccccccccccccccc, y, up);
      odd_ = (__m512bh)_mm512_mask_shuffle_epi8(y, 0x3333333333333333, x, down);
    }

    // Adds both tokens by their weights w: numbers of even index to a, of odd index to b.
    [[gnu::always_inline]] void add(const float* w, V& a, V& b) const { add(even_, *w, a), add(odd_, *w, b); }

   private:
    // The compiler would load w once for two of these, into a register of its own.
    [[gnu::always_inline]] static void add(__m512bh x, const float& w, V& sum) {
      asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(x), "m"(w));
    }

    __m512bh even_, odd_;
  };

 private:
  __m512bh x_;
};
