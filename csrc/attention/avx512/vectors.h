// Vectors of AVX-512 F, BW, DQ and VL. Included by both variants that have them, in their own namespaces.

constexpr int W = 16;
constexpr bool kThrees = false;
using V = float __attribute__((vector_size(64)));
using I = int __attribute__((vector_size(64)));

inline V set(float x) { return (V)_mm512_set1_ps(x); }
inline void once(I& x) { asm("" : "+v"(x)); }
inline V fma(V a, V b, V c) { return (V)_mm512_fmadd_ps(a, b, c); }
inline V max(V a, V b) { return (V)_mm512_max_ps(a, b); }

inline V pairs(V a, V b) { return (V)_mm512_unpacklo_ps(a, b) + (V)_mm512_unpackhi_ps(a, b); }
inline V quads(V a, V b) {
  const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
  return (V)_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)) + (V)_mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
}

// In each four lanes, the sums over those of a, b, c and d.
inline V sum4(V a, V b, V c, V d) { return quads(pairs(a, b), pairs(c, d)); }

inline V from_half(const std::uint16_t* p) {
  return (V)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void to_half(std::uint16_t* p, V x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
inline V from_int8(const void* p) {
  return (V)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
}
inline V from_fp8(const void* p) {
  const __m256i x = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p))), 7);
  return (V)_mm512_cvtph_ps(_mm256_and_si256(x, _mm256_set1_epi16(short(0xbf80))));
}
