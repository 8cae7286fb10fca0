// Partial results and how two become one: lamina.ops.attention.merge's arithmetic and tree, for a warp.
#pragma once
#include "attention/cuda/step.cuh"

namespace lamina::attention::cuda {

constexpr float kLowest = -3.402823466e38f;  // -inf less -inf would be NaN, less this it is -inf

LAMINA_DEVICE float none() { return from_bits(0xff800000); }

// What a and b weigh in their merge, and its lse. An empty one changes nothing, not by a bit; a NaN stays.
struct Weights {
  float a, b, lse;
  LAMINA_DEVICE Weights(float x, float y) {
    const float high = x > y ? x : y, shift = high < kLowest ? kLowest : high;
    const float wx = expf(x - shift), wy = expf(y - shift), sum = wx + wy;
    const float total = sum < 1.0f ? 1.0f : sum;  // the higher one weighs 1: this is for two empty ones
    a = wx / total, b = wy / total, lse = high + logf(total);
  }
  LAMINA_DEVICE float operator()(float x, float y) const { return fmaf(b, y, a * x); }
};

// A lane's part of a node: of `kQueries` queries the lse, and `kNumbers` numbers of o.
template <int kQueries_, int kNumbers_>
struct Fragment {
  static constexpr int kQueries = kQueries_, kNumbers = kNumbers_;
  static constexpr int kSize = kQueries * (kNumbers + 1) * kLanes;  // floats of a whole warp's, in memory
  float o[kQueries][kNumbers], lse[kQueries];

  LAMINA_DEVICE void clear() {
    for (int q = 0; q < kQueries; ++q) {
      lse[q] = none();
      for (int i = 0; i < kNumbers; ++i) o[q][i] = 0;
    }
  }

  // Queries from `queries` on do not exist. `number(q)` numbers a lane's query within the tile.
  template <class Number>
  LAMINA_DEVICE void save(float* to, int queries, Number number) const {
#pragma unroll
    for (int q = 0; q < kQueries; ++q) {
      if (number(q) >= queries) continue;
      float* at = to + q * (kNumbers + 1) * kLanes + lane();
#pragma unroll
      for (int i = 0; i < kNumbers; ++i) at[i * kLanes] = o[q][i];
      at[kNumbers * kLanes] = lse[q];
    }
  }

  // This becomes the merge of itself and what was saved, which covers earlier tokens if `left`, else later ones. `load`:
  // of what was saved by this warp, or by another one.
  template <class Number>
  LAMINA_DEVICE void merge(const float* from, bool left, int queries, Number number, float (*load)(const float*)) {
#pragma unroll
    for (int q = 0; q < kQueries; ++q) {
      if (number(q) >= queries) continue;
      const float* at = from + q * (kNumbers + 1) * kLanes + lane();
      const float other = load(at + kNumbers * kLanes);
      const Weights weights(left ? other : lse[q], left ? lse[q] : other);
#pragma unroll
      for (int i = 0; i < kNumbers; ++i) {
        const float x = load(at + i * kLanes);
        o[q][i] = left ? weights(x, o[q][i]) : weights(o[q][i], x);
      }
      lse[q] = weights.lse;
    }
  }
};

// The nodes of a task that wait for their right siblings, at most one of each level. A node whose left sibling is not
// there, since the range begins after it, rises as it is.
class Waiting {
 public:
  // `node` is that of `chunk` alone. It climbs as far as it can; that of the last chunk to the root of all.
  template <class Node, class Slot, class Number>
  LAMINA_DEVICE void climb(Node& node, int chunk, bool last, int queries, Slot slot, Number number) {
    int level = 0;
    for (; chunk >> level & 1; ++level)
      if (levels_ >> level & 1) node.merge(slot(level), true, queries, number, load_own), levels_ ^= 1u << level;
    if (!last) {
      node.save(slot(level), queries, number);
      levels_ |= 1u << level;
      return;
    }
    for (; level < kLevels; ++level)
      if (levels_ >> level & 1) node.merge(slot(level), true, queries, number, load_own);
  }

 private:
  u32 levels_ = 0;
};

// Merge the nodes base .. base + count of a tile, each of which one warp has. The second warp of a pair of siblings merges
// them, and continues with their parent. The warp that reaches the root gets true. A pair meets at the counter of the
// first leaf below its right node, which no other pair uses. A node is saved at the place of its first leaf. `counters`:
// the first one, then every `stride`.
template <class Node, class Saved, class Number>
LAMINA_DEVICE bool climb_together(Node& node, int number_of_node, int base, int count, u32* counters, int stride,
                                  Saved saved, int queries, Number number) {
  int n = number_of_node;
  for (int level = 0; n << level > base || (n + 1) << level < base + count; ++level, n /= 2) {
    const int sibling = n ^ 1, right = (n | 1) << level;
    if (sibling << level >= base + count || (sibling + 1) << level <= base) continue;  // there is none
    node.save(saved(most(n << level, base) - base), queries, number);
    if (!second_to(counters + i64(right - base) * stride)) return false;
    node.merge(saved(most(sibling << level, base) - base), sibling < n, queries, number, load_fresh);
  }
  return true;
}

}  // namespace lamina::attention::cuda
