// One task: the tokens of a tile's chunks through the kernel, the chunks' nodes up the merge tree, the root to where it
// is wanted. Included after loops.h, in the same namespace.

// T: of q and the result; S: of k and v, which have scales where that is another type. Loops: see Vectors.
template <class T, class S, class Loops>
class Run {
 public:
  Run(const Call& call, const Task& task, Scratch& scratch)
      : call_(call), op_(*call.op), task_(task), group_(op_.group()), each_(task.end - task.begin),
        tile_{op_, each_ * task.heads, padded(op_.v_dim)}, first_row_(call.rows->row[task.sequence]),
        first_(call.stored ? call.rows->first[task.sequence] : 0), token_(call.stored ? 1 : op_.kv_heads),
        next_head_(call.stored ? call.rows->block_size : 1), queries_(scratch.data()),
        scores_(queries_ + kTile * spread(op_.qk_dim)), values_(scores_ + kTile * kScores),
        space_(values_ + values_size(op_)) {}

  // The task's node in `space_`.
  Node compute() {
    for (int64_t i = 0; i < tile_.queries; ++i) rows_[i] = int((task_.begin + i % each_) / group_);
    load_queries();
    Node nodes[2 * 64];
    int64_t depth = 0;
    Chunk chunks[2];
    int64_t number = task_.low / kChunk;
    const int64_t last = task_.low < task_.high ? (task_.high + kChunk - 1) / kChunk : number;
    if (number < last) locate(number, chunks[number & 1]);
    for (; number < last; ++number) {
      Chunk &here = chunks[number & 1], &next = chunks[~number & 1];
      next.count = 0;
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
        write(call_.o + at * op_.v_dim, [&](int64_t d) { return natural<S>(load_pair(o + d)); });
      }
      return;
    }
    float lse[kTile] = {}, weight_a[kTile], weight_b[kTile], sinks[kTile] = {}, weight[kTile];
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
        const Pair y = reorder<S, T>(load_pair(o + d));
        const Pair x =
            as_loaded<T>(d + 2 * W <= op_.v_dim ? load_pair(stored + d) : load_tail(stored + d, op_.v_dim - d));
        return Pair{fma(b, y.a, a * x.a) * c, fma(b, y.b, a * x.b) * c};
      });
    }
  }

 private:
  static constexpr bool kScaled = !std::is_same_v<S, T>;

  // Contiguous tokens of a chunk, as positions less the chunk's first one; rows of the first head.
  struct Piece {
    const S *k, *v;
    int64_t row;  // of k and v, by which their scales go
    int low, high;
  };

  // The tokens of a chunk that some query sees, in order.
  struct Chunk {
    Piece pieces[kChunk];
    int count;
  };

  // Queries of one head that are computed at once, and the range of tokens that some of them sees. `alike`: all of them
  // see all these, and have no slopes.
  struct Block {
    int query, count, low, high;
    bool alike;
  };

  int64_t head(int64_t query) const {
    return (task_.head + query / each_) * group_ + (task_.begin + query % each_) % group_;
  }
  int64_t row(int64_t query) const { return rows_[query]; }
  int64_t place(int64_t query) const { return (first_row_ + row(query)) * op_.q_heads + head(query); }

  void load_queries() {
    const T* from[kTile];
    for (int64_t query = 0, count; query < tile_.queries; query += count) {
      count = block_at(query);
      for (int64_t g = 0; g < count; ++g) from[g] = static_cast<const T*>(call_.q) + place(query + g) * op_.qk_dim;
      loops_.load(from, int(count), op_.qk_dim, queries_ + query * Loops::width(op_.qk_dim));
    }
  }

  void locate(int64_t number, Chunk& chunk) const {
    const Rows& rows = *call_.rows;
    const int64_t begin = number * kChunk, s = task_.sequence, size = rows.block_size;
    const S *k = static_cast<const S*>(call_.k), *v = static_cast<const S*>(call_.v);
    const int high = int(min(task_.high - begin, kChunk));
    chunk.count = 0;
    for (int t = int(max(task_.low - begin, 0)); t < high;) {
      const int64_t position = begin + t;
      int64_t at = (first_row_ + position) * op_.kv_heads + task_.head, upto = high;
      if (call_.stored) {
        const int64_t block = rows.table[s * rows.width + (position - rows.origin[s]) / size], inside = position % size;
        at = (block * op_.kv_heads + task_.head) * size + inside, upto = min(t + size - inside, high);
      }
      chunk.pieces[chunk.count++] = {k + at * op_.qk_dim, v + at * op_.v_dim, at, t, int(upto)};
      t = int(upto);
    }
  }

  // Tokens of the chunk at `begin`, of which it has `low .. high`, that a query sees, and where the query stands.
  View view(int64_t query, int64_t begin, int low, int high) const {
    const int64_t self = first_ + row(query) - begin;
    const int64_t from = op_.window ? self - op_.window + 1 : 0, upto = call_.stored ? high : self + 1;
    const float slope = op_.slopes ? op_.slopes[head(query)] : 0;
    return {int(min(max(from, low), kChunk)), int(max(min(upto, high), 0)), float(self), slope};
  }

  // The node of one chunk.
  void attend(int64_t begin, const Chunk& here, const Chunk& next, Node& node) {
    View views[kTile];
    Block blocks[kTile];
    float totals[kTile] = {};
    const int low = here.pieces[0].low, high = here.pieces[here.count - 1].high;
    const int64_t per_head = divide(begin, low, high, views, blocks), count = per_head * task_.heads;
    if constexpr (Loops::kByHead)
      for (int64_t h = 0; h < task_.heads; ++h) attend_head(here, next, h, blocks[h], views, node, totals);
    else
      attend_pieces(here, next, blocks, per_head, views, node, totals);
    for (int64_t i = 0; i < tile_.queries; i += W) store(node.lse + i, load(node.lse + i) + log(load(totals + i)));
    for (const Block* block = blocks; block < blocks + count; ++block)
      if (block->low >= block->high)
        for (int64_t i = 0; i < block->count * tile_.stride; ++i) node.o[block->query * tile_.stride + i] = 0;
      else if (Loops::kLate && !Loops::kByHead)
        for (int i = block->query; i < block->query + block->count; ++i)
          divide_by(totals[i], node.o + i * tile_.stride);
  }

  // K and V of one head, all whose queries are one block.
  void attend_head(const Chunk& here, const Chunk& next, int64_t h, const Block& block, const View* views, Node& node,
                   float* totals) {
    static_assert(Loops::kMost >= kTile && !kScaled);
    const int64_t query = block.query;
    if (block.low >= block.high) {
      for (int64_t i = query; i < query + block.count; ++i) node.lse[i] = kNone, totals[i] = 1;
      return;
    }
    const bool last = h + 1 == task_.heads;
    loops_.clear(block.low, block.high, op_.v_dim, values_);
    for (int p = 0; p < here.count; ++p) {
      const Piece& piece = here.pieces[p];
      const int low = int(max(block.low, piece.low)), high = int(min(block.high, piece.high));
      const int64_t row = h * next_head_ + (low - piece.low) * token_;
      score_keys(block, piece, h, fetch(here, true, p, h), fetch(last ? next : here, false, p, last ? 0 : h + 1));
      loops_.lay_out(piece.v + row * op_.v_dim, token_ * op_.v_dim, low, high, op_.v_dim, values_);
    }
    float* const scores = scores_ + query * kScores;
    loops_.weights(op_, block.count, block.alike ? nullptr : views + query, block.low, block.high, scores,
                   node.lse + query, totals + query);
    loops_.add(block.count, scores, values_, totals + query, block.low, block.high, op_.v_dim,
               node.o + query * tile_.stride, tile_.stride);
  }

  // K and then V, each in the order of memory, which is all heads of a block before the next.
  void attend_pieces(const Chunk& here, const Chunk& next, const Block* blocks, int64_t per_head, const View* views,
                     Node& node, float* totals) {
    for (const bool values : {false, true}) {
      for (int p = 0; p < here.count; ++p)
        for (int64_t h = 0; h < task_.heads; ++h) {
          Ahead ahead = after(here, next, values, p, h);
          for (int64_t i = h * per_head; i < (h + 1) * per_head; ++i, ahead.step = 0)  // fetched once is enough
            if (values)
              weigh_values(blocks[i], here.pieces[p], h, node, ahead);
            else
              score_keys(blocks[i], here.pieces[p], h, ahead);
        }
      if (!values) weights(blocks, per_head * task_.heads, views, node, totals);
    }
  }

  void divide_by(float total, float* o) const {
    const V share = set(1 / total);
    for (const float* const end = o + tile_.stride; o < end; o += W) store(o, load(o) * share);
  }

  // Queries of the block that begins with `query`: of one head, and its blocks as equal as can be.
  int64_t block_at(int64_t query) const {
    const int64_t left = each_ - query % each_, blocks = (left + Loops::kMost - 1) / Loops::kMost;
    return (left + blocks - 1) / blocks;
  }

  // The tile in blocks. Returns the number of blocks of each head.
  int64_t divide(int64_t begin, int low, int high, View* views, Block* blocks) const {
    const Block* const first = blocks;
    const bool known = Loops::kByHead && call_.stored && !op_.window && !op_.slopes;
    for (int query = 0; query < tile_.queries;) {
      Block& block = *blocks++;
      block = {query, int(block_at(query)), kChunk, 0, !op_.slopes};
      query += block.count;
      if (known) block.low = low, block.high = high;
      for (int i = block.query; i < query && !known; ++i) {
        const View& mine = views[i] = view(i, begin, low, high);
        block.alike = block.alike && mine.low == views[block.query].low && mine.high == views[block.query].high;
        block.low = int(min(block.low, mine.low)), block.high = int(max(block.high, mine.high));
      }
    }
    return (blocks - first) / task_.heads;
  }

  // The memory that is read after piece p of a head's K, or V.
  Ahead after(const Chunk& here, const Chunk& next, bool values, int p, int64_t h) const {
    const Chunk* chunk = &here;
    if (++h == task_.heads) h = 0, ++p;
    if (p == here.count) chunk = values ? &next : &here, p = 0, values = !values;
    return fetch(*chunk, values, p, h);
  }

  // Piece p of a head's K, or V.
  Ahead fetch(const Chunk& chunk, bool values, int p, int64_t h) const {
    if (!call_.stored || p >= chunk.count) return {reinterpret_cast<const char*>(queries_), 0};
    const Piece& piece = chunk.pieces[p];
    if constexpr (kScaled) {
      const float* scale = (values ? call_.v_scale : call_.k_scale) + piece.row + h * next_head_;
      for (int t = piece.low; t < piece.high; t += 16) __builtin_prefetch(scale + (t - piece.low), 0, 2);
    }
    const S* at = values ? piece.v + h * next_head_ * op_.v_dim : piece.k + h * next_head_ * op_.qk_dim;
    return {reinterpret_cast<const char*>(at), 64};
  }

  template <class... Fetched>
  void score_keys(const Block& block, const Piece& piece, int64_t h, Fetched... ahead) {
    const int low = int(max(block.low, piece.low)), high = int(min(block.high, piece.high));
    if (low >= high) return;
    const int64_t row = h * next_head_ + (low - piece.low) * token_;
    loops_.score(block.count, queries_ + block.query * Loops::width(op_.qk_dim), piece.k + row * op_.qk_dim,
                 token_ * op_.qk_dim, low, high, op_.qk_dim, scores_ + block.query * kScores, ahead...);
    if constexpr (kScaled) multiply(block, call_.k_scale + piece.row + row, low, high);
  }

  // Scores, or weights, of tokens whose numbers have scales.
  void multiply(const Block& block, const float* scale, int low, int high) const {
    for (int i = block.query; i < block.query + block.count; ++i) {
      float* x = scores_ + i * kScores;
      int t = low;
      for (; token_ == 1 && t + W <= high; t += W) store(x + t, load(x + t) * (load(scale + (t - low)) * unit<S>));
      for (; t < high; ++t) x[t] *= scale[(t - low) * token_] * unit<S>;
    }
  }

  // Scores to weights; the log-sum-exp to the node.
  void weights(const Block* blocks, int64_t count, const View* views, Node& node, float* totals) {
    constexpr int step = Loops::kStep;
    float tops[kTile];
    const auto each = [&](auto f) __attribute__((always_inline)) {
      for (const Block* block = blocks; block < blocks + count; ++block)
        for (int i = block->query; i < block->query + block->count; ++i)
          f(i, block->low / step * step, (block->high + step - 1) / step * step, scores_ + i * kScores);
    };
    // All of one before the next: no query waits for the highest score of the one before it.
    each([&](int i, int begin, int end, float* x) { tops[i] = see(op_, Loops::kUnit, views[i], begin, end, x); });
    each([&](int i, int begin, int end, float* x) {
      const Softmax result = Loops::weights(tops[i], begin, end, x);
      node.lse[i] = result.top, totals[i] = result.total;
    });
  }

  void weigh_values(const Block& block, const Piece& piece, int64_t h, Node& node, Ahead ahead) {
    const int low = int(max(block.low, piece.low)), high = int(min(block.high, piece.high));
    if (low >= high) return;
    const int64_t row = h * next_head_ + (low - piece.low) * token_;
    if constexpr (kScaled) multiply(block, call_.v_scale + piece.row + row, low, high);
    loops_.add(block.count, scores_ + block.query * kScores, piece.v + row * op_.v_dim, token_ * op_.v_dim, low, high,
               low == block.low, op_.v_dim, node.o + block.query * tile_.stride, tile_.stride, ahead);
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
  const int64_t group_, each_;  // each_: queries of a KV head
  const Tile tile_;
  const int64_t first_row_, first_;  // first_: position of the first row, 0 where positions count from it
  const int64_t token_, next_head_;  // rows from one token to the next, and from one head to the next
  float *const queries_, *const scores_, *const values_, *const space_;
  int rows_[kTile];  // of the queries, in the step
  Loops loops_;
};

template <class T, class S, class Loops = Vectors<T, S>>
void run(const Call& call, int64_t number, Scratch& scratch) {
  const Task& task = call.tasks[number];
  const Operator& op = *call.op;
  Run<T, S, Loops> one(call, task, scratch);
  Node node = one.compute();
  if (task.split < 0) return one.deliver(node);
  // The nodes of a split are contiguous; the last task of it merges them.
  const int64_t queries = (task.end - task.begin) * task.heads;
  const auto part = [&](int64_t task) { return call.parts + task * node_size(op, kTile); };
  __builtin_memcpy(part(number), node.o, std::size_t(node_size(op, queries)) * sizeof(float));
  if (call.left[task.split].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
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

// By Stored.
template <class T>
constexpr std::array<RunTask, kStored> runs = {run<T, T>, run<T, Int8>, run<T, Fp8>};

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
void finish(Partial stored, Partial fresh, const float* sinks, int64_t queries, int64_t q_heads, int64_t dim,
            void* out) {
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
      combine(static_cast<T*>(out) + at, stored.o + at, fresh.o + at, dim,
              [&](Pair p, Pair q) { return Pair{fma(y, q.a, x * p.a) * z, fma(y, q.b, x * p.b) * z}; });
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
