#if defined(__x86_64__)
#include "sampling/sampling.h"

#include <immintrin.h>

#include <algorithm>

#pragma GCC push_options
#pragma GCC target("avx2,f16c")
namespace lamina::sampling {
namespace {

struct Vec {
  static constexpr std::size_t kWidth = 8;
  static constexpr std::size_t kTogether = 2;
  using F = __m256;
  using I = __m256i;
  using M = __m256;
  // Integers below 2^53 are exact in fp64, and so are their sums.
  struct Sum {
    __m256d low, high;
    Sum() : low(_mm256_setzero_pd()), high(_mm256_setzero_pd()) {}
    void add(F v) {
      const F whole = _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(whole)));
      high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps(whole, 1)));
    }
    std::int64_t value() const {
      alignas(32) double part[4];
      _mm256_store_pd(part, _mm256_add_pd(low, high));
      return static_cast<std::int64_t>(part[0] + part[1] + part[2] + part[3]);
    }
  };
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static F load(const Bf16* p) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
  }
  static F load(const Half* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static void store(std::int64_t* p, F v) {
    alignas(32) float whole[kWidth];
    _mm256_store_ps(whole, _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    for (std::size_t i = 0; i < kWidth; ++i) p[i] = static_cast<std::int64_t>(whole[i]);
  }
  static F all(float v) { return _mm256_set1_ps(v); }
  static I all(int v) { return _mm256_set1_epi32(v); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  using Level = I;
  using Whole = I;
  static Level level(F steps) { return _mm256_cvtps_epi32(steps); }
  static Whole whole(Level level) {
    return _mm256_srai_epi32(_mm256_add_epi32(level, all(1 << (kLevelBits - 1))), kLevelBits);
  }
  static F rest(Level level, Whole whole) {
    return mul(_mm256_cvtepi32_ps(_mm256_sub_epi32(level, _mm256_slli_epi32(whole, kLevelBits))), all(0x1p-24f));
  }
  static F doubled(F power, Whole whole) {
    const I two = _mm256_slli_epi32(_mm256_add_epi32(whole, all(127 + kMassBits)), 23);
    return mul(power, _mm256_castsi256_ps(two));
  }
  static M reaches(Level level, int cut) {
    const I least = all(cut);
    return _mm256_castsi256_ps(_mm256_or_si256(_mm256_cmpgt_epi32(level, least), _mm256_cmpeq_epi32(level, least)));
  }
  static M at_least(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_GE_OQ); }
  static M both(M a, M b) { return _mm256_and_ps(a, b); }
  static M either(M a, M b) { return _mm256_or_ps(a, b); }
  static M none() { return _mm256_setzero_ps(); }
  static M is_nan(F v) { return _mm256_cmp_ps(v, v, _CMP_UNORD_Q); }
  static F keep(M m, F v) { return _mm256_and_ps(m, v); }
  static float largest(F v) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
  }
  static unsigned bits(M m) { return static_cast<unsigned>(_mm256_movemask_ps(m)); }
};

#include "sampling/kernel.h"

}  // namespace

const Kernel* avx2_kernels() { return kernels; }

}  // namespace lamina::sampling
#pragma GCC pop_options
#endif
