// The kernel, over the vectors of one variant. Included once by each, inside its own namespace and under its target.
//
// From the variant: W, V (W floats), I (as many int32), set, fma, max (a > b ? a : b), sum4, from_half, to_half,
// from_int8, from_fp8, once and kThrees. once keeps the compiler from loading its argument twice, since loads wait for
// memory. kThrees: it has add_three, products of one query's part with three keys', to three sums. Vectors are the
// compiler's own (GCC 12, Clang 12 or later), so + - * / < ? : & | << work on them.
//
// Bits: a query gets one fixed chain of operations over its own tokens, whatever other queries are computed with it. A
// score sums D in one order, weights are summed by absolute position, o takes one token after the other, two of them
// (avx512/pairs.h, avx512/bf16_matrix.h) or 32 (amx_matrix.h). Tokens that a query does not see enter with the weight 0.
// That changes nothing where their values are finite. The sequence's rows in the step decide which chain it is
// (amx_bf16.cpp).

using Bits = std::uint16_t;
struct BFloat16 {
  Bits bits;
};
struct Half {
  Bits bits;
};
struct Int8 {
  signed char number;
};
struct Fp8 {
  unsigned char bits;
};  // E4M3

struct Pair {
  V a, b;
};

constexpr float kNone = -__builtin_inff();

