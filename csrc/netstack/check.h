// What guards a frame within one host: a checksum of 16 bytes, against accidents.
//
// CRC-32C (RFC 3720, appendix B.4) over each of four interleaved lanes of 8-byte words; four chains keep the
// instruction's latency hidden.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lamina {

constexpr std::uint64_t kCheckBytes = 16;
constexpr std::uint64_t kBlock = 128;

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "frames, seqnos and payloads are little-endian");

inline std::uint64_t load64(const std::uint8_t* p) {
  std::uint64_t word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

namespace crc {

using Lanes = std::array<std::uint32_t, 4>;

constexpr std::array<std::uint32_t, 256> make_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78 : 0);
    table[i] = crc;
  }
  return table;
}
inline constexpr std::array<std::uint32_t, 256> kTable = make_table();

inline void blocks_portable(Lanes& lanes, const std::uint8_t* p, std::uint64_t count) {
  for (std::uint64_t word = 0; word < count * kBlock / 8; ++word)
    for (int byte = 0; byte < 8; ++byte) {
      std::uint32_t& crc = lanes[word % 4];
      crc = crc >> 8 ^ kTable[(crc ^ *p++) & 0xff];
    }
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) inline void blocks_sse42(Lanes& lanes, const std::uint8_t* p, std::uint64_t count) {
  std::uint64_t a = lanes[0], b = lanes[1], c = lanes[2], d = lanes[3];
  for (const std::uint8_t* end = p + count * kBlock; p != end; p += 32) {
    a = _mm_crc32_u64(a, load64(p));
    b = _mm_crc32_u64(b, load64(p + 8));
    c = _mm_crc32_u64(c, load64(p + 16));
    d = _mm_crc32_u64(d, load64(p + 24));
  }
  lanes = {std::uint32_t(a), std::uint32_t(b), std::uint32_t(c), std::uint32_t(d)};
}
#endif

inline void blocks(Lanes& lanes, const std::uint8_t* p, std::uint64_t count) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) return blocks_sse42(lanes, p, count);
#endif
  blocks_portable(lanes, p, count);
}

}  // namespace crc

// The check of one part of one frame, over (part, count of the frame in its direction, bytes).
class Check {
 public:
  Check(std::uint64_t part, std::uint64_t frame) {
    std::memcpy(buffer_, &part, 8);
    std::memcpy(buffer_ + 8, &frame, 8);
  }

  void update(const std::uint8_t* p, std::uint64_t bytes) {
    while (bytes) {
      if (fill_ == kBlock) consume(buffer_, 1), fill_ = 0;
      if (fill_ == 0 && bytes > kBlock) {  // a last block stays for finish
        const std::uint64_t count = (bytes - 1) / kBlock;
        consume(p, count);
        p += count * kBlock;
        bytes -= count * kBlock;
      }
      const std::uint64_t part = std::min(bytes, kBlock - fill_);
      std::memcpy(buffer_ + fill_, p, part);
      fill_ += part;
      p += part;
      bytes -= part;
    }
  }

  void finish(std::uint8_t out[kCheckBytes]) {
    std::memset(buffer_ + fill_, 0, kBlock - fill_);
    total_ += fill_;
    crc::blocks(lanes_, buffer_, 1);
    lanes_[0] ^= std::uint32_t(total_);
    std::memcpy(out, lanes_.data(), kCheckBytes);
  }

 private:
  void consume(const std::uint8_t* p, std::uint64_t count) {
    crc::blocks(lanes_, p, count);
    total_ += count * kBlock;
  }

  crc::Lanes lanes_{~0u, ~0u, ~0u, ~0u};
  std::uint8_t buffer_[kBlock];
  std::uint64_t fill_ = 16, total_ = 0;
};

inline bool equal(const std::uint8_t a[kCheckBytes], const std::uint8_t b[kCheckBytes]) {
  return ((load64(a) ^ load64(b)) | (load64(a + 8) ^ load64(b + 8))) == 0;
}

}  // namespace lamina
