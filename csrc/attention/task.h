// One task: the tokens of a tile's chunks through the kernel, the chunks' nodes up the merge tree, the root to where it
// is wanted. Included behind kernel.h, in the same namespace.

template <class T>
class Run {
 public:
  Run(const Call& call, const Task& task, int64_t head, Scratch& scratch)
      : call_(call), op_(*call.op), task_(task), head_(head), group_(op_.group()),
        tile_{op_, task.end - task.begin, padded(op_.v_dim)}, first_row_(call.rows->row[task.sequence]),
        first_(call.stored ? call.rows->first[task.sequence] : 0), queries_(scratch.data()),
        space_(queries_ + kTile * padded(op_.qk_dim)) {}

  // The task's node in `space_`.
  Node compute() {
    load_queries();
    Node nodes[2 * 64];
    int64_t depth = 0;
    Chunk chunks[2];
    int64_t number = task_.low / kChunk;
    const int64_t last = (task_.high + kChunk - 1) / kChunk;
    if (number < last) locate(number, chunks[number & 1]);
    for (; number < last; ++number) {
      Chunk &here = chunks[number & 1], &next = chunks[~number & 1];
      next.high = 0;
      if (number + 1 < last) locate(number + 1, next);
      Node& node = nodes[depth] = tile_.node(space_ + depth * node_size(op_, tile_.queries));
      node.number = number;
      attend(number * kChunk, here, next, node);
      ++depth;
      while (depth > 1 && nodes[depth - 1].number & 1 && nodes[depth - 2].level == nodes[depth - 1].level &&
             nodes[depth - 2].number == nodes[depth - 1].number - 1) {
        merge(tile_, nodes[depth - 2], nodes[depth - 1]);
        --depth;
        ++nodes[depth - 1].level, nodes[depth - 1].number >>= 1;
      }
    }
    if (depth) return root(tile_, nodes, depth), nodes[0];
    Node node = tile_.node(space_);
    for (int64_t i = 0; i < tile_.queries * tile_.stride; ++i) node.o[i] = 0;
    for (int64_t i = 0; i < kTile; ++i) node.lse[i] = kNone;
    return node;
  }

  // Put a root where the call wants it.
  void deliver(Node root) {
    if (!call_.out) {
      for (int64_t i = 0; i < tile_.queries; ++i) {
        const int64_t at = place(i);
        call_.lse[at] = root.lse[i];
        const float* o = root.o + i * tile_.stride;
        write(call_.o + at * op_.v_dim, [&](int64_t d) { return natural<T>(load_pair(o + d)); });
      }
      return;
    }
    float lse[kTile], weight_a[kTile], weight_b[kTile], sinks[kTile], weight[kTile];
    for (int64_t i = 0; i < tile_.queries; ++i) {
      lse[i] = call_.lse[place(i)];
      sinks[i] = op_.sinks ? op_.sinks[head(i)] : 0;
    }
    weigh(lse, root.lse, tile_.queries, weight_a, weight_b, lse);
    if (op_.sinks) weigh(lse, sinks, tile_.queries, weight, sinks, lse);
    for (int64_t i = 0; i < tile_.queries; ++i) {
      const int64_t at = place(i) * op_.v_dim;
      const V a = set(weight_a[i]), b = set(weight_b[i]), c = set(op_.sinks ? weight[i] : 1);
      const float *o = root.o + i * tile_.stride, *stored = call_.o + at;
      write(static_cast<T*>(call_.out) + at, [&](int64_t d) {
        const Pair y = load_pair(o + d);
        const Pair x = as_loaded<T>(d + 2 * W <= op_.v_dim ? load_pair(stored + d) : load_tail(stored + d, op_.v_dim - d));
        return Pair{fma(b, y.a, a * x.a) * c, fma(b, y.b, a * x.b) * c};
      });
    }
  }

 private:
  // Rows of K and V by position less the chunk's first one, and the range of those that some query sees.
  struct Chunk {
    const T *k[kChunk], *v[kChunk];
    int low, high;
  };

  int64_t head(int64_t query) const { return head_ * group_ + (task_.begin + query) % group_; }
  int64_t row(int64_t query) const { return (task_.begin + query) / group_; }
  int64_t place(int64_t query) const { return (first_row_ + row(query)) * op_.q_heads + head(query); }

  void load_queries() {
    using Row = typename Dot<T>::Row;
    Row* to = reinterpret_cast<Row*>(queries_);
    for (int64_t i = 0; i < tile_.queries; ++i) {
      const T* from = static_cast<const T*>(call_.q) + place(i) * op_.qk_dim;
      int64_t left = op_.qk_dim;
      for (; left >= Dot<T>::step; left -= Dot<T>::step, from += Dot<T>::step) *to++ = Dot<T>::load(from);
      if (left) *to++ = Dot<T>::load(from, left);
    }
  }

