// The loops over keys and values. Included after kernel.h, in the same namespace.

// A query against a key: as floats, unless the variant multiplies as stored. A step takes `parts` products.
template <class T>
struct Dot {
  using Row = Pair;
  using Part = V;
  static constexpr int step = 2 * W, parts = 2;
  static Row load(const T* p) { return load_pair(p); }
  static Row load(const T* p, int64_t n) { return load_tail(p, n); }
  template <int n>
  static V part(const Row& row) {
    return n ? row.b : row.a;
  }
  static V add(V sum, V q, V k) { return fma(q, k, sum); }
};

// What will be read next, on its way while this is computed, a few lines with every few products. All at once would
// fill the places where loads wait for their lines, and hold up those that are needed now. step 64, or 0: nothing.
struct Ahead {
  const char* at;
  int64_t step;

  // While `bytes` are used up, into L2, or L1 for 3. Always inline: by itself it would be a function without effect, and
  // go.
  template <int bytes, int cache = 2>
  [[gnu::always_inline]] void fetch() {
    for (int i = 0; i < (bytes + 63) / 64; ++i) __builtin_prefetch(at + i * 64, 0, cache);
    at += step * bytes / 64;
  }
};

// Places for each token where the sums of G queries wait.
template <int G>
constexpr int kPlaces = G == 3 ? 4 : G;

// Products of G queries with N keys, which begin at k, `stride` numbers apart. For keys after `last`, that one is used
// again. q: G rows for each step. Each of `sums` gets four sums, whose fours are added later. It uses packs, because GCC
// keeps sums in registers only if every index is a constant from the start.
template <class T, int G, int... i, int... at>
[[gnu::always_inline]] inline void products(const typename Dot<T>::Row* q, const T* k, int64_t stride, int64_t last,
                                            int64_t dim, V* sums, Ahead& ahead, std::integer_sequence<int, i...>,
                                            std::integer_sequence<int, at...>) {
  constexpr int step = Dot<T>::step, N = sizeof...(i), P = kPlaces<G>;
  V sum[] = {(void(at), V{})...};
  const auto add = [&](int64_t j, auto... left) __attribute__((always_inline)) {
    const auto part = [&](auto number) __attribute__((always_inline)) {
      constexpr int n = decltype(number)::value;
      asm("" : "+r"(k));  // or the compiler would keep both parts of the keys, for which there are no registers
      const typename Dot<T>::Part x[] = {
          Dot<T>::template part<n>(Dot<T>::load(k + (i < last ? i : last) * stride + j * step, left...))...};
      if constexpr (kThrees && N == 3 && std::is_same_v<typename Dot<T>::Row, Pair>)
        ((at % 3 ? void() : add_three(sum + at, n ? q[j * G + at / 3].b : q[j * G + at / 3].a, x)), ...);
      else
        ((sum[at] = Dot<T>::add(sum[at], Dot<T>::template part<n>(q[j * G + at / N]), x[at % N])), ...);
    };
    part(std::integral_constant<int, 0>());
    if constexpr (Dot<T>::parts > 1) part(std::integral_constant<int, 1>());
  };
  constexpr int bytes = N * step * int(sizeof(T));
  for (; dim >= 2 * step; dim -= 2 * step, k += 2 * step, q += 2 * G) {
    add(0), add(1);
    ahead.template fetch<2 * bytes>();
  }
  for (; dim >= step; dim -= step, k += step, q += G) add(0), ahead.template fetch<bytes>();
  if (dim) add(0, dim);
  const auto of = [&](int e) { return e < N * P && e % P < G ? sum[e % P * N + e / P] : V{}; };
  for (int e = 0; e < N * P; e += 4) sums[e / 4] = sum4(of(e), of(e + 1), of(e + 2), of(e + 3));
}

using Four = float __attribute__((vector_size(16)));

inline Four add_fours(const V& x) {
  Four parts[W / 4];
  __builtin_memcpy(parts, &x, sizeof x);
  for (int i = 1; i < W / 4; ++i) parts[0] += parts[i];
  return parts[0];
}

// Four tokens' sums of G queries, from their places to one Four for each query.
template <int G>
inline void by_query(const V* sums, Four* x) {
  for (int i = 0; i < kPlaces<G>; ++i) x[i] = add_fours(sums[i]);
  if constexpr (kPlaces<G> == 4) {
    const Four a = __builtin_shufflevector(x[0], x[1], 0, 4, 1, 5), b = __builtin_shufflevector(x[2], x[3], 0, 4, 1, 5);
    const Four c = __builtin_shufflevector(x[0], x[1], 2, 6, 3, 7), d = __builtin_shufflevector(x[2], x[3], 2, 6, 3, 7);
    x[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5), x[1] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
    x[2] = __builtin_shufflevector(c, d, 0, 1, 4, 5), x[3] = __builtin_shufflevector(c, d, 2, 3, 6, 7);
  } else if constexpr (G == 2) {
    const Four a = x[0];
    x[0] = __builtin_shufflevector(a, x[1], 0, 2, 4, 6), x[1] = __builtin_shufflevector(a, x[1], 1, 3, 5, 7);
  }
}

