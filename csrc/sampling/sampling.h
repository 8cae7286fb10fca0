// Drawing tokens from logits. lamina/ops/sampling/__init__.py says which token a draw gives; nothing here may give
// another.
//
// All arithmetic whose rounding shows is either one operation of IEEE 754 in fp32 at a time (this folder is compiled
// without fused products) or exact, in integers. So every instruction set gives the same bits, and so does torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "bits.h"

namespace lamina::sampling {

constexpr std::size_t kBlock = 1024;  // tokens that a kernel takes at a time
constexpr std::size_t kPart = 64;  // tokens that share a maximum
constexpr std::size_t kParts = kBlock / kPart;  // of a block
constexpr std::size_t kBitsOfWord = 16;  // tokens of a word of allowed tokens; the lowest bit is the first token's

constexpr int kLevelBits = 24;  // levels to a doubling of probability
constexpr int kLowest = -42 * (1 << kLevelBits);  // the lowest level; its mass is 0
constexpr int kMassBits = 40;  // the best token has the mass 2^40

// 2^r for -1/2 <= r < 1/2, to 2e-7; coefficients of r, r^2 ... after 1.
constexpr float kPower[5] = {0x1.62e42ap-1f, 0x1.ebf9bcp-3f, 0x1.c6b754p-5f, 0x1.3cea8cp-7f, 0x1.5bb9e6p-10f};

enum class Type { kFloat, kBf16, kHalf };
constexpr int kTypes = 3;

struct Bf16 {
  std::uint16_t bits;
};
struct Half {
  std::uint16_t bits;
};

// Its bits.
template <class T>
constexpr std::uint32_t kMinusInfinity = 0xff800000;
template <>
inline constexpr std::uint16_t kMinusInfinity<Bf16> = 0xff80;
template <>
inline constexpr std::uint16_t kMinusInfinity<Half> = 0xfc00;

inline float to_float(float v) { return v; }
inline float to_float(Bf16 v) { return from_bits(static_cast<std::uint32_t>(v.bits) << 16); }
inline float to_float(Half v) {
  const std::uint32_t sign = (v.bits & 0x8000u) << 16, exponent = v.bits >> 10 & 31, rest = v.bits & 0x3ff;
  if (exponent == 31) return from_bits(sign | 0x7f800000u | rest << 13);
  if (exponent) return from_bits(sign | (exponent + 112) << 23 | rest << 13);
  const float small = static_cast<float>(rest) * 0x1p-24f;
  return sign ? -small : small;
}

// What turns a row's logits into levels and masses.
struct Scale {
  float best;  // the largest logit
  float factor;  // levels to 1 of logits
  std::int32_t cut;  // below this level a mass is 0
};

// One instruction set's code for logits of one type. Each function takes a whole block; the first one also takes parts.
struct Kernel {
  // The maxima of a block's parts; whether some logit is NaN.
  bool (*scan)(const void* x, float* maxima);
  // Masses of the logits that are at least ``floor``: their sum, or each.
  std::int64_t (*sum)(const void* x, const Scale& scale, float floor);
  void (*fill)(const void* x, const Scale& scale, float floor, std::int64_t* masses);
  // Of a part: bit i says whether x[i] >= floor.
  std::uint64_t (*at_least)(const void* x, float floor);
  // Copies logits; minus infinity takes the place of those whose bit is 0.
  void (*keep)(const void* x, const std::uint16_t* bits, void* out);
};

struct Variant {
  const char* name;
  bool usable;
  const Kernel* kernels;  // by Type
};

constexpr std::size_t kVariants = 3;
const Variant* variants();  // best first

const Kernel* portable_kernels();
#if defined(__x86_64__)
const Kernel* avx2_kernels();
const Kernel* avx512_kernels();
#endif

}  // namespace lamina::sampling
