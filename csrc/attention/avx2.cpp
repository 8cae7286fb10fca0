// AVX2 with FMA and F16C.
#include "attention.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <type_traits>
#include <utility>
#include <vector>

#include "cpu.h"
#include "target.h"

LAMINA_TARGET("avx2,fma,f16c")

namespace lamina::attention {
namespace {

constexpr int W = 8;
using V = float __attribute__((vector_size(32)));
using I = int __attribute__((vector_size(32)));

inline V set(float x) { return (V)_mm256_set1_ps(x); }
inline void once(I& x) { asm("" : "+x"(x)); }
inline V fma(V a, V b, V c) { return (V)_mm256_fmadd_ps(a, b, c); }

// Twelve sums, three keys and a query fill the registers. A query must be one statement. Else GCC keeps two queries at a
// time, and sums in memory, where an addition takes longer than a product.
constexpr bool kThrees = true;
[[gnu::always_inline]] inline void add_three(V* sums, const V& q, const V* x) {
  V y;
  asm volatile("vmovaps %4, %3\n\tvfmadd231ps %5, %3, %0\n\tvfmadd231ps %6, %3, %1\n\tvfmadd231ps %7, %3, %2"
               : "+x"(sums[0]), "+x"(sums[1]), "+x"(sums[2]), "=&x"(y)
               : "m"(q), "x"(x[0]), "x"(x[1]), "x"(x[2]));
}

inline V max(V a, V b) { return (V)_mm256_max_ps(a, b); }

// A blend costs less than a shuffle, which takes the place of a product.
inline V quads(V a, V b) { return (V)_mm256_blend_ps(a, b, 0xcc) + (V)_mm256_shuffle_ps(a, b, 0x4e); }
inline V pairs(V a, V b) {
  const __m256 others = _mm256_blend_ps(a, b, 0x55);
  return (V)_mm256_blend_ps(a, b, 0xaa) + (V)_mm256_shuffle_ps(others, others, 0xb1);
}

// In each four lanes, the sums over those of a, b, c and d.
inline V sum4(V a, V b, V c, V d) { return pairs(quads(a, c), quads(b, d)); }

inline V from_half(const std::uint16_t* p) {
  return (V)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void to_half(std::uint16_t* p, V x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

inline V from_int8(const void* p) {
  return (V)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))));
}
inline V from_fp8(const void* p) {
  const __m128i x = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64(static_cast<const __m128i*>(p))), 7);
  return (V)_mm256_cvtph_ps(_mm_and_si128(x, _mm_set1_epi16(short(0xbf80))));
}

#include "kernel.h"
#include "loops.h"
#include "select.h"
#include "tally.h"
#include "task.h"
#include "variant.h"

}  // namespace

constexpr Variant kAvx2 = variant("avx2", avx2_usable);

}  // namespace lamina::attention

LAMINA_TARGET_END
#endif
