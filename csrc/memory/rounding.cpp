#include "memory/rounding.h"

#include <algorithm>

#include "memory/numbers.h"

namespace lamina::memory_worker {
namespace {

using attention::Dtype;

constexpr std::size_t kPart = 64;  // numbers at once

// To the nearest integer, ties to even, where |x| < 2^22.
float to_integer(float x) { return (x + 12582912.0f) - 12582912.0f; }

struct Int8 {
  static constexpr float most = 127;
  static std::uint8_t of(float x) { return std::uint8_t(std::int8_t(to_integer(x))); }
};

// OCP E4M3: three bits after the point; below 2^-6 multiples of 2^-9.
struct Fp8 {
  static constexpr float most = 448;
  static std::uint8_t of(float x) {
    const Bits all = to_bits(x), size = all & ~kSign;
    const Bits small = Bits(std::int32_t(to_integer(from_bits(size) * 512.0f)));
    const Bits normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120u << 3);
    return std::uint8_t((size < to_bits(0x1p-6f) ? small : normal) | (all >> 24 & 0x80));
  }
};

template <class Form, class T>
void round_as(const char* from, std::size_t rows, std::size_t dim, char* bytes, float* scales) {
  float x[kPart];
  const auto load = [&](std::size_t row, std::size_t d) {
    T part[kPart];
    const std::size_t count = std::min(kPart, dim - d);
    std::memcpy(part, from + (row * dim + d) * sizeof(T), count * sizeof(T));
    for (std::size_t i = 0; i < count; ++i) x[i] = widen(part[i]);
    return count;
  };
  for (std::size_t row = 0; row < rows; ++row) {
    std::int32_t largest = 0;  // as integers sizes have the same order, and NaN is above all
    for (std::size_t d = 0; d < dim; d += kPart) {
      const std::size_t count = load(row, d);
      for (std::size_t i = 0; i < count; ++i) largest = std::max(largest, std::int32_t(to_bits(x[i]) & ~kSign));
    }
    const float scale = scales[row] = from_bits(Bits(largest)) / Form::most;
    for (std::size_t d = 0; d < dim; d += kPart) {
      const std::size_t count = dim > kPart ? load(row, d) : dim;
      auto* to = reinterpret_cast<std::uint8_t*>(bytes) + row * dim + d;
      for (std::size_t i = 0; i < count; ++i) {
        const float y = x[i] / scale;  // NaN for 0 / 0, and if the row has an infinity or NaN
        const float bound = y < -Form::most ? -Form::most : y > Form::most ? Form::most : y;
        to[i] = Form::of(y == y ? bound : 0.0f);
      }
    }
  }
}

template <class Form>
void round_to(Dtype wire, const char* from, std::size_t rows, std::size_t dim, char* bytes, float* scales) {
  const auto round = wire == Dtype::kFloat32    ? round_as<Form, float>
                     : wire == Dtype::kBFloat16 ? round_as<Form, BFloat16>
                                                : round_as<Form, Half>;
  round(from, rows, dim, bytes, scales);
}

}  // namespace

void round_rows(Dtype wire, attention::Stored kind, const char* from, std::size_t rows, std::size_t dim, char* bytes,
                float* scales) {
  (kind == attention::kInt8 ? round_to<Int8> : round_to<Fp8>)(wire, from, rows, dim, bytes, scales);
}

}  // namespace lamina::memory_worker