inline V as_float(I x) { return (V)x; }
inline I as_int(V x) { return (I)x; }
inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }  // not std's: it would be shared with other targets
inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline V load(const float* p) {
  V x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
inline void store(float* p, V x) { __builtin_memcpy(p, &x, sizeof x); }

// 2 W numbers of a row. bfloat16 come as those of even and those of odd index, since that costs least; `natural` puts
// them in order.
template <class T>
Pair load_pair(const T* p);
template <>
inline Pair load_pair(const float* p) {
  return {load(p), load(p + W)};
}
template <>
inline Pair load_pair(const BFloat16* p) {
  I x;
  __builtin_memcpy(&x, p, sizeof x);
  once(x);
  return {as_float(x << 16), as_float(x & ~0xffff)};
}
template <>
inline Pair load_pair(const Half* p) {
  return {from_half(&p->bits), from_half(&p[W].bits)};
}

template <>
inline Pair load_pair(const Int8* p) {
  return {from_int8(p), from_int8(p + W)};
}
template <>  // as halves with the same bits, which are too small by what `unit` says
inline Pair load_pair(const Fp8* p) {
  return {from_fp8(p), from_fp8(p + W)};
}
template <class T>
constexpr float unit = std::is_same_v<T, Fp8> ? 256 : 1;

// The last n < 2 W numbers of a row, then zeros; nothing after them is read.
template <class T>
inline Pair load_tail(const T* p, int64_t n) {
  alignas(64) T x[2 * W] = {};
  for (int64_t i = 0; i < n; ++i) x[i] = p[i];
  return load_pair(x);
}

inline I round_bf16(V x) {
  const I bits = as_int(x), quiet = bits | 0x400000;
  return x == x ? bits + 0x7fff + ((bits >> 16) & 1) : quiet;
}

inline void store_pair(float* p, Pair x) { store(p, x.a), store(p + W, x.b); }
inline void store_pair(BFloat16* p, Pair x) {
  using U = std::uint32_t __attribute__((vector_size(sizeof(I))));
  const U y = ((U)round_bf16(x.a) >> 16) | ((U)round_bf16(x.b) & 0xffff0000u);
  __builtin_memcpy(p, &y, sizeof y);
}
inline void store_pair(Half* p, Pair x) { to_half(&p->bits, x.a), to_half(&p[W].bits, x.b); }
template <class T>
inline void store_tail(T* p, int64_t n, Pair x) {
  alignas(64) T y[2 * W];
  store_pair(y, x);
  for (int64_t i = 0; i < n; ++i) p[i] = y[i];
}

template <std::size_t... i>
inline V lanes(std::index_sequence<i...>) {
  return V{float(i)...};
}
template <std::size_t... i>
inline Pair interleave(Pair x, std::index_sequence<i...>) {
  return {__builtin_shufflevector(x.a, x.b, int(i / 2 + i % 2 * W)...),
          __builtin_shufflevector(x.a, x.b, int((i + W) / 2 + i % 2 * W)...)};
}
template <std::size_t... i>
inline Pair separate(Pair x, std::index_sequence<i...>) {
  return {__builtin_shufflevector(x.a, x.b, int(2 * i)...), __builtin_shufflevector(x.a, x.b, int(2 * i + 1)...)};
}
template <class T>
inline Pair natural(Pair x) {
  if constexpr (std::is_same_v<T, BFloat16>) return interleave(x, std::make_index_sequence<W>());
  return x;
}
template <class T>  // the inverse of natural
inline Pair as_loaded(Pair x) {
  if constexpr (std::is_same_v<T, BFloat16>) return separate(x, std::make_index_sequence<W>());
  return x;
}

// From the order in which S is loaded to that of T.
template <class S, class T>
inline Pair reorder(Pair x) {
  if constexpr (std::is_same_v<S, T>) return x;
  return as_loaded<T>(natural<S>(x));
}

// exp(x), x <= 0, with a relative error of 4e-7 if fma rounds once (2e-7 above exp(-20)). It is 1 for 0, and 0 below the
// normal numbers. x = k log(2) + r: the last bits of k + magic are the exponent of 2^k, and the polynomial is the best of
// its degree that is 1 for r = 0.
inline V exp(V x) {
  const V low = set(-88.02969f), magic = set(12583039);  // low: k = -127, whose power comes out as 0
  const V y = max(low, x), sum = fma(y, set(1.44269504f), magic);
  const V r = fma(sum - magic, set(-0.693147180f), y);
  V p = set(8.290168829e-3f);
  for (float c : {4.189816117e-2f, 1.666764021e-1f, 4.999914765e-1f, 9.999997020e-1f, 1.0f}) p = fma(p, r, set(c));
  return p * as_float(as_int(sum) << 23);
}

// log(x) of a normal number x > 0. After Cephes (Moshier, Methods and Programs for Mathematical Functions), as is tanh.
inline V log(V x) {
  const I bits = as_int(x) - 0x3f3504f3;  // of sqrt(1/2): the mantissa becomes sqrt(1/2) .. sqrt(2)
  const V e = __builtin_convertvector(bits >> 23, V);
  const V r = as_float((bits & 0x7fffff) + 0x3f3504f3) - 1.0f, z = r * r;
  V p = set(7.0376836292e-2f);
  for (float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                  2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
    p = fma(p, r, set(c));
  p = fma(e, set(-2.12194440e-4f), p * r * z);
  return x == x ? fma(e, set(0.693359375f), r + fma(z, set(-0.5f), p)) : x;
}

inline V tanh(V x) {
  const V size = as_float(as_int(x) & 0x7fffffff), z = x * x;
  const V e = exp(-2.0f * size), far = (1.0f - e) / (1.0f + e);
  V p = set(-5.70498872745e-3f);
  for (float c : {2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f}) p = fma(p, z, set(c));
  const V near = fma(p * z, x, x);
  return size < 0.625f ? near : as_float(as_int(far) | (as_int(x) & ~0x7fffffff));
}

template <int n, class Part, class F, std::size_t... i>
inline float fold_halves(Part x, F f, std::index_sequence<i...>) {
  if constexpr (n == 1) {
    return f(x[0], x[1]);
  } else {
    const auto y = f(__builtin_shufflevector(x, x, int(i)...), __builtin_shufflevector(x, x, int(i + n)...));
    return fold_halves<n / 2>(y, f, std::make_index_sequence<n / 2>());
  }
}
template <class F>
inline float fold(V x, F f) {
  return fold_halves<W / 2>(x, f, std::make_index_sequence<W / 2>());
}

// Positions by which a query sees a chunk, all less the chunk's first one: tokens `low .. high`; `self` is its own.
struct View {
  int low, high;
  float self, slope;
};

struct Softmax {
  float top, total;  // log-sum-exp = top + log(total)
};

// Products of tokens `begin .. end`, whole vectors, to scores times `unit`, which are -inf where the query does not see
// them. Returns the highest.
inline float see(const Operator& op, float unit, const View& view, int begin, int end, float* score) {
  const bool bent = op.softcap > 0 || op.slopes, whole = view.low <= begin && view.high >= end;
  const float scale = bent ? op.scale : op.scale * unit;
  V most = set(kNone);
  for (int t = begin; t < end; t += W) {
    V x = load(score + t) * scale;
    if (bent || !whole) {
      const V at = lanes(std::make_index_sequence<W>()) + float(t);
      if (op.softcap > 0) x = tanh(x / op.softcap) * op.softcap;
      if (op.slopes) x += view.slope * (at - view.self);
      if (bent) x = x * unit;
      x = (at >= float(view.low)) & (at < float(view.high)) ? x : set(kNone);
    }
    most = max(most, x);
    store(score + t, x);
  }
  return fold(most, [](auto a, auto b) __attribute__((always_inline)) { return a > b ? a : b; });
}

// Scores of tokens `begin .. end`, of which `top` is the highest, to weights that add up to 1, or all 0.
inline Softmax softmax(float top, int begin, int end, float* score) {
  const V shift = set(top > -__FLT_MAX__ ? top : -__FLT_MAX__);  // -inf less -inf would be NaN
  V total = {};
  for (int t = begin; t < end; t += W) {
    const V x = exp(load(score + t) - shift);
    total += x;
    store(score + t, x);
  }
  const float sum = fold(total, [](auto a, auto b) __attribute__((always_inline)) { return a + b; });
  const float least = sum < 1 ? 1 : sum;  // the highest one counts 1: this touches nothing but empty ones
  const V share = set(1 / least);
  for (int t = begin; t < end; t += W) store(score + t, load(score + t) * share);
  return {top, least};
}

// An entry of the merge tree: o [queries, stride] as loaded, lse [kTile], both in scratch or in Call::parts.
struct Node {
  int64_t level, number;
  float *o, *lse;
};

struct Tile {
  const Operator& op;
  int64_t queries, stride;

  Node node(float* at) const { return {0, 0, at, at + queries * stride}; }
};

// merge.merge's arithmetic for `n` queries: what a and b weigh in the result, and its lse, which may be a's own.
inline void weigh(const float* a, const float* b, int64_t n, float* weight_a, float* weight_b, float* lse) {
  for (int64_t i = 0; i < n; i += W) {
    const V x = load(a + i), y = load(b + i);
    const V high = x > y ? x : y, floor = set(-__FLT_MAX__), shift = high < floor ? floor : high;
    const V wx = exp(x - shift), wy = exp(y - shift);
    const V sum = wx + wy, total = sum < 1.0f ? set(1) : sum;
    store(weight_a + i, wx / total), store(weight_b + i, wy / total);
    store(lse + i, high + log(total));
  }
}

// a becomes the merge of both.
inline void merge(const Tile& tile, Node& a, const Node& b) {
  float weight_a[kTile], weight_b[kTile];
  weigh(a.lse, b.lse, tile.queries, weight_a, weight_b, a.lse);
  float* to = a.o;
  const float* from = b.o;
  const int64_t queries = tile.queries, stride = tile.stride;
  for (int64_t i = 0; i < queries; ++i) {
    const V x = set(weight_a[i]), y = set(weight_b[i]);
    for (const float* end = to + stride; to < end; to += W, from += W) store(to, fma(y, load(from), x * load(to)));
  }
}

// merge.root of disjoint nodes, from left to right; the result is in nodes[0].
inline void root(const Tile& tile, Node* nodes, int64_t count) {
  while (count > 1) {
    int64_t level = nodes[0].level, kept = 0;
    for (int64_t i = 1; i < count; ++i) level = nodes[i].level < level ? nodes[i].level : level;
    for (int64_t i = 0; i < count; ++i) {
      Node node = nodes[i];
      if (node.level == level) ++node.level, node.number >>= 1;
      if (kept && nodes[kept - 1].level == node.level && nodes[kept - 1].number == node.number)
        merge(tile, nodes[kept - 1], node);
      else
        nodes[kept++] = node;
    }
    count = kept;
  }
}
