#include "sampling/sampling.h"

#include <cmath>

namespace lamina::sampling {
namespace {

struct Vec {
  static constexpr std::size_t kWidth = 1;
  using F = float;
  using I = std::int32_t;
  using M = bool;
  struct Sum {
    std::int64_t total = 0;
    void add(F v) { total += std::llrint(v); }
    std::int64_t value() const { return total; }
  };
  template <class T>
  static F load(const T* p) {
    return sampling::to_float(*p);
  }
  static void store(std::int64_t* p, F v) { *p = std::llrint(v); }
  static F all(float v) { return v; }
  static I all(int v) { return v; }
  static F mul(F a, F b) { return a * b; }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F max(F a, F b) { return a > b ? a : b; }
  static I add(I a, I b) { return a + b; }
  static I sub(I a, I b) { return a - b; }
  static I shift_right(I a) { return a >> kLevelBits; }
  template <int kBy>
  static I shift_left(I a) {
    return static_cast<I>(static_cast<std::uint32_t>(a) << kBy);
  }
  static I round(F v) { return static_cast<I>(std::llrint(v)); }
  static F to_float(I v) { return static_cast<float>(v); }
  static F as_float(I v) { return from_bits(static_cast<std::uint32_t>(v)); }
  static M at_least(F a, F b) { return a >= b; }
  static M at_least(I a, I b) { return a >= b; }
  static M both(M a, M b) { return a && b; }
  static M either(M a, M b) { return a || b; }
  static M none() { return false; }
  static M is_nan(F v) { return v != v; }
  static F keep(M m, F v) { return m ? v : 0.0f; }
  static float largest(F v) { return v; }
  static unsigned bits(M m) { return m; }
};

#include "sampling/kernel.h"

}  // namespace

const Kernel* portable_kernels() { return kernels; }

const Variant* variants() {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  static const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  static const Variant all[kVariants] = {
      {"avx512", has_avx512, avx512_kernels()}, {"avx2", has_avx2, avx2_kernels()}, {"portable", true, kernels}};
#else
  static const Variant all[kVariants] = {{"portable", true, kernels}, {"", false, nullptr}, {"", false, nullptr}};
#endif
  return all;
}

}  // namespace lamina::sampling