// Scores of G queries [G, kScores] at `low .. high`, whose keys begin at k and follow each other by `stride` numbers.
template <class T, int G>
inline void scores(const typename Dot<T>::Row* q, const T* k, int64_t stride, int low, int high, int64_t dim,
                   float* score, Ahead ahead) {
  constexpr int P = kPlaces<G>, N = P == 4 ? 3 : 8 / P, R = P == 4 ? 2 : 4 / P;  // tokens at once; where fewer are left
  constexpr int kTokens = 32;  // before their sums go where they belong
  V sums[(kTokens + 4) * P / 4];
  for (int from = low; from < high; from += kTokens, k += kTokens * stride) {
    const int count = from + kTokens < high ? kTokens : high - from;
    const auto tokens = [&](auto number, int t, int64_t last) __attribute__((always_inline)) {
      constexpr int n = decltype(number)::value;
      products<T, G>(q, k + t * stride, stride, last, dim, sums + t * P / 4, ahead,
                     std::make_integer_sequence<int, n>(), std::make_integer_sequence<int, n * G>());
    };
    int t = 0;
    for (; t + N <= count; t += N) tokens(std::integral_constant<int, N>(), t, N - 1);
    for (; t < count; t += R) tokens(std::integral_constant<int, R>(), t, min(R, count - t) - 1);
    for (t = 0; t < count; t += 4) {
      Four x[4];
      by_query<G>(sums + t * P / 4, x);
      for (int g = 0; g < G; ++g) __builtin_memcpy(score + g * kScores + from + t, &x[g], sizeof x[g]);
    }
  }
}

// o [G, stride_o] += weight [G, kScores] at `low .. high` . v, whose rows begin at v; `first`: o = that.
template <class T, int G>
inline void accumulate(const float* weight, const T* v, int64_t stride, int low, int high, bool first, int64_t dim,
                       float* o, int64_t stride_o, Ahead ahead) {
  constexpr int N = 32, M = 4;  // tokens before o is written back, tokens at once
  constexpr int bytes = 2 * W * int(sizeof(T));
  for (int from = low; from < high; from += N) {
    const int count = from + N < high ? N : high - from;
    const bool empty = first && from == low;
    const auto block = [&](int64_t d, auto fetch) __attribute__((always_inline)) {
      V a[G], b[G];
      for (int g = 0; g < G; ++g) {
        float* at = o + g * stride_o + d;
        a[g] = empty ? V{} : load(at), b[g] = empty ? V{} : load(at + W);
      }
      const T* row = v + (from - low) * stride + d;
      const float *w = weight + from, *end = w + count;
      const auto token = [&](const T* row, const float* w) __attribute__((always_inline)) {
        const Pair x = fetch(row);
        for (int g = 0; g < G; ++g) {
          const V y = set(w[g * kScores]);
          a[g] = fma(y, x.a, a[g]), b[g] = fma(y, x.b, b[g]);
        }
      };
      for (; w + M <= end; w += M, row += M * stride) {
        for (int i = 0; i < M; ++i) token(row + i * stride, w + i);
        ahead.template fetch<M * bytes>();
      }
      for (; w < end; ++w, row += stride) token(row, w);
      for (int g = 0; g < G; ++g) store_pair(o + g * stride_o + d, {a[g], b[g]});
    };
    int64_t d = 0;
    for (; d + 2 * W <= dim; d += 2 * W) block(d, [](const T* p) { return load_pair(p); });
    if (d < dim) block(d, [&](const T* p) { return load_tail(p, dim - d); });
  }
}

// The loops as a task calls them, over vectors. A *block* is up to kMost queries of one head. q: as `load` left them, in
// `width` numbers each. k and v: rows of one head from token `low` on, `stride` numbers apart.
template <class T, class S>
struct Vectors {
  using Row = typename Dot<S>::Row;
  static constexpr int kMost = 4, kStep = W;
  static constexpr float kUnit = 1;
  static constexpr bool kLate = false;  // whether o is divided by the sum of the weights, which else add up to 1
  // Whether a chunk is computed head by head, all its values at once (tiles.h). `add` then divides o itself.
  static constexpr bool kByHead = false;

  static int64_t width(int64_t dim) {
    constexpr int step = Dot<S>::step;
    return (dim + step - 1) / step * int64_t(sizeof(Row) / sizeof(float));
  }

  // Rows of `count` queries, step by step.
  static void load(const T* const* from, int count, int64_t dim, float* to) {
    constexpr int step = Dot<S>::step;
    Row* const rows = reinterpret_cast<Row*>(to);
    for (int g = 0; g < count; ++g)
      for (int64_t d = 0; d < dim; d += step) {
        Row& row = rows[d / step * count + g];
        row = d + step <= dim ? loaded(from[g] + d) : loaded(from[g] + d, dim - d);
      }
  }

  // Scores [count, kScores] at `low .. high`.
  static void score(int count, const float* q, const S* k, int64_t stride, int low, int high, int64_t dim, float* score,
                    Ahead ahead) {
    const auto f = count == 4 ? scores<S, 4> : count == 3 ? scores<S, 3> : count == 2 ? scores<S, 2> : scores<S, 1>;
    f(reinterpret_cast<const Row*>(q), k, stride, low, high, dim, score, ahead);
  }

  // o [count, stride_o] += weight [count, kScores] at `low .. high` . v; `first`: o = that.
  static void add(int count, const float* weight, const S* v, int64_t stride, int low, int high, bool first,
                  int64_t dim, float* o, int64_t stride_o, Ahead ahead) {
    const auto f = count == 4   ? accumulate<S, 4>
                   : count == 3 ? accumulate<S, 3>
                   : count == 2 ? accumulate<S, 2>
                                : accumulate<S, 1>;
    f(weight, v, stride, low, high, first, dim, o, stride_o, ahead);
  }

  // Scores times kUnit, of which `top` is the highest, to weights in `add`'s own form; begin, end: multiples of kStep.
  static Softmax weights(float top, int begin, int end, float* score) { return softmax(top, begin, end, score); }

 private:
  template <class... Left>
  static Row loaded(const T* p, Left... left) {
    if constexpr (std::is_same_v<S, T>)
      return Dot<S>::load(p, left...);
    else if constexpr (sizeof...(left))
      return natural<T>(load_tail(p, left...));
    else
      return natural<T>(load_pair(p));
  }
};
