#if defined(__x86_64__)
#include "sampling/sampling.h"

#include <immintrin.h>

// GCC 12 takes the deliberately undefined registers of its own intrinsics for a mistake (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,f16c")
namespace lamina::sampling {
namespace {

struct Vec {
  static constexpr std::size_t kWidth = 16;
  static constexpr std::size_t kTogether = 8;
  using F = __m512;
  using I = __m512i;
  using M = __mmask16;
  struct Sum {
    __m512i low, high;
    Sum() : low(_mm512_setzero_si512()), high(_mm512_setzero_si512()) {}
    void add(F v) {
      low = _mm512_add_epi64(low, _mm512_cvtps_epi64(_mm512_castps512_ps256(v)));
      high = _mm512_add_epi64(high, _mm512_cvtps_epi64(_mm512_extractf32x8_ps(v, 1)));
    }
    std::int64_t value() const { return _mm512_reduce_add_epi64(_mm512_add_epi64(low, high)); }
  };
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static F load(const Bf16* p) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
  }
  static F load(const Half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static void store(std::int64_t* p, F v) {
    _mm512_storeu_si512(p, _mm512_cvtps_epi64(_mm512_castps512_ps256(v)));
    _mm512_storeu_si512(p + 8, _mm512_cvtps_epi64(_mm512_extractf32x8_ps(v, 1)));
  }
  static F all(float v) { return _mm512_set1_ps(v); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  // Levels are exact in fp32: they are fp32 numbers that were rounded to integers. So are their sums with a half.
  using Level = F;
  using Whole = F;
  static Level level(F steps) { return _mm512_roundscale_ps(steps, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static Whole whole(Level level) {
    return _mm512_roundscale_ps(add(mul(level, all(0x1p-24f)), all(0.5f)), _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  }
  static F rest(Level level, Whole whole) { return sub(mul(level, all(0x1p-24f)), whole); }
  static F doubled(F power, Whole whole) { return _mm512_scalef_ps(power, add(whole, all(1.0f * kMassBits))); }
  static M reaches(Level level, int cut) {
    return _mm512_cmpge_epi32_mask(_mm512_cvtps_epi32(level), _mm512_set1_epi32(cut));
  }
  static M at_least(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
  static M both(M a, M b) { return _kand_mask16(a, b); }
  static M either(M a, M b) { return _kor_mask16(a, b); }
  static M none() { return 0; }
  static M is_nan(F v) { return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q); }
  static F keep(M m, F v) { return _mm512_maskz_mov_ps(m, v); }
  static float largest(F v) { return _mm512_reduce_max_ps(v); }
  static unsigned bits(M m) { return m; }
};

#include "sampling/kernel.h"

}  // namespace

const Kernel* avx512_kernels() { return kernels; }

}  // namespace lamina::sampling
#pragma GCC pop_options
#endif
