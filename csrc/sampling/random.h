// Philox 4x64 with 10 rounds (Salmon et al., Parallel random numbers: as easy as 1, 2, 3; SC 2011), as numpy starts it.
#pragma once

#include <cstdint>

namespace lamina::sampling {

// 53 random bits of (seed, index): the number that numpy.random.Philox(key=seed, counter=index) gives first, times 2^53.
inline std::uint64_t random_bits(std::uint64_t seed, std::uint64_t index) {
  using Wide = unsigned __int128;
  std::uint64_t c0 = index + 1, c1 = c0 == 0, c2 = 0, c3 = 0, k0 = seed, k1 = 0;  // numpy counts up before it draws
  for (int round = 0; round < 10; ++round) {
    const Wide a = static_cast<Wide>(0xD2E7470EE14C6C93u) * c0, b = static_cast<Wide>(0xCA5A826395121157u) * c2;
    c0 = static_cast<std::uint64_t>(b >> 64) ^ c1 ^ k0;
    c1 = static_cast<std::uint64_t>(b);
    c2 = static_cast<std::uint64_t>(a >> 64) ^ c3 ^ k1;
    c3 = static_cast<std::uint64_t>(a);
    k0 += 0x9E3779B97F4A7C15u;
    k1 += 0xBB67AE8584CAA73Bu;
  }
  return c0 >> 11;
}

}  // namespace lamina::sampling
