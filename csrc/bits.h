// The 32 bits of a float, and back.
#pragma once

#include <cstdint>
#include <cstring>

namespace lamina {

inline float from_bits(std::uint32_t bits) {
  float v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

inline std::uint32_t to_bits(float v) {
  std::uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  return bits;
}

}  // namespace lamina
