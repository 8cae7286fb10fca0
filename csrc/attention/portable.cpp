// Any CPU: vectors of four, as SSE2 and NEON have them.
#include <type_traits>
#include <utility>

#include "attention.h"

namespace lamina::attention {
namespace {

constexpr int W = 4;
constexpr bool kThrees = false;
using V = float __attribute__((vector_size(16)));
using I = int __attribute__((vector_size(16)));

inline V set(float x) { return V{x, x, x, x}; }
inline void once(I&) {}
inline V fma(V a, V b, V c) { return a * b + c; }
inline V max(V a, V b) { return a > b ? a : b; }

// The sums over a, b, c and d.
inline V sum4(V a, V b, V c, V d) {
  const auto sum = [](V x) { return (x[0] + x[2]) + (x[1] + x[3]); };
  return V{sum(a), sum(b), sum(c), sum(d)};
}

inline V from_half(const std::uint16_t* p) {
  const I bits = {p[0], p[1], p[2], p[3]};
  const I size = bits & 0x7fff;
  const V finite = (V)(size << 13) * 0x1p112f;  // also right for subnormal numbers
  const I special = (size << 13) | 0x7f800000;  // infinity and NaN
  return (V)((size >= 0x7c00 ? special : (I)finite) | (bits & 0x8000) << 16);
}

// To nearest, ties to even.
inline void to_half(std::uint16_t* p, V x) {
  for (int i = 0; i < W; ++i) {
    std::uint32_t bits;
    const float value = x[i];
    __builtin_memcpy(&bits, &value, 4);
    const std::uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    std::uint32_t half;
    if (size > 0x7f800000) {
      half = 0x7e00;
    } else if (size >= 0x47800000) {  // 2 ** 16
      half = 0x7c00;
    } else if (size >= 0x38800000) {  // 2 ** -14, the smallest normal one
      half = (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
    } else {
      float magnitude;
      __builtin_memcpy(&magnitude, &size, 4);
      magnitude += 0.5f;  // its last bit is then 2 ** -24, that of a subnormal half
      __builtin_memcpy(&half, &magnitude, 4);
      half -= 0x3f000000;
    }
    p[i] = std::uint16_t(sign | half);
  }
}

inline V from_int8(const void* p) {
  const auto* x = static_cast<const signed char*>(p);
  return V{float(x[0]), float(x[1]), float(x[2]), float(x[3])};
}
inline V from_fp8(const void* p) {
  const auto* x = static_cast<const unsigned char*>(p);
  std::uint16_t half[W];
  for (int i = 0; i < W; ++i) half[i] = std::uint16_t((x[i] & 0x80) << 8 | (x[i] & 0x7f) << 7);
  return from_half(half);
}

#include "kernel.h"
#include "loops.h"
#include "select.h"
#include "tally.h"
#include "task.h"
#include "variant.h"

}  // namespace

constexpr Variant kPortable = variant("portable", [] { return true; });

}  // namespace lamina::attention
