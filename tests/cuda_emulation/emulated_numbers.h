// Numbers as a GPU has them, for emulation.h: conversions, and pairs of 16 bits.
#pragma once
#include <cmath>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "attention/cuda/warp.cuh"

namespace lamina::attention::cuda {

inline float from_bits(u32 bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline u32 to_bits(float x) {
  u32 bits;
  std::memcpy(&bits, &x, sizeof x);
  return bits;
}

inline float to_float(float x) { return x; }
inline float to_float(BFloat16 x) { return from_bits(u32(x.bits) << 16); }
inline float to_float(Half x) {
  const int exponent = x.bits >> 10 & 31, mantissa = x.bits & 1023;
  float y = exponent == 31 ? (mantissa ? NAN : INFINITY)
            : exponent     ? std::ldexp(float(1024 + mantissa), exponent - 25)
                           : std::ldexp(float(mantissa), -24);
  return x.bits >> 15 ? -y : y;
}

inline void round_to(float& to, float x) { to = x; }
inline void round_to(BFloat16& to, float x) {
  const u32 bits = to_bits(x);
  to.bits = u16(x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline void round_to(Half& to, float x) {
  const u16 sign = u16(to_bits(x) >> 31 << 15);
  const float size = std::fabs(x);
  if (x != x) {
    to.bits = 0x7fff;
  } else if (size >= 65520.0f) {
    to.bits = u16(sign | 0x7c00);
  } else {
    int exponent = 0;
    std::frexp(size, &exponent);  // size < 2 ** exponent
    if (size == 0) exponent = -99;
    const int unit = (exponent < -13 ? -13 : exponent) - 11;
    const int steps = int(std::nearbyint(std::ldexp(size, -unit)));  // of 2 ** unit; 2048 carries over by itself
    to.bits = u16(sign | (((unit + 24) << 10) + steps));
  }
}

template <class T>
inline u32 pack(float low, float high) {
  T a, b;
  round_to(a, low), round_to(b, high);
  return u32(a.bits) | u32(b.bits) << 16;
}
template <class T>
inline float half_of(u32 x, int which) {
  return to_float(T{u16(x >> 16 * which)});
}

// Kernels run as -ftz=true compiles them where LAMINA_FTZ is defined: subnormal floats are zero, read or written. Within
// this scope they are not: an instruction that keeps them, whatever the flag.
class Subnormals {
 public:
#if defined(__x86_64__)
  explicit Subnormals(bool kept) : before_(_mm_getcsr()) { _mm_setcsr(kept ? before_ & ~kFlush : before_ | kFlush); }
  ~Subnormals() { _mm_setcsr(before_); }
  Subnormals(const Subnormals&) = delete;

 private:
  static constexpr unsigned kFlush = 0x8040;  // FTZ and DAZ of MXCSR
  const unsigned before_;
#else
  explicit Subnormals(bool) {}  // this processor flushes none
#endif
};

template <class T>
inline u32 fma_pair(u32 a, u32 b, u32 c) {
  const Subnormals kept(true);
  T x[2];
  for (int i = 0; i < 2; ++i) {
    const double sum = double(half_of<T>(a, i)) * half_of<T>(b, i) + half_of<T>(c, i);  // exact for what kernels ask
    round_to(x[i], float(sum));
  }
  return u32(x[0].bits) | u32(x[1].bits) << 16;
}
inline u32 pick_bytes(u32 a, u32 from) {
  u32 x = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 digit = from >> 4 * i & 15;
    const u32 byte = a >> 8 * (digit & 3) & 0xff;
    if ((digit & 4) && digit != 4) std::abort();
    x |= (digit == 4 ? 0 : digit & 8 ? (byte >> 7) * 0xff : byte) << 8 * i;
  }
  return x;
}

}  // namespace lamina::attention::cuda
