// How much queries attend each block: lamina/ops/attention/block_scores.py. Included after kernel.h, in the same
// namespace.

// Of G queries, `wide` numbers apart, with one key: to `to`, `stride` apart.
template <int G, class S>
inline void dot_key(const float* q, int64_t wide, const S* key, int64_t dim, float scale, float* to, int64_t stride) {
  V a[G] = {}, b[G] = {};
  const auto add = [&](int64_t d, Pair k) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g)
      a[g] = fma(load(q + g * wide + d), k.a, a[g]), b[g] = fma(load(q + g * wide + d + W), k.b, b[g]);
  };
  int64_t d = 0;
  for (; d + 2 * W <= dim; d += 2 * W) add(d, load_pair(key + d));
  if (d < dim) add(d, load_tail(key + d, dim - d));
  const auto sum = [](auto x, auto y) __attribute__((always_inline)) { return x + y; };
  for (int g = 0; g < G; ++g) to[g * stride] = fold(a[g] + b[g], sum) * scale;
}

// A query's scores of `tokens` tokens, in whole vectors, to shares of its softmax by block.
inline void add_shares(const Tallying& of, float* scores, int64_t tokens, const float* sink, int64_t* to) {
  const float softcap = of.op->softcap;
  for (int64_t t = tokens; t % W; ++t) scores[t] = kNone;
  V most = set(sink ? *sink : kNone);
  for (int64_t t = 0; t < tokens; t += W) {
    V x = load(scores + t);
    if (softcap > 0) x = x > kNone ? tanh(x / softcap) * softcap : x;
    x = x == x ? x : set(kNone);
    most = max(most, x);
    store(scores + t, x);
  }
  const float top = fold(most, [](auto a, auto b) __attribute__((always_inline)) { return a > b ? a : b; });
  const V shift = set(top > -__FLT_MAX__ ? top : -__FLT_MAX__);
  const auto whole = [&](float x) { return int64_t(x * float(int64_t(1) << kWeightBits)); };
  for (int64_t t = 0; t < tokens; t += W) store(scores + t, exp(load(scores + t) - shift));
  int64_t total = 0;
  for (int64_t t = 0; t < tokens; ++t) total += whole(scores[t]);
  if (sink) {
    float rest[W];
    store(rest, exp(set(*sink) - shift));
    total += whole(rest[0]);
  }
  for (int64_t t = 0, b = 0; t < tokens; t += of.block_size, ++b) {
    int64_t block = 0;
    for (int64_t i = t; i < min(t + of.block_size, tokens); ++i) block += whole(scores[i]);
    to[b] += (block << kScoreBits) / max(total, 1);
  }
}

// See Variant. T: of q; S: of K.
template <class T, class S>
int64_t tally(const Tallying& of, int64_t head, float* queries, float* scores, int64_t* to) {
  const Operator& op = *of.op;
  const int64_t dim = op.qk_dim, wide = padded(dim), group = op.group(), stride = of.blocks * of.block_size + W;
  const S* keys = static_cast<const S*>(of.k);
  int64_t pairs = 0;
  for (int64_t r = 0; r < of.rows; ++r) {
    for (int64_t g = 0; g < group; ++g) {
      const T* q = static_cast<const T*>(of.q) + (r * op.q_heads + head * group + g) * dim;
      for (int64_t d = 0; d < dim; d += 2 * W)
        store_pair(queries + g * wide + d,
                   reorder<T, S>(d + 2 * W <= dim ? load_pair(q + d) : load_tail(q + d, dim - d)));
    }
    const int64_t tokens = min(of.seen[r], of.blocks * of.block_size);
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t row = (of.ids[t / of.block_size] * op.kv_heads + head) * of.block_size + t % of.block_size;
      const float scale = op.scale * (of.k_scale ? of.k_scale[row] * unit<S> : 1);
      for (int64_t g = 0; g < group;) {
        const float* q = queries + g * wide;
        float* into = scores + g * stride + t;
        if (group - g >= 4)
          dot_key<4>(q, wide, keys + row * dim, dim, scale, into, stride), g += 4, pairs += 4;
        else
          dot_key<1>(q, wide, keys + row * dim, dim, scale, into, stride), g += 1, pairs += 1;
      }
    }
    for (int64_t g = 0; g < group; ++g)
      add_shares(of, scores + g * stride, tokens, op.sinks ? op.sinks + head * group + g : nullptr, to);
  }
  return pairs;
}

// By Stored.
template <class T>
constexpr std::array<Tally, kStored> tallies = {tally<T, T>, tally<T, Int8>, tally<T, Fp8>};
