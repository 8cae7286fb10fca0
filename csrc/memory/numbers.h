// Numbers of the wire and of stores, by their bits.
#pragma once

#include <cstdint>

#include "bits.h"

namespace lamina::memory_worker {

using Bits = std::uint32_t;

constexpr Bits kSign = 0x80000000u, kInfinity = 0x7f800000u;

struct BFloat16 {
  std::uint16_t bits;
};
struct Half {
  std::uint16_t bits;
};
struct Int8Number {
  std::int8_t value;
};
struct Fp8Number {
  std::uint8_t bits;  // OCP E4M3
};

inline float widen(float x) { return x; }
inline float widen(BFloat16 x) { return from_bits(Bits(x.bits) << 16); }
inline float widen(Half x) {
  const Bits size = Bits(x.bits & 0x7fff) << 13;
  const Bits finite = to_bits(from_bits(size) * 0x1p112f);  // subnormal ones, too
  return from_bits((size >= 0x7c00u << 13 ? kInfinity | size : finite) | Bits(x.bits & 0x8000) << 16);
}
inline float widen(Int8Number x) { return float(x.value); }
inline float widen(Fp8Number x) {
  const Bits size = x.bits & 0x7f, sign = Bits(x.bits & 0x80) << 24;
  return from_bits((size == 0x7f ? kInfinity | 1u << 22 : to_bits(from_bits(size << 20) * 0x1p120f)) | sign);
}

// What `widen` has made of a number, as that again.
template <class T>
T narrow(float x);
template <>
inline float narrow(float x) {
  return x;
}
template <>
inline BFloat16 narrow(float x) {
  return {std::uint16_t(to_bits(x) >> 16)};
}
template <>
inline Half narrow(float x) {
  const Bits size = to_bits(x) & ~kSign, sign = to_bits(x) >> 16 & 0x8000;
  const Bits finite = to_bits(from_bits(size) * 0x1p-112f) >> 13;
  return {std::uint16_t((size >= kInfinity ? 0x7c00u | (size & ~kInfinity) >> 13 : finite) | sign)};
}

}  // namespace lamina::memory_worker
