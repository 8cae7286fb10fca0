// The operands and tasks of lamina.ops.attention.native's kernels, shared by all variants; no vectors here.
//
// Words: a *query* is one query head of one row. Queries of one sequence that read the same KV head are computed
// together, numbered row by row, `kTile` at a time. If they are fewer, queries of the next KV heads join them, so that a
// task reads long contiguous pieces of memory. A *chunk* is 128 consecutive positions, a *node* an entry of the merge
// tree over chunks (lamina/ops/attention/merge.py). A task computes one node for one tile.
#pragma once
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace lamina::attention {

using std::int64_t;

constexpr int kChunk = 128;  // merge.CHUNK_TOKENS
constexpr int kTile = 32;  // queries of a task at most
constexpr int kSplitLevel = 5;  // a task has at most 2 ** 5 chunks, where one tile is all that a sequence has
constexpr int kPad = 32;  // rows of scratch are padded to a multiple of it, in numbers
constexpr int kScores = kChunk + 16;  // a query's scores of a chunk, with room for the last vector's surplus

struct Operator {
  int64_t q_heads, kv_heads, qk_dim, v_dim, window;
  float scale, softcap;
  const float *sinks, *slopes;  // [q_heads] or null

  int64_t group() const { return q_heads / kv_heads; }
};

// The arrays of lamina.kv.paged_cache.RowTable, owned by others.
struct Rows {
  const int64_t *row, *first, *count, *seen, *stop, *origin;  // [sequences]
  const int64_t* table;  // [sequences, width]
  int64_t sequences, width, block_size;
};

// Queries `begin .. end` of a sequence and of each of `heads` KV heads, over the positions `low .. high`.
struct Task {
  int64_t sequence, begin, end;
  int64_t head, heads;
  int64_t low, high;  // positions; of the step's own rows, counted from the first of them
  int64_t split;  // which of the splits it is part of; -1 = it is whole
};

// A tile whose chunks were given to several tasks, `first_task .. first_task + tasks`, which follow each other.
struct Split {
  int64_t first_task, tasks;
};

struct Tasks {
  std::vector<Task> tasks;
  std::vector<Split> splits;
  int64_t pairs = 0, tokens = 0;  // (query, token) pairs and tokens of one KV head, all tasks
  int64_t chunks = 1;  // of the longest task
};

// The tasks of a step over stored tokens, or over the step's own: enough for `threads` of them to share.
Tasks make_tasks(const Rows& rows, bool stored, const Operator& op, int64_t threads);

struct Call {
  const Operator* op;
  const Rows* rows;
  const Task* tasks;
  const Split* splits;
  bool stored;  // k, v: a LayerCache's blocks, else the step's own rows
  const void *q, *k, *v;  // q [R, Hq, D]
  const float *k_scale, *v_scale;  // of each row of k and v, [.., Hkv, block] or [R, Hkv]; where these are of 8 bits
  float *o, *lse;  // results [R, Hq, Dv], [R, Hq]; unless there is `out`: then those of the stored part
  void* out;  // [R, Hq, Dv] in the dtype of q: merged with the stored part and the sinks
  float* parts;  // nodes of split tiles, by task
  std::atomic<int>* left;  // tasks that are not done yet, by split
};

inline int64_t padded(int64_t dim) { return (dim + kPad - 1) / kPad * kPad; }
inline int64_t spread(int64_t qk_dim) { return 4 * padded(qk_dim); }  // numbers of a query's own form at most

// Floats of scratch for one head's values of a chunk, two bf16 in each.
inline int64_t values_size(const Operator& op) { return kChunk / 2 * padded(op.v_dim); }

// Numbers in a node of `queries` queries: o [queries, padded v_dim], lse [kTile].
inline int64_t node_size(const Operator& op, int64_t queries) { return queries * padded(op.v_dim) + kTile; }

// Scratch of one thread, 64-byte aligned.
class Scratch {
 public:
  void reserve(std::size_t numbers) {
    if (numbers <= numbers_) return;
    memory_.reset(new float[numbers + 16]);
    numbers_ = numbers;
  }
  float* data() const {
    return reinterpret_cast<float*>((reinterpret_cast<std::uintptr_t>(memory_.get()) + 63) & ~std::uintptr_t(63));
  }
  // A tile's queries, spread, and scores, a chunk's values, and the nodes that wait for their siblings: one per level, and
  // one being computed.
  static std::size_t needed(const Operator& op, int64_t chunks) {
    int64_t levels = 3;
    while (chunks >>= 1) levels += 2;  // a range that is not aligned keeps one node on either side
    return std::size_t(kTile * (spread(op.qk_dim) + kScores) + values_size(op) + levels * node_size(op, kTile));
  }

 private:
  std::unique_ptr<float[]> memory_;
  std::size_t numbers_ = 0;
};

enum Dtype { kFloat32, kBFloat16, kFloat16, kDtypes };
enum Stored { kAsQueries, kInt8, kFp8, kStored };  // what k and v are

// A row, and the blocks of its sequence: those `low .. high` are free, and `best` of them are attended, with all others.
struct Choice {
  int64_t row, low, high, total, best;
  const int64_t* blocks;  // [total]
};

// Which blocks rows attend, by KV head: lamina/ops/attention/block_selection.py.
struct Selecting {
  const Operator* op;
  const void* q;  // [R, Hq, D]
  const void *least, *most;  // [N + 1, Hkv, D], in the dtype of q, or floats where K has scales
  const Choice* choices;
  int64_t* table;  // [choices, Hkv, width]: a block times Hkv, plus the head
  int64_t width;
};

// Rows of a sequence whose attention is counted by block, in fixed point: weights before their sum, and shares of it.
constexpr int kWeightBits = 30, kScoreBits = 24;
struct Tallying {
  const Operator* op;
  const void *q, *k;  // q [rows, Hq, D], k: a LayerCache's blocks
  const float* k_scale;  // null where K has none
  const int64_t *ids, *seen;  // the sequence's blocks, and the tokens of them that each row sees
  int64_t rows, blocks, block_size;
};

using Bound = void (*)(const Selecting&, const Choice&, int64_t head, float* queries, float* scores);
using Tally = int64_t (*)(const Tallying&, int64_t head, float* queries, float* scores, int64_t* to);
using RunTask = void (*)(const Call&, int64_t task, Scratch&);

// Partial results of `queries` queries: o [queries, v_dim], lse [queries].
struct Partial {
  float *o, *lse;
};

// One set of instructions.
struct Variant {
  const char* name;
  bool (*usable)();
  std::array<std::array<RunTask, kStored>, kDtypes> run;
  // a becomes the merge of both.
  void (*merge)(Partial a, Partial b, int64_t queries, int64_t v_dim);
  // merge.finish; q_heads of `queries` follow each other, sinks [q_heads] or null.
  void (*finish[kDtypes])(Partial stored, Partial fresh, const float* sinks, int64_t queries, int64_t q_heads,
                          int64_t v_dim, void* out);
  // Bounds of what a head's queries score in a row's free blocks: scores [group, blocks]; room for queries [group, padded
  // qk_dim]. By whether K has scales.
  std::array<std::array<Bound, 2>, kDtypes> bound;
  // What the rows' softmax gives each block, added to `to` [blocks], by a KV head. Room: queries [group, padded qk_dim],
  // scores [group, tokens of all blocks + 16]. Returns the products of a query and a key that it took.
  std::array<std::array<Tally, kStored>, kDtypes> tally;
  std::uint64_t (*read)(const void*, std::size_t);  // every byte once: what a read limit is measured with
};

// Room of one thread.
struct Choosing {
  std::vector<float> queries, scores, near;
  std::vector<int64_t> order;
};

// The choices that `numbers` [count, 6] have: row, low, high, total, best, and where its blocks begin in `blocks` [all].
// False: they make no sense, or a table of `width` has no room for them.
bool read_choices(const int64_t* numbers, int64_t count, const int64_t* blocks, int64_t all, int64_t width,
                  std::vector<Choice>* to);

// Fills row `number` of the table: of a choice and a head.
void select(const Variant&, Dtype, bool scaled, const Selecting&, int64_t number, Choosing&);

extern const Variant kPortable, kAvx2, kAvx512, kAvx512Bf16, kAmxBf16;

}  // namespace lamina::attention
