// fp16 by integers, for CPUs without instructions for it.
#pragma once

#include <cstdint>

#include "bits.h"

namespace lamina::recurrence {

inline float of_half(std::uint16_t half) {
  const std::uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, rest = half & 0x3ff;
  if (exponent == 31) return from_bits(sign | 0x7f800000u | rest << 13);
  if (exponent) return from_bits(sign | (exponent + 112) << 23 | rest << 13);
  const float small = static_cast<float>(rest) * 0x1p-24f;
  return sign ? -small : small;
}

// Rounded to the nearest, of two as near to the even one.
inline std::uint16_t half_of(float value) {
  const std::uint32_t bits = to_bits(value), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
  const auto with_sign = [sign](std::uint32_t rest) { return static_cast<std::uint16_t>(sign | rest); };
  if (size > 0x7f800000u) return with_sign(0x7e00u | (size >> 13 & 0x3ffu));
  if (size >= 0x477ff000u) return with_sign(0x7c00u);  // 65520 and more
  if (size < 0x38800000u) {  // below 2^-14: a sum with 1/2 has 2^-24 as its last bit
    const float sum = from_bits(size) + 0.5f;
    return with_sign(to_bits(sum) - 0x3f000000u);
  }
  return with_sign((size + 0xfffu + (size >> 13 & 1u) - 0x38000000u) >> 13);
}

}  // namespace lamina::recurrence
