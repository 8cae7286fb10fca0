// One token from one row of logits.
#pragma once

#include <cstdint>
#include <vector>

#include "sampling/sampling.h"

namespace lamina::sampling {

constexpr std::int64_t kNoToken = -1;       // the largest logit is NaN or infinite
constexpr std::uint64_t kWhole = 1ull << 53;  // the share of top_p = 1

enum Flags : std::uint32_t {
  kGreedy = 1,
  kTopKFirst = 2,  // top_p counts the probability of what top_k has left
  kMinPFirst = 4,  // ... of what min_p has left
  kSomeAllowed = 8,  // only tokens of ``allowed`` are drawn
};

// What is asked of a row. lamina/ops/sampling/native.py writes it.
struct Ask {
  std::uint64_t top_k;  // at least 1
  std::uint64_t share;  // top_p times 2^53
  std::uint64_t seed;
  std::uint64_t index;
  float factor;      // levels to 1 of logits
  std::int32_t cut;  // the lowest level that min_p keeps
  std::uint32_t row;
  std::uint32_t flags;
  const std::uint16_t* allowed;  // a bit for each of the first ``num_bits`` tokens; later ones are not allowed
  std::uint64_t num_bits;        // a multiple of kBlock
};
static_assert(sizeof(Ask) == 64);

struct Entry {
  float x;
  std::int64_t id;
};

// Tokens whose logits have the same upper 16 bits.
struct Bin {
  float low, high;
  std::uint64_t count;
  std::int64_t mass;
};

// Memory of one thread.
struct Scratch {
  alignas(64) unsigned char tail[kBlock * sizeof(float)];  // the last block, filled up with minus infinity
  std::vector<unsigned char> allowed;  // a row, with minus infinity for tokens that are not allowed
  std::vector<float> maxima;  // of parts
  std::vector<float> sorted;
  std::vector<std::int64_t> sums;  // of blocks
  std::vector<std::int64_t> masses = std::vector<std::int64_t>(2 * kBlock);
  std::vector<Entry> entries;
  std::vector<Bin> bins;
  std::vector<std::uint32_t> counts = std::vector<std::uint32_t>(1 << 16);  // zeros between two rows
  std::vector<std::int64_t> bin_masses = std::vector<std::int64_t>(1 << 16);  // likewise; of fp32 alone
};

// x: ``size`` logits of ``type``. Throws std::bad_alloc.
std::int64_t draw(const Kernel* kernels, Type type, const void* x, std::size_t size, const Ask& ask, Scratch& scratch);

// The tokens of the ``count`` largest logits, at most ``size``, best first and by id among equals; NaN counts as the
// largest. Throws std::bad_alloc.
void best(const Kernel* kernels, Type type, const void* x, std::size_t size, std::size_t count, std::int64_t* ids,
          Scratch& scratch);

}  // namespace lamina::sampling
