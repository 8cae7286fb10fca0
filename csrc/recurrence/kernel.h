// The kernels, over the vectors of one variant. Included once by each, inside its own namespace and under its target.
//
// From the variant: W, V (W floats), set, fma, stream (a store past the caches), fence, root, halves_to_floats,
// floats_to_halves. kWide is the most vectors of a row of S that are updated together. Vectors are the compiler's own, so
// + - * work on them.

#include "rows/math.h"

inline std::int64_t least(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
inline V load(const float* p) {
  V x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
inline void store(float* p, V x) { __builtin_memcpy(p, &x, sizeof x); }
inline void copy(const float* from, float* to, std::int64_t n) { __builtin_memcpy(to, from, std::size_t(n) * 4); }
inline void clear(float* to, std::int64_t n) { __builtin_memset(to, 0, std::size_t(n) * 4); }

// `n` numbers of a row, from column `first` on, as floats.
inline void read(const Rows& rows, std::int64_t row, std::int64_t first, std::int64_t n, float* to) {
  const char* const at = rows.element(row, first);
  if (rows.type == Type::kFloat) {
    __builtin_memcpy(to, at, std::size_t(n) * 4);
  } else if (rows.type == Type::kBf16) {
    std::uint16_t bits;
    for (std::int64_t i = 0; i < n; ++i) {
      __builtin_memcpy(&bits, at + 2 * i, 2);
      to[i] = of_bf16(bits);
    }
  } else {
    halves_to_floats(at, to, n);
  }
}

inline void write(Type type, const float* from, std::int64_t n, char* to) {
  if (type == Type::kFloat) {
    __builtin_memcpy(to, from, std::size_t(n) * 4);
  } else if (type == Type::kBf16) {
    for (std::int64_t i = 0; i < n; ++i) {
      const std::uint16_t bits = bf16_of(from[i]);
      __builtin_memcpy(to + 2 * i, &bits, 2);
    }
  } else {
    floats_to_halves(from, to, n);
  }
}

// log(x), x >= 1. After Cephes (Moshier, Methods and Programs for Mathematical Functions).
inline float log_of(float x) {
  const auto bits = std::int32_t(to_bits(x) - 0x3f3504f3u);  // of sqrt(1/2): the mantissa becomes sqrt(1/2) .. sqrt(2)
  const float e = float(bits >> 23), r = from_bits(std::uint32_t(bits & 0x7fffff) + 0x3f3504f3u) - 1.0f, z = r * r;
  float p = 7.0376836292e-2f;
  for (float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                  2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
    p = p * r + c;
  return e * 0.693359375f + (r + (z * -0.5f + (e * -2.12194440e-4f + p * r * z)));
}

inline float softplus_of(float x) {
  if (!(x <= 20.0f)) return x;
  const float e = exp_of(x), u = 1.0f + e;
  return u == 1.0f ? e : log_of(u) * (e / (u - 1.0f));  // what 1 + e has lost by rounding (Kahan)
}

// The sum of products of rows that are padded with zeros: 16 sums, which are added up in halves.
inline float dot(const float* x, const float* y, std::int64_t n) {
  float sums[kPad] = {};
  for (std::int64_t i = 0; i < n; i += kPad)
    for (std::int64_t j = 0; j < kPad; ++j) sums[j] += x[i + j] * y[i + j];
  for (std::int64_t half = kPad / 2; half; half /= 2)
    for (std::int64_t j = 0; j < half; ++j) sums[j] += sums[j + half];
  return sums[0];
}

// Channels of the convolution, with the last rows of x before the next token, [width - 1, padded size].
struct Channels {
  std::int64_t first, size;
  float* before;

  std::int64_t row() const { return padded(size); }

  void begin(const Call& call, std::int64_t slot) const {
    const Layer& layer = *call.layer;
    for (std::int64_t j = 0; j + 1 < layer.width; ++j) {
      float* const to = before + j * row();
      if (slot < 0)
        clear(to, size);
      else
        copy(call.state(slot) + j * layer.channels + first, to, size);
    }
  }

  void end(const Call& call, std::int64_t slot) const {
    const Layer& layer = *call.layer;
    for (std::int64_t j = 0; j + 1 < layer.width; ++j)
      copy(before + j * row(), call.state(slot) + j * layer.channels + first, size);
  }

  // y [n, row()] of rows `first_row ..`; its padding is zero. `x`: room for [width - 1 + n, row()].
  void convolve(const Call& call, std::int64_t first_row, std::int64_t n, float* x, float* y) const {
    const Layer& layer = *call.layer;
    const std::int64_t kept = layer.width - 1, r = row();
    copy(before, x, kept * r);
    for (std::int64_t t = 0; t < n; ++t) read(call.x, first_row + t, first, size, x + (kept + t) * r);
    for (std::int64_t t = 0; t < n; ++t) sum(layer, x + t * r, r, x + (t + kept) * r, y + t * r);
    copy(x + n * r, before, kept * r);
  }

  // The same for one row, from slot to slot; `own`: if the rows of x after it are written. `x`: room for [row()].
  void convolve_one(const Call& call, const Segment& segment, bool own, float* x, float* y) const {
    const Layer& layer = *call.layer;
    const std::int64_t kept = layer.width - 1, channels = layer.channels;
    const float* const from = call.state(segment.read) + first;
    read(call.x, segment.first, first, size, x);
    for (std::int64_t j = 0; j < kept; ++j)  // the next head's, which are likely to be the next ones
      for (std::int64_t c = 0; c < size; c += 16) __builtin_prefetch(from + j * channels + size + c, 0, 3);
    sum(layer, from, channels, x, y);
    if (!own) return;
    float* const to = call.state(segment.write) + first;
    const bool past = call.stream && (size % 16 | channels % 16 | reinterpret_cast<std::uintptr_t>(to) % 64) == 0;
    for (std::int64_t j = 0; j < kept; ++j) {
      const float* const row = j + 1 < kept ? from + (j + 1) * channels : x;
      if (past)
        for (std::int64_t c = 0; c < size; c += W) stream(to + j * channels + c, load(row + c));
      else
        copy(row, to + j * channels, size);
    }
  }

 private:
  // Of a token whose rows of x are `stride` apart from `x` on, and the last one at `last`: one after the other.
  void sum(const Layer& layer, const float* x, std::int64_t stride, const float* last, float* to) const {
    const std::int64_t n = size, channels = layer.channels, width = layer.width;
    const float* const w = layer.weight.data() + first;
    if (width == 4) {
      const float *w1 = w + channels, *w2 = w1 + channels, *w3 = w2 + channels, *x1 = x + stride, *x2 = x1 + stride;
#pragma GCC ivdep
      for (std::int64_t c = 0; c < n; ++c) to[c] = w[c] * x[c] + w1[c] * x1[c] + w2[c] * x2[c] + w3[c] * last[c];
    } else {
#pragma GCC ivdep
      for (std::int64_t c = 0; c < n; ++c) to[c] = w[c] * x[c];
      for (std::int64_t j = 1; j < width; ++j) {
        const float *wj = w + j * channels, *xj = j + 1 < width ? x + j * stride : last;
#pragma GCC ivdep
        for (std::int64_t c = 0; c < n; ++c) to[c] += wj[c] * xj[c];
      }
    }
    if (!layer.bias.empty()) {
      const float* const bias = layer.bias.data() + first;
      for (std::int64_t c = 0; c < n; ++c) to[c] += bias[c];
    }
    if (layer.silu)
      for (std::int64_t c = 0; c < n; ++c) to[c] = to[c] / (1.0f + exp_of(-to[c]));
    for (std::int64_t c = n; c < row(); ++c) to[c] = 0.0f;
  }
};

// What one token does to the state of a head, by rows of S: S = decay S + key (x) u. Decays are `by_key`, or all `decay`.
struct Update {
  float decay;
  const float *by_key, *key;
};

// Sums over the rows of S, [K, ld], of N vectors each: of `a` times S, and of `b` times S.
template <int N>
inline void see(const float* s, std::int64_t ld, std::int64_t keys, const float* a, const float* b, V* x, V* y) {
  for (int j = 0; j < N; ++j) x[j] = y[j] = V{};
  for (std::int64_t i = 0; i < keys; ++i, s += ld) {
    const V ai = set(a[i]), bi = set(b[i]);
    for (int j = 0; j < N; ++j) {
      const V v = load(s + j * W);
      x[j] = fma(ai, v, x[j]), y[j] = fma(bi, v, y[j]);
    }
  }
}

template <bool kStream>
inline void put(float* to, V v) {
  if (kStream)
    stream(to, v);
  else
    store(to, v);
}

// The update of S; the new one to `to`.
template <int N, bool kByKey, bool kStream>
inline void update(const Update& by, const V* u, const float* s, std::int64_t ld, std::int64_t keys, float* to) {
  const V decay = set(by.decay);
  for (std::int64_t i = 0; i < keys; ++i, s += ld, to += ld) {
    const V d = kByKey ? set(by.by_key[i]) : decay, k = set(by.key[i]);
    for (int j = 0; j < N; ++j) put<kStream>(to + j * W, fma(k, u[j], load(s + j * W) * d));
  }
}

constexpr std::int64_t kAhead = 12;  // rows

// The same, with the sums of `see` for another head's S at `next`, so that memory is read and written at the same time.
// The S after that one comes to the second cache meanwhile: the first one alone waits for too few lines at a time.
template <int N, bool kByKey, bool kStream>
inline void update_and_see_next(const Update& by, const V* u, const float* s, std::int64_t ld, std::int64_t keys,
                                float* to, const float* next, const float* a, const float* b, V* x, V* y) {
  const V decay = set(by.decay);
  for (int j = 0; j < N; ++j) x[j] = y[j] = V{};
  for (std::int64_t i = 0; i < keys; ++i, s += ld, to += ld, next += ld) {
    const V d = kByKey ? set(by.by_key[i]) : decay, k = set(by.key[i]), ai = set(a[i]), bi = set(b[i]);
    for (int j = 0; j < N; ++j) {
      if (j * W % 16 == 0) {
        __builtin_prefetch(next + keys * ld + j * W, 0, 2);
        __builtin_prefetch(next + kAhead * ld + j * W, 0, 3);  // else reading waits for writing
      }
      const V v = load(next + j * W);
      x[j] = fma(ai, v, x[j]), y[j] = fma(bi, v, y[j]);
      put<kStream>(to + j * W, fma(k, u[j], load(s + j * W) * d));
    }
  }
}

// The update of S in place, then the sums of `see` for the next token, in one pass.
template <int N, bool kByKey>
inline void update_and_see(const Update& by, const V* u, float* s, std::int64_t ld, std::int64_t keys, const float* a,
                           const float* b, V* x, V* y) {
  const V decay = set(by.decay);
  for (int j = 0; j < N; ++j) x[j] = y[j] = V{};
  for (std::int64_t i = 0; i < keys; ++i, s += ld) {
    const V d = kByKey ? set(by.by_key[i]) : decay, k = set(by.key[i]), ai = set(a[i]), bi = set(b[i]);
    for (int j = 0; j < N; ++j) {
      const V v = fma(k, u[j], load(s + j * W) * d);
      store(s + j * W, v);
      x[j] = fma(ai, v, x[j]), y[j] = fma(bi, v, y[j]);
    }
  }
}

// The update of S, and the sum of `q` times the new one, in one pass. `ahead`: numbers to what is fetched for later.
template <int N, bool kStream>
inline void scan(const Update& by, const V* u, const float* s, std::int64_t ld, std::int64_t keys, const float* q,
                 float* to, V* y, std::int64_t ahead) {
  const V decay = set(by.decay);
  for (int j = 0; j < N; ++j) y[j] = V{};
  for (std::int64_t i = 0; i < keys; ++i, s += ld, to += ld) {
    const V k = set(by.key[i]), qi = set(q[i]);
    for (int j = 0; j < N; ++j) {
      if (ahead && j * W % 16 == 0) __builtin_prefetch(s + ahead + j * W, 0, 2);
      const V v = fma(k, u[j], load(s + j * W) * decay);
      put<kStream>(to + j * W, v);
      y[j] = fma(qi, v, y[j]);
    }
  }
}

// Calls f with the constant `n`, from 1 to kWide.
template <class F>
inline void with_count(std::int64_t n, F&& f) {
  switch (n) {
    case 1: return f(std::integral_constant<int, 1>());
    case 2: return f(std::integral_constant<int, 2>());
    case 3: return f(std::integral_constant<int, 3>());
    case 4: return f(std::integral_constant<int, 4>());
    default:
      if constexpr (kWide > 4) {
        switch (n) {
          case 5: return f(std::integral_constant<int, 5>());
          case 6: return f(std::integral_constant<int, 6>());
          case 7: return f(std::integral_constant<int, 7>());
          default: return f(std::integral_constant<int, 8>());
        }
      }
  }
}

// Rows of tokens that a head takes, [kTokens, padded K or V].
struct Tokens {
  std::int64_t n, keys, values;  // padded K and V
  const float *q, *k, *v;
  const float *seen_k, *seen_q;  // k and q, times decays by key
  const float *decay, *beta, *qk;  // [n]; of mamba2 `beta` is dt
  const float* by_key;  // null if `decay` holds
  float* o;
};

// What token i adds to S at columns `at`, by what its key and query see there; writes its output.
template <bool kByKey>
inline V change(const Tokens& t, std::int64_t i, std::int64_t at, V seen, V read) {
  const V decay = set(kByKey ? 1.0f : t.decay[i]);
  const V u = set(t.beta[i]) * (load(t.v + at) - decay * seen);
  store(t.o + at, fma(set(t.qk[i]), u, decay * read));
  return u;
}

// S of a head: where it is read, and where it goes.
struct Place {
  const float* from;
  float* to;
  std::int64_t ld;
  bool stream;
  std::int64_t ahead;
};

// A block of N vectors of S, from column `c` on, takes all tokens by the delta rule.
template <int N, bool kByKey>
inline void take_delta(const Tokens& t, std::int64_t keys, std::int64_t c, float* s, std::int64_t ld) {
  V seen[N], read[N], u[N];
  see<N>(s, ld, keys, t.seen_k, t.seen_q, seen, read);
  for (std::int64_t i = 0; i < t.n; ++i) {
    for (int j = 0; j < N; ++j) {
      const std::int64_t at = i * t.values + c + j * W;
      u[j] = change<kByKey>(t, i, at, seen[j], read[j]);
    }
    const Update by{t.decay[i], t.by_key + (kByKey ? i * t.keys : 0), t.k + i * t.keys};
    const std::int64_t next = (i + 1) * t.keys;
    if (i + 1 < t.n)
      update_and_see<N, kByKey>(by, u, s, ld, keys, t.seen_k + next, t.seen_q + next, seen, read);
    else
      update<N, kByKey, false>(by, u, s, ld, keys, s);
  }
}

template <int N>
inline void take_scan(const Tokens& t, std::int64_t keys, std::int64_t c, const Place& at) {
  V u[N], o[N];
  for (std::int64_t i = 0; i < t.n; ++i) {
    const V dt = set(t.beta[i]);
    for (int j = 0; j < N; ++j) u[j] = dt * load(t.v + i * t.values + c + j * W);
    const Update by{t.decay[i], nullptr, t.k + i * t.keys};
    const float* const q = t.q + i * t.keys;
    if (at.stream)
      scan<N, true>(by, u, at.from, at.ld, keys, q, at.to, o, at.ahead);
    else
      scan<N, false>(by, u, at.from, at.ld, keys, q, at.to, o, 0);
    for (int j = 0; j < N; ++j) store(t.o + i * t.values + c + j * W, o[j]);
  }
}

// All tokens on `vectors` of S in scratch, from column `c` on.
inline void take(const Layer& layer, const Tokens& t, std::int64_t c, std::int64_t vectors, float* s) {
  with_count(vectors, [&](auto count) __attribute__((always_inline)) {
    constexpr int N = decltype(count)::value;
    const std::int64_t keys = layer.key_dim;
    if (layer.kind == Kind::kMamba2)
      take_scan<N>(t, keys, c, {s, s, N * W, false, 0});
    else if (t.by_key)
      take_delta<N, true>(t, keys, c, s, N * W);
    else
      take_delta<N, false>(t, keys, c, s, N * W);
  });
}

// A head of the delta rule whose only token is computed but for the update of S, which is done with the next head's sums.
struct Pending {
  const float *k, *by_key;
  float decay;
  const float* from;  // null for none
  float* to;
  bool stream;
};

// Updates what is pending, by `u`, and puts what t's key and query see of `next` to `seen` and `read`. Either may be null.
template <int N, bool kByKey, bool kStream>
inline void take_one(const Pending& p, const Tokens& t, std::int64_t keys, std::int64_t ld, std::int64_t c,
                     const float* next, const float* u, float* seen, float* read) {
  V x[N], y[N], change[N];
  const Update by{p.decay, p.by_key, p.k};
  for (int j = 0; j < N; ++j) change[j] = load(u + c + j * W);  // any numbers, if nothing is pending
  if (!next) return update<N, kByKey, kStream>(by, change, p.from + c, ld, keys, p.to + c);
  if (p.from)
    update_and_see_next<N, kByKey, kStream>(by, change, p.from + c, ld, keys, p.to + c, next + c, t.seen_k, t.seen_q, x,
                                            y);
  else
    see<N>(next + c, ld, keys, t.seen_k, t.seen_q, x, y);
  for (int j = 0; j < N; ++j) store(seen + c + j * W, x[j]), store(read + c + j * W, y[j]);
}

constexpr std::int64_t kBlock = 4 * W;  // columns of S that stay in the first cache, one after the other in scratch

// S of a head from a slot's order to that of scratch, [V / kBlock, K, kBlock], or back. The last block may be narrower.
inline void unpack(const Layer& layer, const float* from, float* to) {
  const std::int64_t keys = layer.key_dim, values = layer.value_dim, all = padded(values);
  for (std::int64_t c = 0; c < all; c += kBlock) {
    const std::int64_t n = least(kBlock, all - c), there = least(n, values - c);
    for (std::int64_t i = 0; i < keys; ++i, to += n) {
      copy(from + i * values + c, to, there);
      clear(to + there, n - there);
    }
  }
}
inline void pack(const Layer& layer, const float* from, float* to) {
  const std::int64_t keys = layer.key_dim, values = layer.value_dim, all = padded(values);
  for (std::int64_t c = 0; c < all; c += kBlock) {
    const std::int64_t n = least(kBlock, all - c), there = least(n, values - c);
    for (std::int64_t i = 0; i < keys; ++i, from += n) copy(from, to + i * values + c, there);
  }
}

// Normalises rows of q and k, and scales q.
inline void finish(const Layer& layer, std::int64_t n, float* q, float* k, float* qk) {
  const std::int64_t r = padded(layer.key_dim);
  for (std::int64_t t = 0; t < n; ++t, q += r, k += r) {
    float scale = layer.scale, other = 1.0f;
    if (layer.normalised) {
      scale /= root(dot(q, q, r) + kEpsilon);
      other /= root(dot(k, k, r) + kEpsilon);
    }
    for (std::int64_t i = 0; i < r; ++i) q[i] *= scale;
    for (std::int64_t i = 0; i < r; ++i) k[i] *= other;
    qk[t] = dot(q, k, r);
  }
}

// The work on one task's heads.
class Heads {
 public:
  Heads(const Call& call, const Task& task, Scratch& scratch) : call_(call), layer_(*call.layer), task_(task) {
    const std::int64_t heads = task.end - task.head, kept = layer_.width - 1;
    const std::int64_t keys = padded(layer_.key_dim), values = padded(layer_.value_dim);
    alone_ = task.segments_end - task.segment == 1;
    first_group_ = layer_.group_of(task.head);
    groups_ = layer_.group_of(task.end - 1) - first_group_ + 1;
    before_q_ = scratch.take(groups_ * kept * keys), before_k_ = scratch.take(groups_ * kept * keys);
    before_v_ = scratch.take(heads * kept * values);
    x_ = scratch.take((kept + kTokens) * (keys > values ? keys : values));
    q_ = scratch.take(kTokens * keys), k_ = all_k_ = scratch.take(kTokens * keys);
    v_ = scratch.take(kTokens * values), o_ = scratch.take(kTokens * values);
    decay_ = scratch.take(kTokens), beta_ = scratch.take(kTokens), qk_ = scratch.take(kTokens);
    by_key_ = seen_k_ = seen_q_ = nullptr;
    if (layer_.kind == Kind::kKimiDelta)
      by_key_ = all_by_key_ = scratch.take(kTokens * keys), seen_k_ = scratch.take(kTokens * keys),
      seen_q_ = scratch.take(kTokens * keys);
    u_ = scratch.take(values), seen_ = scratch.take(values), read_ = scratch.take(values);
    states_ = scratch.take(heads * layer_.key_dim * values);
  }

  void run() {
    for (std::int64_t s = task_.segment; s < task_.segments_end; ++s) run(call_.segments[s], s == task_.segment);
  }

 private:
  void run(const Segment& segment, bool first) {
    // One token, in whole vectors, goes from slot to slot; else S stays in scratch meanwhile.
    direct_ = segment.rows == 1 && segment.read >= 0 && layer_.value_dim % kPad == 0 && alone_;
    if (first && !direct_) each_channels([&](const Channels& c, bool) { c.begin(call_, segment.read); });
    if (!direct_) load_states(segment.read);
    for (std::int64_t at = 0; at < segment.rows; at += kTokens) {
      const std::int64_t n = least(kTokens, segment.rows - at);
      for (std::int64_t group = first_group_; group < first_group_ + groups_; ++group) run(segment, at, n, group);
    }
    if (direct_) {
      if (pending_.from) take_pending({}, nullptr);
      pending_.from = nullptr;
      return fence();
    }
    store_states(segment.write);
    each_channels([&](const Channels& c, bool own) {
      if (own) c.end(call_, segment.write);
    });
  }

  // Tokens `at .. at + n` of the segment, on the task's heads of a group.
  void run(const Segment& segment, std::int64_t at, std::int64_t n, std::int64_t group) {
    const std::int64_t row = segment.first + at, begin = first_head(group), end = first_head(group + 1);
    if (direct_) k_ = k_ == all_k_ ? all_k_ + padded(layer_.key_dim) : all_k_;  // what is pending has the other one
    convolve(q_of(group), segment, row, n, owns(group), q_);
    convolve(k_of(group), segment, row, n, owns(group), k_);
    if (layer_.kind != Kind::kMamba2) finish(layer_, n, q_, k_, qk_);
    for (std::int64_t head = begin; head < end; ++head) {
      convolve(v_of(head), segment, row, n, true, v_);
      if (layer_.kind == Kind::kMamba2)
        steps(segment, at, n, head);
      else
        gates(row, n, head);
      take_tokens(segment, n, head);
      if (!layer_.d.empty()) skip(n, layer_.d[std::size_t(head)]);
      const std::int64_t values = padded(layer_.value_dim), size = layer_.value_dim;
      const std::size_t bytes = kSizes[int(call_.x.type)];
      for (std::int64_t t = 0; t < n; ++t)
        write(call_.x.type, o_ + t * values, size,
              call_.out + std::size_t(((row + t) * layer_.heads + head) * size) * bytes);
    }
  }

  void convolve(const Channels& channels, const Segment& segment, std::int64_t row, std::int64_t n, bool own,
                float* to) {
    if (direct_)
      channels.convolve_one(call_, segment, own, x_, to);
    else
      channels.convolve(call_, row, n, x_, to);
  }

  void take_tokens(const Segment& segment, std::int64_t n, std::int64_t head) {
    const std::int64_t keys = padded(layer_.key_dim), values = padded(layer_.value_dim), size = layer_.head_size();
    const Tokens tokens{n,      keys,  values, q_,      k_, v_, seen_k_ ? seen_k_ : k_, seen_q_ ? seen_q_ : q_,
                        decay_, beta_, qk_,    by_key_, o_};
    if (direct_) {
      const float* const from = call_.state(segment.read) + layer_.history + head * size;
      float* const to = call_.state(segment.write) + layer_.history + head * size;
      const bool stream = call_.stream && reinterpret_cast<std::uintptr_t>(to) % 64 == 0;
      if (layer_.kind != Kind::kMamba2) {
        take_pending(tokens, from);
        for (std::int64_t c = 0; c < values; c += W) {
          const V seen = load(seen_ + c), read = load(read_ + c);
          store(u_ + c, by_key_ ? change<true>(tokens, 0, c, seen, read) : change<false>(tokens, 0, c, seen, read));
        }
        pending_ = {k_, by_key_, decay_[0], from, to, stream};
        return;
      }
      const std::int64_t ahead = stream && head + 1 < task_.end ? size : 0;
      for (std::int64_t c = 0; c < values; c += kWide * W)
        with_count(least(kWide * W, values - c) / W, [&](auto count) __attribute__((always_inline)) {
          const Place place{from + c, to + c, layer_.value_dim, stream, ahead};
          take_scan<decltype(count)::value>(tokens, layer_.key_dim, c, place);
        });
      return;
    }
    float* s = states_ + (head - task_.head) * layer_.key_dim * values;
    for (std::int64_t c = 0; c < values; c += kBlock) {
      const std::int64_t width = least(kBlock, values - c);
      take(layer_, tokens, c, width / W, s);
      s += layer_.key_dim * width;
    }
  }

  // What is pending, and what the next head's token sees of its S, if there is one.
  void take_pending(const Tokens& tokens, const float* next) {
    const std::int64_t ld = layer_.value_dim;
    for (std::int64_t c = 0; c < ld; c += kWide * W)
      with_count(least(kWide * W, ld - c) / W, [&](auto count) __attribute__((always_inline)) {
        constexpr int N = decltype(count)::value;
        const auto one = [&](auto take) __attribute__((always_inline)) {
          take(pending_, tokens, layer_.key_dim, ld, c, next, u_, seen_, read_);
        };
        if (by_key_)
          pending_.stream ? one(take_one<N, true, true>) : one(take_one<N, true, false>);
        else
          pending_.stream ? one(take_one<N, false, true>) : one(take_one<N, false, false>);
      });
  }

  // Decays and beta of the delta rule.
  void gates(std::int64_t row, std::int64_t n, std::int64_t head) {
    const std::int64_t keys = padded(layer_.key_dim), size = layer_.key_dim;
    if (direct_ && by_key_) by_key_ = by_key_ == all_by_key_ ? all_by_key_ + keys : all_by_key_;
    for (std::int64_t t = 0; t < n; ++t) {
      read(call_.b, row + t, head, 1, beta_ + t);
      if (!by_key_) {
        read(call_.a, row + t, head, 1, decay_ + t);
        continue;
      }
      float *const d = by_key_ + t * keys, *const sk = seen_k_ + t * keys, *const sq = seen_q_ + t * keys;
      const float *const k = k_ + t * keys, *const q = q_ + t * keys;
      read(call_.a, row + t, head * size, size, d);
#pragma GCC ivdep
      for (std::int64_t i = 0; i < size; ++i) {
        const float decay = exp_of(d[i]);
        d[i] = decay, sk[i] = decay * k[i], sq[i] = decay * q[i];
      }
    }
    if (!by_key_)
      for (std::int64_t t = 0; t < n; ++t) decay_[t] = exp_of(decay_[t]);
  }

  // Decays and steps of Mamba-2.
  void steps(const Segment& segment, std::int64_t at, std::int64_t n, std::int64_t head) {
    const auto h = std::size_t(head);
    for (std::int64_t t = 0; t < n; ++t) {
      float dt;
      read(call_.a, segment.first + at + t, head, 1, &dt);
      if (!layer_.dt_bias.empty()) dt += layer_.dt_bias[h];
      if (layer_.softplus) dt = softplus_of(dt);
      if (at + t < segment.prompt) {
        if (dt < layer_.least) dt = layer_.least;
        if (layer_.most > 0.0f && dt > layer_.most) dt = layer_.most;
      }
      beta_[t] = dt;
      decay_[t] = exp_of(dt * layer_.a[h]);
    }
  }

  void skip(std::int64_t n, float d) {
    const std::int64_t all = n * padded(layer_.value_dim);
    for (std::int64_t i = 0; i < all; ++i) o_[i] += d * v_[i];
  }

  void load_states(std::int64_t slot) {
    const std::int64_t size = layer_.key_dim * padded(layer_.value_dim);
    for (std::int64_t head = task_.head; head < task_.end; ++head) {
      float* const to = states_ + (head - task_.head) * size;
      if (slot < 0)
        clear(to, size);
      else
        unpack(layer_, call_.state(slot) + layer_.history + head * layer_.head_size(), to);
    }
  }

  void store_states(std::int64_t slot) {
    const std::int64_t size = layer_.key_dim * padded(layer_.value_dim);
    for (std::int64_t head = task_.head; head < task_.end; ++head)
      pack(layer_, states_ + (head - task_.head) * size,
           call_.state(slot) + layer_.history + head * layer_.head_size());
  }

  // The task's first head of a group, or the next one after its last.
  std::int64_t first_head(std::int64_t group) const {
    const std::int64_t head = group * layer_.heads_per_group - layer_.first_head;
    return head < task_.head ? task_.head : least(head, task_.end);
  }

  Channels q_of(std::int64_t group) const { return ends_of(group, layer_.q, before_q_); }
  Channels k_of(std::int64_t group) const { return ends_of(group, layer_.k, before_k_); }
  Channels ends_of(std::int64_t group, std::int64_t first, float* before) const {
    const std::int64_t size = layer_.key_dim, kept = layer_.width - 1;
    return {first + group * size, size, before + (group - first_group_) * kept * padded(size)};
  }
  Channels v_of(std::int64_t head) const {
    const std::int64_t size = layer_.value_dim, kept = layer_.width - 1;
    return {layer_.v + head * size, size, before_v_ + (head - task_.head) * kept * padded(size)};
  }

  // Whether the task writes a group's rows of x: that of its first head does.
  bool owns(std::int64_t group) const {
    const std::int64_t first = group * layer_.heads_per_group - layer_.first_head;
    return (first < 0 ? 0 : first) >= task_.head;
  }

  // f(channels, whether the task writes their rows of x).
  template <class F>
  void each_channels(F&& f) const {
    for (std::int64_t group = first_group_; group < first_group_ + groups_; ++group) {
      f(q_of(group), owns(group)), f(k_of(group), owns(group));
    }
    for (std::int64_t head = task_.head; head < task_.end; ++head) f(v_of(head), true);
  }

  const Call& call_;
  const Layer& layer_;
  const Task& task_;
  std::int64_t first_group_, groups_;
  bool alone_, direct_ = false;
  Pending pending_{};
  float *before_q_, *before_k_, *before_v_, *x_, *q_, *k_, *all_k_, *v_, *o_, *decay_, *beta_, *qk_, *by_key_, *seen_k_,
      *seen_q_, *all_by_key_ = nullptr, *u_, *seen_, *read_, *states_;
};

// A convolution alone.
inline void run_channels(const Call& call, const Task& task, Scratch& scratch) {
  const Layer& layer = *call.layer;
  const std::int64_t size = task.end - task.head, kept = layer.width - 1, r = padded(size);
  const Channels channels{task.head, size, scratch.take(kept * r)};
  float *const x = scratch.take((kept + kTokens) * r), *const y = scratch.take(kTokens * r);
  const std::size_t bytes = kSizes[int(call.x.type)];
  for (std::int64_t s = task.segment; s < task.segments_end; ++s) {
    const Segment& segment = call.segments[s];
    if (s == task.segment) channels.begin(call, segment.read);
    for (std::int64_t at = 0; at < segment.rows; at += kTokens) {
      const std::int64_t n = least(kTokens, segment.rows - at), row = segment.first + at;
      channels.convolve(call, row, n, x, y);
      for (std::int64_t t = 0; t < n; ++t)
        write(call.x.type, y + t * r, size, call.out + std::size_t((row + t) * layer.channels + task.head) * bytes);
    }
    channels.end(call, segment.write);
  }
}

void run(const Call& call, const Task& task, Scratch& scratch) {
  scratch.reserve(scratch_size(*call.layer, task.end - task.head));
  if (call.layer->kind == Kind::kConvolution)
    run_channels(call, task, scratch);
  else
    Heads(call, task, scratch).run();
}

void copy_past_caches(const float* from, float* to, std::int64_t n) {
  for (std::int64_t i = 0; i < n; i += W) stream(to + i, load(from + i));
  fence();
}
