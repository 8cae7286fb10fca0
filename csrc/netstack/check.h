// What guards a frame: a checksum within one host, a message authentication code beyond it. Both have 16 bytes.
//
// Checksum: CRC-32C (RFC 3720, appendix B.4) over each of four interleaved lanes of 8-byte words; four chains keep
// the instruction's latency hidden. Code: keyed BLAKE2b (RFC 7693) with a digest of 16 bytes.
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
constexpr std::uint64_t kSealKeyBytes = 32;
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

namespace blake2b {

using Words = std::array<std::uint64_t, 8>;

inline constexpr Words kIv = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
                              0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};
inline constexpr std::uint8_t kSigma[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

inline std::uint64_t rotate(std::uint64_t x, int n) { return x >> n | x << (64 - n); }

__attribute__((always_inline)) inline void mix(std::uint64_t* v, int a, int b, int c, int d, std::uint64_t x,
                                               std::uint64_t y) {
  v[a] += v[b] + x;
  v[d] = rotate(v[d] ^ v[a], 32);
  v[c] += v[d];
  v[b] = rotate(v[b] ^ v[c], 24);
  v[a] += v[b] + y;
  v[d] = rotate(v[d] ^ v[a], 16);
  v[c] += v[d];
  v[b] = rotate(v[b] ^ v[c], 63);
}

// `total`: bytes hashed with this block, key block included.
inline void compress(Words& h, const std::uint8_t* block, std::uint64_t total, bool last) {
  std::uint64_t m[16], v[16];
  std::memcpy(m, block, kBlock);
  std::copy(h.begin(), h.end(), v);
  std::copy(kIv.begin(), kIv.end(), v + 8);
  v[12] ^= total;
  if (last) v[14] = ~v[14];
#pragma GCC unroll 12  // with all indices known, the words stay in registers: 3 times as fast
  for (int round = 0; round < 12; ++round) {
    const std::uint8_t* s = kSigma[round % 10];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) mix(v, i, i + 4, i + 8, i + 12, m[s[2 * i]], m[s[2 * i + 1]]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      mix(v, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4, m[s[8 + 2 * i]], m[s[9 + 2 * i]]);
  }
  for (int i = 0; i < 8; ++i) h[i] ^= v[i] ^ v[i + 8];
}

}  // namespace blake2b

// The key of one direction of one session, or none: then frames have checksums.
class Seal {
 public:
  Seal() = default;
  explicit Seal(const std::uint8_t key[kSealKeyBytes]) : keyed_(true), start_(blake2b::kIv) {
    std::uint8_t block[kBlock] = {};
    std::memcpy(block, key, kSealKeyBytes);
    start_[0] ^= 0x01010000 ^ kSealKeyBytes << 8 ^ kCheckBytes;
    blake2b::compress(start_, block, kBlock, false);
  }
  bool keyed() const { return keyed_; }
  const blake2b::Words& start() const { return start_; }

 private:
  bool keyed_ = false;
  blake2b::Words start_{};  // the state behind the key block
};

// The check of one part of one frame, over (part, count of the frame in its direction, bytes).
class Check {
 public:
  Check(const Seal& seal, std::uint64_t part, std::uint64_t frame) : keyed_(seal.keyed()), h_(seal.start()) {
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
    if (keyed_) {
      blake2b::compress(h_, buffer_, kBlock + total_, true);
      std::memcpy(out, h_.data(), kCheckBytes);
    } else {
      crc::blocks(lanes_, buffer_, 1);
      lanes_[0] ^= std::uint32_t(total_);
      std::memcpy(out, lanes_.data(), kCheckBytes);
    }
  }

 private:
  void consume(const std::uint8_t* p, std::uint64_t count) {
    if (!keyed_) {
      crc::blocks(lanes_, p, count);
      total_ += count * kBlock;
      return;
    }
    for (; count; --count, p += kBlock) blake2b::compress(h_, p, kBlock + (total_ += kBlock), false);
  }

  bool keyed_;
  blake2b::Words h_;
  crc::Lanes lanes_{~0u, ~0u, ~0u, ~0u};
  std::uint8_t buffer_[kBlock];
  std::uint64_t fill_ = 16, total_ = 0;
};

// In a time that does not depend on the bytes.
inline bool equal(const std::uint8_t a[kCheckBytes], const std::uint8_t b[kCheckBytes]) {
  return ((load64(a) ^ load64(b)) | (load64(a + 8) ^ load64(b + 8))) == 0;
}

}  // namespace lamina
