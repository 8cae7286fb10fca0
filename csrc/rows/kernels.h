// Instructions on rows, for the compiler to make vectors of. Included once for each instruction set, inside a namespace.

#include "rows/math.h"

inline std::size_t size_of(Type type) { return type == Type::kFloat ? 4 : type == Type::kInt ? 8 : 2; }

// Eight at a time by hand: compilers make no vectors of these.
inline void from_half(const std::uint16_t* from, float* to, std::int64_t count) {
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  for (; i < count; ++i) to[i] = _cvtsh_ss(from[i]);
}
inline void to_half(const float* from, std::uint16_t* to, std::int64_t count) {
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
  for (; i < count; ++i) to[i] = _cvtss_sh(from[i], _MM_FROUND_TO_NEAREST_INT);
}

// `count` elements, `step` apart, as floats.
inline void load(Type type, const char* from, std::int64_t step, float* to, std::int64_t count) {
  const auto each = [&](const auto* at, auto&& read) {
    if (step == 1) {
      for (std::int64_t i = 0; i < count; ++i) to[i] = read(at[i]);
    } else if (step == 0) {
      const float value = read(*at);
      for (std::int64_t i = 0; i < count; ++i) to[i] = value;
    } else {
      for (std::int64_t i = 0; i < count; ++i) to[i] = read(at[i * step]);
    }
  };
  if (type == Type::kHalf && step == 1) return from_half(reinterpret_cast<const std::uint16_t*>(from), to, count);
  switch (type) {
    case Type::kFloat: each(reinterpret_cast<const float*>(from), [](float v) { return v; }); break;
    case Type::kBf16: each(reinterpret_cast<const std::uint16_t*>(from), of_bf16); break;
    case Type::kHalf:
      each(reinterpret_cast<const std::uint16_t*>(from), [](std::uint16_t v) { return _cvtsh_ss(v); });
      break;
    case Type::kInt:
      each(reinterpret_cast<const std::int64_t*>(from), [](std::int64_t v) { return static_cast<float>(v); });
      break;
    case Type::kByte: break;
  }
}

inline void store(Type type, char* to, std::int64_t step, const float* from, std::int64_t count) {
  const auto each = [&](auto* at, auto&& write) {
    if (step == 1) {
      for (std::int64_t i = 0; i < count; ++i) at[i] = write(from[i]);
    } else {
      for (std::int64_t i = 0; i < count; ++i) at[i * step] = write(from[i]);
    }
  };
  if (type == Type::kHalf && step == 1) return to_half(from, reinterpret_cast<std::uint16_t*>(to), count);
  switch (type) {
    case Type::kFloat: each(reinterpret_cast<float*>(to), [](float v) { return v; }); break;
    case Type::kBf16: each(reinterpret_cast<std::uint16_t*>(to), bf16_of); break;
    case Type::kHalf:
      each(reinterpret_cast<std::uint16_t*>(to),
           [](float v) { return static_cast<std::uint16_t>(_cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT)); });
      break;
    case Type::kInt:
    case Type::kByte: break;
  }
}

template <class F>
inline void map(float* to, const float* a, std::int64_t count, F&& f) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < count; ++i) to[i] = f(a[i]);
}

template <class F>
inline void map(float* to, const float* a, const float* b, std::int64_t count, F&& f) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < count; ++i) to[i] = f(a[i], b[i]);
}

inline float greater(float a, float b) { return a != a || a > b ? a : b; }  // as torch: no number stays no number
inline float smaller(float a, float b) { return a != a || a < b ? a : b; }