  void locate(int64_t number, Chunk& chunk) const {
    const Rows& rows = *call_.rows;
    const int64_t begin = number * kChunk, s = task_.sequence, size = rows.block_size;
    const T *k = static_cast<const T*>(call_.k), *v = static_cast<const T*>(call_.v);
    chunk.low = int(max(task_.low - begin, 0));
    chunk.high = int(min(task_.high - begin, kChunk));
    for (int t = chunk.low; t < chunk.high;) {
      const int64_t position = begin + t;
      int64_t at, step, upto;
      if (call_.stored) {
        const int64_t block = rows.table[s * rows.width + (position - rows.origin[s]) / size], inside = position % size;
        at = (block * op_.kv_heads + head_) * size + inside, step = 1, upto = t + size - inside;
      } else {
        at = (first_row_ + position) * op_.kv_heads + head_, step = op_.kv_heads, upto = kChunk;
      }
      upto = min(upto, chunk.high);
      for (; t < upto; ++t, at += step) chunk.k[t] = k + at * op_.qk_dim, chunk.v[t] = v + at * op_.v_dim;
    }
  }

  // Tokens of the chunk at `begin` that a query sees, and where the query stands.
  View view(int64_t query, int64_t begin, const Chunk& chunk) const {
    const int64_t self = first_ + row(query) - begin;
    const int64_t low = op_.window ? self - op_.window + 1 : 0;
    const int64_t high = call_.stored ? chunk.high : self + 1;
    const float slope = op_.slopes ? op_.slopes[head(query)] : 0;
    return {int(min(max(low, chunk.low), kChunk)), int(max(min(high, chunk.high), 0)), float(self), slope};
  }

  // The node of one chunk, four queries at a time.
  void attend(int64_t begin, const Chunk& here, const Chunk& next, Node& node) {
    float totals[kTile];
    Ahead<T> v_rows{here.v, here.high, op_.v_dim * int64_t(sizeof(T))};
    Ahead<T> k_rows{next.k, next.high, op_.qk_dim * int64_t(sizeof(T))};
    for (int64_t i = 0, blocks = (tile_.queries + 3) / 4; i < tile_.queries; --blocks) {
      const int64_t n = (tile_.queries - i + blocks - 1) / blocks;
      const auto block = n == 4   ? &Run::attend_block<4>
                         : n == 3 ? &Run::attend_block<3>
                         : n == 2 ? &Run::attend_block<2>
                                  : &Run::attend_block<1>;
      (this->*block)(i, begin, here, v_rows, k_rows, node, totals);
      v_rows.high = k_rows.high = 0;  // fetched once is enough
      i += n;
    }
    for (int64_t i = 0; i < tile_.queries; i += W) store(node.lse + i, load(node.lse + i) + log(load(totals + i)));
  }

  template <int G>
  void attend_block(int64_t query, int64_t begin, const Chunk& here, const Ahead<T>& v_rows, const Ahead<T>& k_rows,
                    Node& node, float* totals) {
    alignas(64) float score[G * kScores];
    View views[G];
    int low = kChunk, high = 0;
    for (int g = 0; g < G; ++g) {
      views[g] = view(query + g, begin, here);
      low = int(min(low, views[g].low)), high = int(max(high, views[g].high));
    }
    using Row = typename Dot<T>::Row;
    const int64_t width = (op_.qk_dim + Dot<T>::step - 1) / Dot<T>::step;
    scores<T, G>(reinterpret_cast<const Row*>(queries_) + query * width, here.k, low, high, op_.qk_dim, score, v_rows);
    for (int g = 0; g < G; ++g) {
      const Softmax result = softmax(op_, views[g], low, high, score + g * kScores);
      node.lse[query + g] = result.top, totals[query + g] = result.total;
    }
    float* o = node.o + query * tile_.stride;
    accumulate<T, G>(score, here.v, low, high, op_.v_dim, o, tile_.stride, k_rows);
    if (low >= high)
      for (int64_t i = 0; i < G * tile_.stride; ++i) o[i] = 0;
  }

  // v_dim numbers, of which f gives the pair that begins with the d-th.
  template <class To, class F>
  void write(To* to, F f) const {
    int64_t d = 0;
    for (; d + 2 * W <= op_.v_dim; d += 2 * W) store_pair(to + d, f(d));
    if (d < op_.v_dim) store_tail(to + d, op_.v_dim - d, f(d));
  }

  const Call& call_;
  const Operator& op_;
  const Task& task_;
  const int64_t head_, group_;
  const Tile tile_;
  const int64_t first_row_, first_;  // first_: position of the first row, 0 where positions count from it
  float *const queries_, *const space_;
};

