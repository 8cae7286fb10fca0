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

}  // namespace

Tasks make_tasks(const Rows& rows, bool stored, int64_t group, int64_t window) {
  Tasks out;
  out.tasks.reserve(std::size_t(rows.sequences));
  for (int64_t s = 0; s < rows.sequences; ++s) {
    const int64_t queries = rows.count[s] * group, first = rows.first[s];
    for (int64_t begin = 0; begin < queries; begin += kTile) {
      Task task{s, begin, std::min(begin + kTile, queries), 0, 0, -1};
      const int64_t top = begin / group, bottom = (task.end - 1) / group;  // rows
      if (stored) {
        task.low = rows.seen[s], task.high = rows.stop[s];
        if (window) task.low = std::clamp(first + top - window + 1, task.low, task.high);
      } else {
        task.low = window ? std::max(top - window + 1, int64_t(0)) : 0, task.high = bottom + 1;
      }
      const int64_t chunks = chunks_of(task);
      out.pairs += (task.end - begin) * (task.high - task.low), out.tokens += task.high - task.low;
      if (queries <= kTile && chunks > int64_t(1) << kSplitLevel)
        split(task, out);
      else
        out.tasks.push_back(task);
      out.chunks = std::max(out.chunks, chunks);
    }
  }
  return out;
}

}  // namespace lamina::attention