inline void apply(const Step& step, float (*r)[kChunk], std::int64_t n) {
  float* const to = r[step.to];
  const float *const a = r[step.a], *const b = r[step.b];
  const float v = step.value;
  switch (step.op) {
    case Op::kAdd: return map(to, a, b, n, [](float x, float y) { return x + y; });
    case Op::kSub: return map(to, a, b, n, [](float x, float y) { return x - y; });
    case Op::kMul: return map(to, a, b, n, [](float x, float y) { return x * y; });
    case Op::kDiv: return map(to, a, b, n, [](float x, float y) { return x / y; });
    case Op::kMax: return map(to, a, b, n, greater);
    case Op::kMin: return map(to, a, b, n, smaller);
    case Op::kAddTo: return map(to, a, n, [v](float x) { return x + v; });
    case Op::kMulBy: return map(to, a, n, [v](float x) { return x * v; });
    case Op::kDivBy: return map(to, a, n, [v](float x) { return x / v; });
    case Op::kMaxTo: return map(to, a, n, [v](float x) { return greater(x, v); });
    case Op::kMinTo: return map(to, a, n, [v](float x) { return smaller(x, v); });
    case Op::kNeg: return map(to, a, n, [](float x) { return -x; });
    case Op::kSquare: return map(to, a, n, [](float x) { return x * x; });
    case Op::kCube: return map(to, a, n, [](float x) { return x * x * x; });
    case Op::kRsqrt: return map(to, a, n, [](float x) { return 1.0f / __builtin_sqrtf(x); });
    case Op::kSqrt: return map(to, a, n, [](float x) { return __builtin_sqrtf(x); });
    case Op::kReciprocal: return map(to, a, n, [](float x) { return 1.0f / x; });
    case Op::kExp: return map(to, a, n, exp_of);
    case Op::kSigmoid: return map(to, a, n, sigmoid_of);
    case Op::kSilu: return map(to, a, n, [](float x) { return x / (1.0f + exp_of(-x)); });
    case Op::kGelu: return map(to, a, n, gelu_of);
    case Op::kGeluTanh: return map(to, a, n, gelu_tanh_of);
    case Op::kTanh: return map(to, a, n, tanh_of);
    case Op::kRelu: return map(to, a, n, [](float x) { return greater(x, 0.0f); });
    case Op::kCos: return map(to, a, n, [](float x) { return sin_of(x, 1); });
    case Op::kSin: return map(to, a, n, [](float x) { return sin_of(x, 0); });
    case Op::kRoundBf16: return map(to, a, n, [](float x) { return of_bf16(bf16_of(x)); });
    case Op::kRoundHalf: {
      std::uint16_t halves[kChunk];
      to_half(a, halves, n);
      return from_half(halves, to, n);
    }
    default: return;
  }
}

inline char* place(const View& view, const Slot* slots, std::int64_t row) {
  return slots[view.slot].at + row * slots[view.slot].row_bytes + view.offset;
}

inline char* element(const View& view, char* row, std::int64_t i, std::int64_t j, std::int64_t k) {
  return row +
         (i * view.outer[0] + j * view.outer[1] + k * view.outer[2]) * static_cast<std::int64_t>(size_of(view.type));
}

// Calls f(i, j, k) for all outer elements.
template <class F>
inline void outer(const Instruction& each, F&& f) {
  for (std::int64_t i = 0; i < each.sizes[0]; ++i)
    for (std::int64_t j = 0; j < each.sizes[1]; ++j)
      for (std::int64_t k = 0; k < each.sizes[2]; ++k) f(i, j, k);
}

using Registers = float[kRegisters][kChunk];

// All steps on `count` elements, from the `at`-th element of i, j, k on.
inline void walk(const Instruction& each, const Slot* slots, std::int64_t row, std::int64_t i, std::int64_t j,
                 std::int64_t k, std::int64_t at, std::int64_t count, Registers& registers) {
  for (const Step& step : each.steps) {
    if (step.op != Op::kLoad && step.op != Op::kStore) {
      apply(step, registers, count);
      continue;
    }
    const View& view = each.views[step.view];
    char* const first = element(view, place(view, slots, row), i, j, k) +
                        at * view.inner * static_cast<std::int64_t>(size_of(view.type));
    if (step.op == Op::kLoad)
      load(view.type, first, view.inner, registers[step.to], count);
    else
      store(view.type, first, view.inner, registers[step.a], count);
  }
}

// Calls f(at, count) for all chunks of `inner` elements.
template <class F>
inline void chunks(std::int64_t inner, F&& f) {
  for (std::int64_t at = 0; at < inner; at += kChunk) {
    const std::int64_t left = inner - at;
    f(at, left < static_cast<std::int64_t>(kChunk) ? left : static_cast<std::int64_t>(kChunk));
  }
}

inline void elements(const Instruction& each, const Slot* slots, std::int64_t row) {
  alignas(64) Registers registers;
  outer(each, [&](std::int64_t i, std::int64_t j, std::int64_t k) {
    chunks(each.inner,
           [&](std::int64_t at, std::int64_t count) { walk(each, slots, row, i, j, k, at, count, registers); });
  });
}

// Sixteen sums, whose elements are sixteen apart; then in pairs. So a sum has one order whatever the width of vectors.
struct Sums {
  alignas(64) float lanes[16] = {};

  template <class F>
  void add(const float* x, std::int64_t count, F&& f) {
    std::int64_t i = 0;
    for (; i + 16 <= count; i += 16)
      for (int lane = 0; lane < 16; ++lane) lanes[lane] += f(x[i + lane]);
    for (; i < count; ++i) lanes[i % 16] += f(x[i]);
  }

  float total() {
    for (int width = 8; width; width /= 2)
      for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
    return lanes[0];
  }
};

// The sum of f(x) for the elements of `x` from `from` on.
template <class F>
inline float total(const View& x, const char* from, std::int64_t inner, F&& f) {
  alignas(64) float part[kChunk];
  Sums sums;
  chunks(inner, [&](std::int64_t at, std::int64_t count) {
    load(x.type, from + at * x.inner * static_cast<std::int64_t>(size_of(x.type)), x.inner, part, count);
    sums.add(part, count, f);
  });
  return sums.total();
}

