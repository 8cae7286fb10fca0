// The most products that one core does: the floor of bench_linear.py for many rows. Compiled by it, for this CPU.
#include <immintrin.h>
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <chrono>
#include <cstdint>

namespace {

constexpr int kTogether = 10000;  // rounds

// Floating point operations a second of `rounds`, which does `flops` of them in each of kTogether rounds, on the thread
// that calls.
template <class Rounds>
double rate(double seconds, double flops, Rounds rounds) {
  const auto start = std::chrono::steady_clock::now();
  for (double done = 0;;) {
    rounds();
    done += kTogether * flops;
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
    if (passed.count() >= seconds) return done / passed.count();
  }
}

}  // namespace

// Chains of products in registers, as many as hide the latency of one.
extern "C" double peak_float(double seconds) {
#if defined(__AVX512F__)
  using Vector = __m512;
#else
  using Vector = __m256;
#endif
  constexpr int kChains = 12, kWidth = sizeof(Vector) / sizeof(float);
  Vector a = Vector{} + 1.0f, b = Vector{} + 0.5f;
  asm("" : "+v"(a), "+v"(b));  // or the compiler would know what they are
  return rate(seconds, 2.0 * kWidth * kChains, [&] {
    Vector sums[kChains] = {};
    for (int i = 0; i < kTogether; ++i)
      for (auto& s : sums) {
        s = s * a + b;  // not a * b + s: that product would be one for all rounds
        asm volatile("" : "+v"(s));
      }
  });
}

// By matrix registers if there are any; of floats where there is no product of bf16: it is widened there.
extern "C" double peak_bf16(double seconds) {
#if defined(__AMX_BF16__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // asm/prctl.h; bit of the registers' state
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData)) return 0;
  struct alignas(64) {
    std::uint8_t palette = 1, start = 0, reserved[14] = {};
    std::uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  alignas(64) static std::uint16_t some[4][16][32];  // products of zeros take less power, so clocks would run higher
  std::uint32_t state = 1;
  for (auto& tile : some)
    for (auto& row : tile)
      for (auto& x : row) x = std::uint16_t(0x3f00 | ((state = state * 1664525 + 1013904223) >> 16 & 0x80ff));
  asm volatile("" ::"r"(&config), "r"(some) : "memory");
  _tile_loadconfig(&config);
  _tile_loadd(0, some[0], 64);
  _tile_loadd(1, some[1], 64);
  _tile_loadd(2, some[2], 64);
  _tile_loadd(3, some[3], 64);
  const double found = rate(seconds, 4 * 2.0 * 16 * 16 * 32, [] {
    for (int i = 0; i < kTogether; ++i) {
      _tile_dpbf16ps(4, 0, 2);
      _tile_dpbf16ps(5, 0, 3);
      _tile_dpbf16ps(6, 1, 2);
      _tile_dpbf16ps(7, 1, 3);
    }
  });
  _tile_release();
  return found;
#elif defined(__AVX512BF16__)
  constexpr int kChains = 16;
  const __m512bh a = (__m512bh)_mm512_set1_epi16(0x3f80), b = (__m512bh)_mm512_set1_epi16(0x3f00);
  return rate(seconds, 2.0 * 32 * kChains, [&] {
    __m512 sums[kChains];
    for (auto& s : sums) s = _mm512_setzero_ps();
    for (int i = 0; i < kTogether; ++i)
      for (auto& s : sums) {
        s = _mm512_dpbf16_ps(s, a, b);
        asm volatile("" : "+v"(s));
      }
  });
#else
  return peak_float(seconds);
#endif
}
