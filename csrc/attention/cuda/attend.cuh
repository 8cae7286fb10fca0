// One launch of attention. Warps take tasks of the plan; a core (tensor.cuh, plain.cuh) turns a task's chunks into nodes.
// Nodes are merged up to the sequence's root, which is written to the call's result.
//
// Bits: a query gets one fixed chain of operations over its own tokens. Tiles of tokens begin at multiples of 16
// positions. Chunks end at multiples of 128, and are merged by their numbers. So neither the plan, nor the number of
// warps, nor other queries of the tile make a difference.
#pragma once
#include "attention/cuda/partial.cuh"

namespace lamina::attention::cuda {

// T: of q and out; S: of k and v, which have scales where that is another type.
template <class T, class S = T>
struct Call {
  Step step;
  const Plan* plan;
  Operator op;
  bool stored;  // k, v: a LayerCache's blocks, else the step's own rows
  const T* q;  // [R, Hq, D]
  const S *k, *v;
  const float *k_scale, *v_scale;  // of each row of k and v, or null
  float *o, *lse;  // results [R, Hq, Dv], [R, Hq]; unless there is `out`: then those of the stored part
  T* out;  // [R, Hq, Dv]: merged with the stored part and the sinks
  float* nodes;  // [capacity, Hkv, Fragment::kSize]: of tasks that wait for others
  u32* counters;  // [capacity, Hkv] zeros, before and after
  u32* taken;  // [1] a zero, before and after: tasks that were taken
  float* slots;  // [blocks, kLevels, Fragment::kSize]: of chunks that wait within a task
};

// The tokens that a query sees, as positions; of the step's own rows they are counted from the first.
struct View {
  int low = 0, high = 0, self = 0;
  float slope = 0;
};

// What a core needs of its task.
template <class T, class S = T>
struct Work {
  const Call<T, S>& call;
  const Task task;
  const Sequence sequence;
  const int kv_head, sequences_queries;

  LAMINA_DEVICE Work(const Call<T, S>& call, const Task& task, int kv_head)
      : call(call), task(task), sequence(call.step.sequences[task.sequence]), kv_head(kv_head),
        sequences_queries(sequence.count * call.op.group()) {}

  LAMINA_DEVICE int queries(int tile) const { return least(tile, sequences_queries - task.query); }
  LAMINA_DEVICE Place place(int number) const { return Place(task.query + number, kv_head, call.op.group()); }
  LAMINA_DEVICE i64 row(int number) const {
    const Place p = place(number);
    return i64(sequence.row + p.row) * call.op.q_heads + p.head;
  }
  LAMINA_DEVICE int position(int number) const { return (call.stored ? sequence.first : 0) + place(number).row; }

  LAMINA_DEVICE View view(int number, int low, int high) const {
    View v;
    v.self = position(number);
    v.low = call.op.window ? most(low, v.self - call.op.window + 1) : low;
    v.high = least(high, v.self + 1);
    if (call.op.slopes) v.slope = call.op.slopes[place(number).head];
    return v;
  }

  // The task's positions that some query of its tile sees: low .. high.
  LAMINA_DEVICE int low(int level) const {
    const i64 node = i64(task.node) << level;
    int from = call.stored ? most(sequence.low, int(node * kChunk)) : 0;
    if (call.op.window) from = most(from, position(0) - call.op.window + 1);
    return from;
  }
  LAMINA_DEVICE int high(int level, int tile) const {
    if (!call.stored) return place(queries(tile) - 1).row + 1;
    const i64 end = (i64(task.node + 1) << level) * kChunk;
    return end < sequence.high ? int(end) : sequence.high;
  }

  // The row of k and v that holds the token at a position.
  LAMINA_DEVICE int kv_row(int at) const {
    if (call.stored) return stored_row(call.step, sequence, task.sequence, call.op.kv_heads, kv_head, at);
    return new_row(sequence, call.op.kv_heads, kv_head, at);
  }
};

// Scores are in units of log 2, so that their exponentials cost least.
struct Score {
  float scale, softcap, unit;
  LAMINA_DEVICE explicit Score(const Operator& op)
      : scale(op.softcap > 0 ? op.scale / op.softcap : op.scale * kLog2E), softcap(op.softcap * kLog2E), unit(kLog2E) {}
  // `away`: the key's position less the query's.
  LAMINA_DEVICE float operator()(float product, const View& view, int away) const {
    const float x = softcap > 0 ? tanhf(product * scale) * softcap : product * scale;
    return view.slope != 0 ? fmaf(view.slope * unit, float(away), x) : x;
  }
  static constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;
};

// The softmax of one query over a chunk, some tokens at a time. `top` is known to all lanes that share the query, `total`
// is each lane's own part of the sum.
struct Softmax {
  float top, total;

