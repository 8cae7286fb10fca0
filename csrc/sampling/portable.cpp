#include "sampling/sampling.h"

#include <cmath>

#include "cpu.h"

namespace lamina::sampling {
namespace {

struct Vec {
  static constexpr std::size_t kWidth = 1;
  static constexpr std::size_t kTogether = 1;
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
  static F mul(F a, F b) { return a * b; }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F max(F a, F b) { return a > b ? a : b; }
  using Level = I;
  using Whole = I;
  static Level level(F steps) { return static_cast<I>(std::llrint(steps)); }
  static Whole whole(Level level) { return (level + (1 << (kLevelBits - 1))) >> kLevelBits; }
  static F rest(Level level, Whole whole) { return static_cast<F>(level - whole * (1 << kLevelBits)) * 0x1p-24f; }
  static F doubled(F power, Whole whole) {
    return power * from_bits(static_cast<std::uint32_t>(whole + 127 + kMassBits) << 23);
  }
  static M reaches(Level level, int cut) { return level >= cut; }
  static M at_least(F a, F b) { return a >= b; }
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
  static const Variant all[kVariants] = {{"avx512", avx512_usable(), avx512_kernels()},
                                         {"avx2", avx2_usable(), avx2_kernels()},
                                         {"portable", true, kernels}};
#else
  static const Variant all[kVariants] = {{"portable", true, kernels}, {"", false, nullptr}, {"", false, nullptr}};
#endif
  return all;
}

}  // namespace lamina::sampling
