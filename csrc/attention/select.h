// Bounds of what queries score in blocks. Included after kernel.h, in the same namespace.

// Of G queries, `wide` numbers apart, in one block: to `to`, `stride` apart.
template <int G, class S>
inline void bound_block(const float* q, int64_t wide, const S* least, const S* most, int64_t dim, float scale,
                        float* to, int64_t stride) {
  V a[G] = {}, b[G] = {};
  const auto add = [&](int64_t d, Pair low, Pair high) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      const V x = load(q + g * wide + d), y = load(q + g * wide + d + W);
      a[g] += max(x * low.a, x * high.a), b[g] += max(y * low.b, y * high.b);
    }
  };
  int64_t d = 0;
  for (; d + 2 * W <= dim; d += 2 * W) add(d, load_pair(least + d), load_pair(most + d));
  if (d < dim) add(d, load_tail(least + d, dim - d), load_tail(most + d, dim - d));
  const auto sum = [](auto x, auto y) __attribute__((always_inline)) { return x + y; };
  for (int g = 0; g < G; ++g) to[g * stride] = fold(a[g] + b[g], sum) * scale;
}

// See Variant. T: of q; S: of the least and largest K, floats where that is stored in 8 bits.
template <class T, class S>
void bound(const Selecting& of, const Choice& row, int64_t head, float* queries, float* scores) {
  const Operator& op = *of.op;
  const int64_t dim = op.qk_dim, wide = padded(dim), group = op.group(), count = row.high - row.low;
  for (int64_t g = 0; g < group; ++g) {
    const T* q = static_cast<const T*>(of.q) + (row.row * op.q_heads + head * group + g) * dim;
    for (int64_t d = 0; d < dim; d += 2 * W) {
      const Pair x = d + 2 * W <= dim ? load_pair(q + d) : load_tail(q + d, dim - d);
      store_pair(queries + g * wide + d, reorder<T, S>(x));
    }
  }
  const auto place = [&](int64_t b) { return (row.blocks[row.low + b] * op.kv_heads + head) * dim; };
  for (int64_t b = 0; b < count; ++b) {
    const S *least = static_cast<const S*>(of.least) + place(b), *most = static_cast<const S*>(of.most) + place(b);
    const int64_t next = place(min(b + 2, count - 1));  // on its way while this one is added up
    for (int64_t d = 0; d < dim; d += int64_t(64 / sizeof(S))) {
      __builtin_prefetch(static_cast<const S*>(of.least) + next + d, 0, 2);
      __builtin_prefetch(static_cast<const S*>(of.most) + next + d, 0, 2);
    }
    for (int64_t g = 0; g < group;) {
      const float* q = queries + g * wide;
      float* to = scores + g * count + b;
      if (group - g >= 4)
        bound_block<4>(q, wide, least, most, dim, op.scale, to, count), g += 4;
      else if (group - g >= 2)
        bound_block<2>(q, wide, least, most, dim, op.scale, to, count), g += 2;
      else
        bound_block<1>(q, wide, least, most, dim, op.scale, to, count), g += 1;
    }
  }
}

// By whether K has scales.
template <class T>
constexpr std::array<Bound, 2> bounds = {bound<T, T>, bound<T, float>};