inline void mean(const Instruction& each, const Slot* slots, std::int64_t row) {
  const View &x = each.views[0], &y = each.views[1];
  const auto same = [](float v) { return v; };
  alignas(64) Registers registers;
  outer(each, [&](std::int64_t i, std::int64_t j, std::int64_t k) {
    float sum;
    if (each.steps.empty()) {
      sum = total(x, element(x, place(x, slots, row), i, j, k), each.inner, same);
    } else {
      Sums sums;
      chunks(each.inner, [&](std::int64_t at, std::int64_t count) {
        walk(each, slots, row, i, j, k, at, count, registers);
        sums.add(registers[each.n], count, same);
      });
      sum = sums.total();
    }
    const float result = sum / static_cast<float>(each.inner);
    store(y.type, element(y, place(y, slots, row), i, j, k), 1, &result, 1);
  });
}

inline void layer_norm(const Instruction& each, const Slot* slots, std::int64_t row) {
  const View &x = each.views[0], &y = each.views[1], &w = each.views[2];
  const auto bytes = [](const View& view) { return view.inner * static_cast<std::int64_t>(size_of(view.type)); };
  const auto width = static_cast<float>(each.inner);
  alignas(64) float part[kChunk], scale[kChunk], shift[kChunk] = {};
  outer(each, [&](std::int64_t i, std::int64_t j, std::int64_t k) {
    const char* const from = element(x, place(x, slots, row), i, j, k);
    char* const to = element(y, place(y, slots, row), i, j, k);
    const float middle = total(x, from, each.inner, [](float v) { return v; }) / width;
    const float spread = total(x, from, each.inner, [middle](float v) { return (v - middle) * (v - middle); }) / width;
    const float unit = 1.0f / __builtin_sqrtf(spread + static_cast<float>(each.value));
    chunks(each.inner, [&](std::int64_t at, std::int64_t n) {
      load(x.type, from + at * bytes(x), x.inner, part, n);
      load(w.type, place(w, slots, row) + at * bytes(w), w.inner, scale, n);
      if (each.views.size() > 3) {
        const View& b = each.views[3];
        load(b.type, place(b, slots, row) + at * bytes(b), b.inner, shift, n);
      }
      for (std::int64_t c = 0; c < n; ++c) part[c] = (part[c] - middle) * unit * scale[c] + shift[c];
      store(y.type, to + at * bytes(y), y.inner, part, n);
    });
  });
}

inline bool look_up(const Instruction& each, const Slot* slots, std::int64_t row) {
  const View &x = each.views[0], &y = each.views[1], &table = each.views[2];
  bool known = true;
  outer(each, [&](std::int64_t i, std::int64_t j, std::int64_t k) {
    std::int64_t id;
    std::memcpy(&id, element(x, place(x, slots, row), i, j, k), sizeof id);
    if (id < 0 || id >= each.n) {
      known = false;
      return;
    }
    if (each.form) {
      each.row(*each.form, place(table, slots, 0), static_cast<std::size_t>(each.inner), static_cast<std::size_t>(id),
               reinterpret_cast<float*>(element(y, place(y, slots, row), i, j, k)));
      return;
    }
    const std::size_t bytes = size_of(table.type);
    std::memcpy(element(y, place(y, slots, row), i, j, k), place(table, slots, 0) + id * each.leading * bytes,
                each.inner * bytes);
  });
  return known;
}

inline void add_int(const Instruction& each, const Slot* slots, std::int64_t row) {
  const View &x = each.views[0], &y = each.views[1];
  outer(each, [&](std::int64_t i, std::int64_t j, std::int64_t k) {
    const auto* from = reinterpret_cast<const std::int64_t*>(element(x, place(x, slots, row), i, j, k));
    auto* to = reinterpret_cast<std::int64_t*>(element(y, place(y, slots, row), i, j, k));
    for (std::int64_t c = 0; c < each.inner; ++c)
      to[c * y.inner] = from[c * x.inner] + static_cast<std::int64_t>(each.value);
  });
}

bool run(const Instruction* first, const Instruction* last, const Slot* slots, std::int64_t begin, std::int64_t end) {
  bool good = true;
  for (std::int64_t row = begin; row < end; ++row)
    for (const Instruction* each = first; each != last; ++each) switch (each->kind) {
        case Kind::kElements: elements(*each, slots, row); break;
        case Kind::kMean: mean(*each, slots, row); break;
        case Kind::kLayerNorm: layer_norm(*each, slots, row); break;
        case Kind::kLookUp: good = look_up(*each, slots, row) && good; break;
        case Kind::kAddInt: add_int(*each, slots, row); break;
        case Kind::kLinear: break;
      }
  return good;
}
