// Stored numbers of 8 bits, widened without loss: one to a float, or two at a time to what tensor cores take.
//
// No float here may be subnormal, since CuPy compiles with -ftz=true, which makes it zero. So the small codes 0x01 to 0x07
// of fp8 are scaled first. 0x7f and 0xff, which are never stored, become 480 and -480, as in csrc/attention.
#pragma once
#include "attention/cuda/warp.cuh"

namespace lamina::attention::cuda {

LAMINA_DEVICE float to_float(Int8 x) { return float(x.number); }
// Its bits are those of a half, too small by 2 ** 8.
LAMINA_DEVICE float to_float(Fp8 x) {
  return to_float(Half{u16((x.bits & 0x80) << 8 | (x.bits & 0x7f) << 7)}) * 256.0f;
}

// Two codes become two T. A code is in the low byte of its half of a register. The high byte has zeros, or copies of its
// sign (kSigned): then one shift moves both the sign and the exponent to their places.
template <class T, class S>
struct Widen;

// 128 plus the low 7 bits, less 128 or 256.
template <>
struct Widen<BFloat16, Int8> {
  static constexpr bool kSigned = false;
  LAMINA_DEVICE static u32 of(u32 x) {
    return fma_pair<BFloat16>((x & 0x007f007f) | 0x43004300, 0x3f803f80, (x & 0x00800080) | 0xc300c300);
  }
};

// 1024 plus the code, counted from -128 on, less 1152.
template <>
struct Widen<Half, Int8> {
  static constexpr bool kSigned = false;
  LAMINA_DEVICE static u32 of(u32 x) { return fma_pair<Half>((x ^ 0x00800080) | 0x64006400, 0x3c003c00, 0xe480e480); }
};

// Sign, exponent and mantissa at their places, then times what the exponents' biases differ by; -0, so that -0 stays.
template <>
struct Widen<BFloat16, Fp8> {
  static constexpr bool kSigned = true;
  LAMINA_DEVICE static u32 of(u32 x) {
    return fma_pair<BFloat16>(x << 4 & 0x87f087f0, 0x7b807b80, 0x80008000);  // 2 ** 120
  }
};
template <>
struct Widen<Half, Fp8> {
  static constexpr bool kSigned = true;
  LAMINA_DEVICE static u32 of(u32 x) {
    return fma_pair<Half>(x << 7 & 0xbf80bf80, 0x5c005c00, 0x80008000);  // 2 ** 8
  }
};

// Codes `kFirst` and `kSecond` (0 to 3) of a register of four; the first one is in the low half.
template <class T, class S, int kFirst, int kSecond>
LAMINA_DEVICE u32 widen(u32 codes) {
  constexpr u32 zeros = 0x4040, signs = 0x8080 | kFirst << 4 | kSecond << 12;
  return Widen<T, S>::of(pick_bytes(codes, kFirst | kSecond << 8 | (Widen<T, S>::kSigned ? signs : zeros)));
}

}  // namespace lamina::attention::cuda
