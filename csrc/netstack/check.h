// What guards a frame within one host: a checksum of 16 bytes, against accidents.
//
// CRC-32C (RFC 3720, appendix B.4) over each of four interleaved lanes of 16-byte words. With AVX-512, a vector has a word
// of each lane, and carry-less products take four vectors at a time. Else four chains hide the latency of the instruction
// for CRC-32C.
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
  for (std::uint64_t word = 0; word < count * kBlock / 16; ++word)
    for (int byte = 0; byte < 16; ++byte) {
      std::uint32_t& crc = lanes[word % 4];
      crc = crc >> 8 ^ kTable[(crc ^ *p++) & 0xff];
    }
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) inline void blocks_sse42(Lanes& lanes, const std::uint8_t* p, std::uint64_t count) {
  std::uint64_t a = lanes[0], b = lanes[1], c = lanes[2], d = lanes[3];
  for (const std::uint8_t* end = p + count * kBlock; p != end; p += 64)
    for (int half = 0; half < 16; half += 8) {
      a = _mm_crc32_u64(a, load64(p + half));
      b = _mm_crc32_u64(b, load64(p + 16 + half));
      c = _mm_crc32_u64(c, load64(p + 32 + half));
      d = _mm_crc32_u64(d, load64(p + 48 + half));
    }
  lanes = {std::uint32_t(a), std::uint32_t(b), std::uint32_t(c), std::uint32_t(d)};
}

#define LAMINA_VECTORS __attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.2")))

// The 16 bytes of each lane, moved to words further on and added to these. `by` has x^(bits + 32) and x^(bits - 32)
// modulo the polynomial, reflected, for a distance of so many bits.
LAMINA_VECTORS inline __m512i folded(__m512i words, __m512i by, __m512i next) {
  const __m512i low = _mm512_clmulepi64_epi128(words, by, 0x00), high = _mm512_clmulepi64_epi128(words, by, 0x11);
  return _mm512_ternarylogic_epi64(low, high, next, 0x96);  // the sum of all three
}

constexpr std::uint64_t kVectorBlocks = 4;  // from so many blocks on

// Of an even number of blocks.
LAMINA_VECTORS inline void blocks_vectors(Lanes& lanes, const std::uint8_t* p, std::uint64_t count) {
  const __m512i by_four = _mm512_set4_epi64(0x9e4addf8, 0x740eef02, 0x9e4addf8, 0x740eef02);
  const __m512i by_one = _mm512_set4_epi64(0x493c7d27, 0xf20c0dfe, 0x493c7d27, 0xf20c0dfe);
  const __m512i begun = _mm512_setr_epi64(lanes[0], 0, lanes[1], 0, lanes[2], 0, lanes[3], 0);
  __m512i a = _mm512_xor_si512(_mm512_loadu_si512(p), begun), b = _mm512_loadu_si512(p + 64);
  __m512i c = _mm512_loadu_si512(p + 128), d = _mm512_loadu_si512(p + 192);
  for (const std::uint8_t* end = p + count * kBlock; (p += 256) != end;) {
    a = folded(a, by_four, _mm512_loadu_si512(p));
    b = folded(b, by_four, _mm512_loadu_si512(p + 64));
    c = folded(c, by_four, _mm512_loadu_si512(p + 128));
    d = folded(d, by_four, _mm512_loadu_si512(p + 192));
  }
  alignas(64) std::uint64_t left[8];
  _mm512_store_si512(left, folded(folded(folded(a, by_one, b), by_one, c), by_one, d));
  for (int lane = 0; lane < 4; ++lane)
    lanes[lane] = std::uint32_t(_mm_crc32_u64(_mm_crc32_u64(0, left[2 * lane]), left[2 * lane + 1]));
}

#undef LAMINA_VECTORS
#endif

inline void blocks(Lanes& lanes, const std::uint8_t* p, std::uint64_t count) {
#if defined(__x86_64__)
  if (count >= kVectorBlocks && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq")) {
    const std::uint64_t even = count & ~std::uint64_t{1};
    blocks_vectors(lanes, p, even);
    p += even * kBlock;
    count -= even;
  }
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
