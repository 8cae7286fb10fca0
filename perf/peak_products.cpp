// The most products that one core does: the floor of bench_linear.py for many rows. Compiled by it, for this CPU.
#include <immintrin.h>

// Chains of products in registers, as many as hide the latency of one; returns how many floating point operations
// `rounds` were, to be divided by the time.
extern "C" double peak_float(long rounds) {
#if defined(__AVX512F__)
  using Vector = __m512;
#else
  using Vector = __m256;
#endif
  constexpr int kChains = 12, kWidth = sizeof(Vector) / sizeof(float);
  Vector sums[kChains] = {}, a = Vector{} + 1.0f, b = Vector{} + 0.5f;
  asm("" : "+v"(a), "+v"(b));  // or the compiler would know what they are
  for (long i = 0; i < rounds; ++i)
    for (auto& s : sums) {
      s = s * a + b;  // not a * b + s: that product would be one for all rounds
      asm volatile("" : "+v"(s));
    }
  return 2.0 * kWidth * kChains * double(rounds);
}

// Of floats, where there is none of bf16: it is widened there.
extern "C" double peak_bf16(long rounds) {
#if defined(__AVX512BF16__)
  constexpr int kChains = 16;
  __m512 sums[kChains];
  for (auto& s : sums) s = _mm512_setzero_ps();
  const __m512bh a = (__m512bh)_mm512_set1_epi16(0x3f80), b = (__m512bh)_mm512_set1_epi16(0x3f00);
  for (long i = 0; i < rounds; ++i)
    for (auto& s : sums) {
      s = _mm512_dpbf16_ps(s, a, b);
      asm volatile("" : "+v"(s));
    }
  return 2.0 * 32 * kChains * double(rounds);
#else
  return peak_float(rounds);
#endif
}