template <class T>
void run(const Call& call, int64_t number, int64_t head, Scratch& scratch) {
  const Task& task = call.tasks[number];
  const Operator& op = *call.op;
  Run<T> one(call, task, head, scratch);
  Node node = one.compute();
  if (task.split < 0) return one.deliver(node);
  // The nodes of a split lie one behind the other, all heads of a task together; whoever is last merges them.
  const int64_t queries = task.end - task.begin, size = node_size(op, queries);
  const auto part = [&](int64_t task) { return call.parts + (task * op.kv_heads + head) * node_size(op, kTile); };
  __builtin_memcpy(part(number), node.o, std::size_t(size) * sizeof(float));
  if (call.left[task.split * op.kv_heads + head].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  const Split& split = call.splits[task.split];
  const Tile tile{op, queries, padded(op.v_dim)};
  std::vector<Node> nodes;
  for (int64_t i = split.first_task; i < split.first_task + split.tasks; ++i) {
    Node node = tile.node(part(i));
    node.level = kSplitLevel;
    node.number = call.tasks[i].low / kChunk >> kSplitLevel;
    nodes.push_back(node);
  }
  root(tile, nodes.data(), split.tasks);
  one.deliver(nodes[0]);
}

// The v_dim numbers of a query in a and b, and what they weigh, through f; f's result goes to `to`.
template <class To, class F>
inline void combine(To* to, const float* a, const float* b, int64_t dim, F f) {
  int64_t d = 0;
  for (; d + 2 * W <= dim; d += 2 * W) store_pair(to + d, as_loaded<To>(f(load_pair(a + d), load_pair(b + d))));
  if (d < dim) store_tail(to + d, dim - d, as_loaded<To>(f(load_tail(a + d, dim - d), load_tail(b + d, dim - d))));
}

// Some of the lse of a partial result, in whole vectors.
struct Lse {
  float x[kTile] = {};
  Lse(const float* from, int64_t n) { __builtin_memcpy(x, from, std::size_t(n) * sizeof(float)); }
};

// See Variant; the arithmetic of `merge` above.
inline void merge_partials(Partial a, Partial b, int64_t queries, int64_t dim) {
  for (int64_t from = 0; from < queries; from += kTile) {
    const int64_t n = min(kTile, queries - from);
    float weight_a[kTile], weight_b[kTile];
    Lse left(a.lse + from, n), right(b.lse + from, n);
    weigh(left.x, right.x, n, weight_a, weight_b, left.x);
    __builtin_memcpy(a.lse + from, left.x, std::size_t(n) * sizeof(float));
    for (int64_t i = 0; i < n; ++i) {
      float *o = a.o + (from + i) * dim, *other = b.o + (from + i) * dim;
      const V x = set(weight_a[i]), y = set(weight_b[i]);
      combine(o, o, other, dim, [&](Pair p, Pair q) { return Pair{fma(y, q.a, x * p.a), fma(y, q.b, x * p.b)}; });
    }
  }
}

// See Variant; the arithmetic of Run::deliver.
template <class T>
void finish(Partial stored, Partial fresh, const float* sinks, int64_t queries, int64_t q_heads, int64_t dim, void* out) {
  for (int64_t from = 0; from < queries; from += kTile) {
    const int64_t n = min(kTile, queries - from);
    float weight_a[kTile], weight_b[kTile], weight[kTile], sink[kTile] = {};
    Lse lse(stored.lse + from, n), right(fresh.lse + from, n);
    weigh(lse.x, right.x, n, weight_a, weight_b, lse.x);
    for (int64_t i = 0; sinks && i < n; ++i) sink[i] = sinks[(from + i) % q_heads];
    if (sinks) weigh(lse.x, sink, n, weight, sink, lse.x);
    for (int64_t i = 0; i < n; ++i) {
      const V x = set(weight_a[i]), y = set(weight_b[i]), z = set(sinks ? weight[i] : 1);
      const int64_t at = (from + i) * dim;
      combine(static_cast<T*>(out) + at, stored.o + at, fresh.o + at, dim, [&](Pair p, Pair q) {
        return Pair{fma(y, q.a, x * p.a) * z, fma(y, q.b, x * p.b) * z};
      });
    }
  }
}

inline std::uint64_t read(const void* from, std::size_t bytes) {
  const char* p = static_cast<const char*>(from);
  I sum[4] = {};
  for (const char* end = p + bytes / 256 * 256; p < end; p += 4 * sizeof(I))
    for (int i = 0; i < 4; ++i) {
      I x;
      __builtin_memcpy(&x, p + std::size_t(i) * sizeof(I), sizeof x);
      sum[i] ^= x;
    }
  return std::uint64_t((sum[0] ^ sum[1] ^ sum[2] ^ sum[3])[0]);
}
