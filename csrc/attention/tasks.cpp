#include <algorithm>

#include "attention.h"

namespace lamina::attention {
namespace {

int64_t chunks_of(const Task& task) {
  return task.low < task.high ? (task.high + kChunk - 1) / kChunk - task.low / kChunk : 0;
}

// Give the chunks of a task to several, each under one node of level kSplitLevel.
void split(Task task, Tasks& out) {
  constexpr int64_t tokens = int64_t(kChunk) << kSplitLevel;
  const int64_t low = task.low, high = task.high, begin = low / tokens, end = (high + tokens - 1) / tokens;
  task.split = int64_t(out.splits.size());
  out.splits.push_back({int64_t(out.tasks.size()), end - begin});
  for (int64_t node = begin; node < end; ++node) {
    task.low = std::max(low, node * tokens), task.high = std::min(high, (node + 1) * tokens);
    out.tasks.push_back(task);
  }
}

// The tiles `first .. last` of a sequence, of all KV heads, as tasks of at most `most` heads. Those of the same heads
// follow each other: they read the same keys and values.
void push(const Task* first, const Task* last, int64_t heads, int64_t most, Tasks& out) {
  const int64_t parts = (heads + most - 1) / most;
  for (int64_t part = 0; part < parts; ++part)
    for (const Task* tile = first; tile < last; ++tile) {
      Task task = *tile;
      task.head = heads * part / parts, task.heads = heads * (part + 1) / parts - task.head;
      if (task.split >= 0)
        split(task, out);
      else
        out.tasks.push_back(task);
    }
}

}  // namespace

Tasks make_tasks(const Rows& rows, bool stored, const Operator& op, int64_t threads) {
  constexpr int64_t kEach = 8;  // tasks that a thread finds at least, where there are heads enough
  Tasks out;
  std::vector<Task> tiles;
  for (int64_t s = 0; s < rows.sequences; ++s) {
    const int64_t group = op.group(), queries = rows.count[s] * group, first = rows.first[s];
    for (int64_t begin = 0; begin < queries; begin += kTile) {
      Task task{s, begin, std::min(begin + kTile, queries), 0, op.kv_heads, 0, 0, -1};
      const int64_t top = begin / group, bottom = (task.end - 1) / group;  // rows
      if (stored) {
        task.low = rows.seen[s], task.high = rows.stop[s];
        if (op.window) task.low = std::clamp(first + top - op.window + 1, task.low, task.high);
      } else {
        task.low = op.window ? std::max(top - op.window + 1, int64_t(0)) : 0, task.high = bottom + 1;
      }
      const int64_t chunks = chunks_of(task);
      out.pairs += (task.end - begin) * (task.high - task.low), out.tokens += task.high - task.low;
      if (queries <= kTile && chunks > int64_t(1) << kSplitLevel) task.split = 0;
      out.chunks = std::max(out.chunks, chunks);
      tiles.push_back(task);
    }
  }
  const int64_t wanted = threads > 1 ? kEach * threads : 1;
  const int64_t shares = (wanted + int64_t(tiles.size()) - 1) / std::max(int64_t(tiles.size()), int64_t(1));
  for (const Task *tile = tiles.data(), *const end = tile + tiles.size(), *next; tile < end; tile = next) {
    for (next = tile; next < end && next->sequence == tile->sequence;) ++next;
    const int64_t together = std::min(kTile / (tile->end - tile->begin), op.kv_heads / shares);
    push(tile, next, op.kv_heads, std::max(together, int64_t(1)), out);
  }
  return out;
}

}  // namespace lamina::attention
