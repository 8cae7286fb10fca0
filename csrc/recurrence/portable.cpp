// Any CPU. Products are rounded before they are added.
#include <cmath>
#include <initializer_list>
#include <type_traits>

#include "bits.h"
#include "recurrence/halves.h"
#include "recurrence/recurrence.h"

namespace lamina::recurrence {
namespace {

constexpr int W = 4, kWide = 4;
using V = float __attribute__((vector_size(16)));

inline V set(float x) { return V{x, x, x, x}; }
inline V fma(V a, V b, V c) { return a * b + c; }
inline void stream(float* p, V x) { __builtin_memcpy(p, &x, sizeof x); }
inline void fence() {}
inline float root(float x) { return std::sqrt(x); }

inline void halves_to_floats(const char* from, float* to, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    std::uint16_t bits;
    __builtin_memcpy(&bits, from + 2 * i, 2);
    to[i] = of_half(bits);
  }
}

inline void floats_to_halves(const float* from, char* to, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint16_t bits = half_of(from[i]);
    __builtin_memcpy(to + 2 * i, &bits, 2);
  }
}

#include "recurrence/kernel.h"

}  // namespace

constexpr Kernel kPortable{run, copy_past_caches};

}  // namespace lamina::recurrence