  LAMINA_DEVICE void open() { top = none(), total = 0; }
  // What the numbers so far shrink by, now that `found` may be the highest score.
  LAMINA_DEVICE float raise(float found) {
    const float before = top;
    top = fmaxf(top, found);
    const float factor = exp2f(before - shift());
    total *= factor;
    return factor;
  }
  LAMINA_DEVICE float weight(float score) {
    const float w = exp2f(score - shift());
    total += w;
    return w;
  }
  // With the sum over all lanes: what o is multiplied with; and the natural log-sum-exp.
  LAMINA_DEVICE float close(float sum, float& lse) const {
    const float whole = sum < 1.0f ? 1.0f : sum;  // the highest one counts 1: this is for no token at all
    lse = (top + log2f(whole)) * Score::kLn2;
    return 1.0f / whole;
  }
  LAMINA_DEVICE float shift() const { return top < kLowest ? kLowest : top; }
};

// A root, to where the call wants it. `number(q)` and `column(i)` say which query and which of its Dv numbers a lane holds.
template <class Core, class T, class S, class Node, class Number, class Column>
LAMINA_DEVICE void deliver(const Work<T, S>& work, Node& node, int queries, Number number, Column column) {
  const Call<T, S>& call = work.call;
  const int v_dim = call.op.v_dim;
#pragma unroll
  for (int q = 0; q < Node::kQueries; ++q) {
    if (number(q) >= queries) continue;
    const i64 row = work.row(number(q));
    const float* sinks = call.op.sinks;
    if (!call.out && Core::first_of_query()) call.lse[row] = node.lse[q];
    const Weights both(call.out ? call.lse[row] : none(), node.lse[q]);
    const Weights sunk(both.lse, sinks ? sinks[work.place(number(q)).head] : none());
#pragma unroll
    for (int i = 0; i < Node::kNumbers; ++i) {
      const int d = column(i);
      if (d >= v_dim) continue;
      const i64 at = row * v_dim + d;
      if (!call.out)
        call.o[at] = node.o[q][i];
      else
        round_to(call.out[at], sunk(both(call.o[at], node.o[q][i]), 0.0f));
    }
  }
}

template <class Core>
LAMINA_DEVICE void attend(const Call<typename Core::T, typename Core::S>& call) {
  using Node = typename Core::Node;
  const Plan& plan = *call.plan;
  const int heads = call.op.kv_heads, tasks = plan.tasks * heads;
  float* const own = call.slots + i64(block()) * kLevels * Node::kSize;
  float* const near = reinterpret_cast<float*>(shared_memory() + Core::kPipelineBytes);
  const auto slot = [&](int level) {
    return level < Core::kNearLevels ? near + level * Node::kSize : own + i64(level) * Node::kSize;
  };
  Core::prepare(shared_memory());
  // Each warp begins with the task of its own number. A warp that is done takes the next task, so that no warp is idle
  // after short tasks. The assignment makes no difference to any result.
  for (int t = block(); t < tasks;) {
    const int number = t / heads, head = t % heads;
    const Work<typename Core::T, typename Core::S> work(call, plan.task[number], head);
    const int queries = work.queries(Core::kQueries);
    const int low = work.low(plan.level), high = work.high(plan.level, Core::kQueries);
    Node node;
    node.clear();
    Waiting waiting;
    Core::run(work, shared_memory(), low, high, node,
              [&](int chunk, bool last) { waiting.climb(node, chunk, last, queries, slot, Core::number); });
    const int next = take(call.taken, tasks);
    const int base = work.task.base, count = Chunks(work.sequence, call.stored).nodes(plan.level);
    const i64 first = number - (work.task.node - base);  // the task of the tile's first node
    const auto saved = [&](int i) { return call.nodes + ((first + i) * heads + head) * Node::kSize; };
    u32* const counters = call.counters + first * heads + head;
    if (climb_together(node, work.task.node, base, count, counters, heads, saved, queries, Core::number))
      deliver<Core>(work, node, queries, Core::number, Core::column);
    t = blocks() + shuffle(next, 0);
  }
}

}  // namespace lamina::attention::cuda
