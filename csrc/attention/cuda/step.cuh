// What a launch computes, and from what. All that changes from step to step is in device memory, so that a captured graph
// can be replayed: lengths, block tables, the plan.
//
// Words: a *query* is one query head of one row. Queries of one sequence that read the same KV head are numbered row by
// row and computed together, `kQueries` of them in a *tile*. A *chunk* is 128 consecutive positions, a node (level, n) of
// the merge tree covers chunks n << level .. (n + 1) << level (lamina/ops/attention/merge.py). A *task* is one tile
// over one node of the plan's level; one warp computes it, for one KV head.
#pragma once
#include "attention/cuda/warp.cuh"

namespace lamina::attention::cuda {

constexpr int kChunk = 128;  // merge.CHUNK_TOKENS
constexpr int kLevels = 14;  // of the merge tree within a sequence, 2 ** 21 positions; cuda_geometry.LEVELS

LAMINA_DEVICE int least(int a, int b) { return a < b ? a : b; }
LAMINA_DEVICE int most(int a, int b) { return a > b ? a : b; }
LAMINA_DEVICE int parts(int n, int size) { return (n + size - 1) / size; }

// lamina.kv.paged_cache.RowTable of one sequence. The layout is cuda.py's SEQUENCE.
struct Sequence {
  int row, first, count;  // its rows in the step: row .. row + count, at positions from first
  int low, high;  // the stored tokens that are meant: positions low .. high
  int origin;  // the position of column 0 of its block table
  int unused[2];
};

// A step: its number of sequences, then the sequences, then their block tables. cuda.py fills it.
struct Step {
  const int* counts;  // [1] sequences
  const Sequence* sequences;  // [counts[0]]
  const int* table;  // [sequences, width] block ids
  int width, block_shift;  // blocks hold 1 << block_shift tokens
};

struct Task {
  int sequence;
  int query;  // the first one of the tile
  int node, base;  // number of the node at the plan's level; that of the first one of the sequence
};

// The tasks of a step for one shape of operator, made by `plan_step`.
struct Plan {
  int level, tasks;  // nodes' level; tasks of each KV head
  int unused[2];
  Task task[1];  // really [capacity]
};

struct Operator {
  int q_heads, kv_heads, qk_dim, v_dim, window;
  float scale, softcap;
  const float *sinks, *slopes;  // [q_heads] or null

  LAMINA_DEVICE int group() const { return q_heads / kv_heads; }
};

// The chunks of a sequence that a plan deals out, low .. high; of the step's own rows they are counted from the first.
struct Chunks {
  int low, high;
  LAMINA_DEVICE Chunks(const Sequence& s, bool stored)
      : low(stored ? s.low / kChunk : 0), high(parts(stored ? s.high : s.count, kChunk)) {
    if (stored && s.low >= s.high) low = high = 0;
  }
  // Nodes at a level; one without tokens stands for an empty range, whose result must be written too.
  LAMINA_DEVICE int nodes(int level) const { return most(1, parts(high, 1 << level) - (low >> level)); }
};

// Where a query is.
struct Place {
  int row, head;  // of the sequence's rows; of all query heads
  LAMINA_DEVICE Place(int query, int kv_head, int group) : row(query / group), head(kv_head * group + query % group) {}
};

// The row of a KV tensor, [rows, D], that holds a token: of a store's blocks [N, Hkv, block, .], or of the step's own
// rows [R, Hkv, .].
LAMINA_DEVICE int stored_row(const Step& step, const Sequence& s, int sequence, int kv_heads, int head, int position) {
  const int at = position - s.origin, size = 1 << step.block_shift;
  const int block = step.table[i64(sequence) * step.width + (at >> step.block_shift)];
  return ((block * kv_heads + head) << step.block_shift) + (at & (size - 1));
}
LAMINA_DEVICE int new_row(const Sequence& s, int kv_heads, int head, int position) {
  return (s.row + position) * kv_heads + head;
}

LAMINA_DEVICE i64 sum_over_lanes(i64 x) {
  for (int mask = 16; mask; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}

// The number of a sequence's tasks at a level, for each KV head. A long prompt after a long context may have more than an
// int counts, at a low level.
LAMINA_DEVICE i64 tasks_of(const Sequence& s, int tile, int group, bool stored, int level) {
  return i64(parts(s.count * group, tile)) * Chunks(s, stored).nodes(level);
}

// Of the first `sequences`.
LAMINA_DEVICE i64 count_tasks(const Step& step, int sequences, int tile, int group, bool stored, int level) {
  i64 sum = 0;
  for (int i = lane(); i < sequences; i += kLanes) sum += tasks_of(step.sequences[i], tile, group, stored, level);
  return sum_over_lanes(sum);
}

// The level that is estimated to finish first on `warps` warps. A round takes as long as its longest task, plus a chunk
// for filling the pipeline and merging. The level makes no difference to any result.
LAMINA_DEVICE int choose_level(const Step& step, int sequences, int tile, int group, int kv_heads, int warps,
                               int capacity) {
  int longest = 1, best = kLevels;
  i64 cost = 0x7fffffffffffffff;
  for (int i = lane(); i < sequences; i += kLanes) {
    const Chunks chunks(step.sequences[i], true);
    longest = most(longest, chunks.high - chunks.low);
  }
  for (int mask = 16; mask; mask /= 2) longest = most(longest, shuffle_xor(longest, mask));
  for (int level = 0; level < kLevels; ++level) {
    const i64 tasks = count_tasks(step, sequences, tile, group, true, level);
    const i64 found = (tasks * kv_heads + warps - 1) / warps * (least(1 << level, longest) + 1);
    if (tasks <= capacity && found <= cost) best = level, cost = found;
    if (1 << level >= longest) break;
  }
  return best;
}

// One warp for each 32 sequences numbers and writes their tasks. Tasks of a sequence are consecutive, and so are those of
// a tile. The last tile comes first: it sees most of the step's own rows, so all would wait for it if it began late. The
// step's own rows are never cut: a prompt has tiles enough, a decode step one chunk.
LAMINA_DEVICE void plan_step(const Step& step, Plan& plan, int capacity, int tile, int group, int kv_heads, int warps,
                             bool stored) {
  const int sequences = *step.counts, begin = block() * kLanes;
  const int level = stored ? choose_level(step, sequences, tile, group, kv_heads, warps, capacity) : kLevels;
  i64 before = count_tasks(step, least(begin, sequences), tile, group, stored, level);
  for (int i = begin; i < least(begin + kLanes, sequences); ++i) {
    const Sequence& s = step.sequences[i];
    const Chunks chunks(s, stored);
    const int nodes = chunks.nodes(level), base = chunks.low >> level, last = parts(s.count * group, tile) - 1;
    const i64 tasks = tasks_of(s, tile, group, stored, level), room = capacity - before;
    for (int j = lane(); j < tasks && j < room; j += kLanes)
      plan.task[before + j] = {i, (last - j / nodes) * tile, base + j % nodes, base};
    before += tasks;
  }
  if (begin + kLanes >= sequences && lane() == 0)
    plan.level = level, plan.tasks = before < capacity ? int(before) : capacity;
}

}  // namespace lamina::attention::cuda
