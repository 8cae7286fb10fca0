// The passes over a block. Included once for each instruction set, inside a namespace that defines Vec. Vec has vectors F
// of kWidth floats and I of as many 32-bit integers, masks M, and Sum, an exact sum of masses. Level is the type that has
// levels as whole numbers, Whole their doublings; each is F or I, whichever is faster.

// Does ``step(i)`` for each vector of a group. Vectors go step by step, side by side: one of them alone is a chain of
// operations that wait for each other.
template <class Step>
inline void each(Step step) {
  for (std::size_t i = 0; i < Vec::kTogether; ++i) step(i);
}

// Replaces the logits of a group by their masses, as floats that are still to be rounded to integers. With kAll none is
// left out.
template <bool kAll>
inline void weigh(Vec::F* x, const Scale& s, Vec::F floor) {
  using V = Vec;
  V::Level level[V::kTogether];
  V::Whole whole[V::kTogether];
  V::F r[V::kTogether], power[V::kTogether];
  each([&](std::size_t i) { r[i] = V::mul(V::sub(x[i], V::all(s.best)), V::all(s.factor)); });
  each([&](std::size_t i) { level[i] = V::level(V::max(r[i], V::all(static_cast<float>(kLowest)))); });
  each([&](std::size_t i) { whole[i] = V::whole(level[i]); });
  each([&](std::size_t i) { r[i] = V::rest(level[i], whole[i]); });
  each([&](std::size_t i) { power[i] = V::add(V::mul(V::all(kPower[4]), r[i]), V::all(kPower[3])); });
  each([&](std::size_t i) { power[i] = V::add(V::mul(power[i], r[i]), V::all(kPower[2])); });
  each([&](std::size_t i) { power[i] = V::add(V::mul(power[i], r[i]), V::all(kPower[1])); });
  each([&](std::size_t i) { power[i] = V::add(V::mul(power[i], r[i]), V::all(kPower[0])); });
  each([&](std::size_t i) { power[i] = V::doubled(V::add(V::mul(power[i], r[i]), V::all(1.0f)), whole[i]); });
  each([&](std::size_t i) {
    x[i] = kAll ? power[i] : V::keep(V::both(V::at_least(x[i], floor), V::reaches(level[i], s.cut)), power[i]);
  });
}

// Whether nothing is left out: a mass at the lowest level is 0 in any case.
inline bool takes_all(const Scale& scale, float floor) {
  return scale.cut == kLowest && floor == -std::numeric_limits<float>::infinity();
}

template <class T>
bool scan(const void* data, float* maxima) {
  const T* x = static_cast<const T*>(data);
  Vec::M odd = Vec::none();
  for (std::size_t part = 0; part < kParts; ++part, x += kPart) {
    Vec::F most = Vec::load(x);
    odd = Vec::either(odd, Vec::is_nan(most));
    for (std::size_t i = Vec::kWidth; i < kPart; i += Vec::kWidth) {
      const Vec::F v = Vec::load(x + i);
      odd = Vec::either(odd, Vec::is_nan(v));
      most = Vec::max(most, v);
    }
    maxima[part] = Vec::largest(most);
  }
  return Vec::bits(odd) != 0;
}

constexpr std::size_t kGroup = Vec::kTogether * Vec::kWidth;

// Gives ``take`` each vector of masses and the place of its first one in the block.
template <bool kAll, class T, class Take>
inline void each_mass(const T* x, const Scale& scale, float floor, Take take) {
  const Vec::F least = Vec::all(floor);
  for (std::size_t at = 0; at < kBlock; at += kGroup) {
    Vec::F group[Vec::kTogether];
    each([&](std::size_t i) { group[i] = Vec::load(x + at + i * Vec::kWidth); });
    weigh<kAll>(group, scale, least);
    each([&](std::size_t i) { take(group[i], at + i * Vec::kWidth); });
  }
}

template <bool kAll, class T>
std::int64_t sum_of(const T* x, const Scale& scale, float floor) {
  Vec::Sum total;
  each_mass<kAll>(x, scale, floor, [&](Vec::F masses, std::size_t) { total.add(masses); });
  return total.value();
}

template <class T>
std::int64_t sum(const void* data, const Scale& scale, float floor) {
  const T* x = static_cast<const T*>(data);
  return takes_all(scale, floor) ? sum_of<true>(x, scale, floor) : sum_of<false>(x, scale, floor);
}

template <bool kAll, class T>
void fill_with(const T* x, const Scale& scale, float floor, std::int64_t* out) {
  each_mass<kAll>(x, scale, floor, [&](Vec::F masses, std::size_t at) { Vec::store(out + at, masses); });
}

template <class T>
void fill(const void* data, const Scale& scale, float floor, std::int64_t* out) {
  const T* x = static_cast<const T*>(data);
  takes_all(scale, floor) ? fill_with<true>(x, scale, floor, out) : fill_with<false>(x, scale, floor, out);
}

template <class T>
std::uint64_t at_least(const void* data, float floor) {
  const T* x = static_cast<const T*>(data);
  const Vec::F least = Vec::all(floor);
  std::uint64_t found = 0;
  for (std::size_t i = 0; i < kPart; i += Vec::kWidth)
    found |= static_cast<std::uint64_t>(Vec::bits(Vec::at_least(Vec::load(x + i), least))) << i;
  return found;
}

// A word is widened to a logit's width, so that compilers turn the inner loop into a few vector instructions.
template <class T>
void keep(const void* data, const std::uint16_t* bits, void* out) {
  using U = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint16_t>;
  static_assert(kBitsOfWord == 16);
  static constexpr U kBit[kBitsOfWord] = {1,      1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                                          1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
  const U* __restrict x = static_cast<const U*>(data);
  U* __restrict to = static_cast<U*>(out);
  for (std::size_t at = 0; at < kBlock; at += kBitsOfWord, ++bits) {
    const U word = *bits;
    for (std::size_t i = 0; i < kBitsOfWord; ++i)
      to[at + i] = (word & kBit[i]) == kBit[i] ? x[at + i] : U{kMinusInfinity<T>};
  }
}

template <class T>
constexpr Kernel kernel = {scan<T>, sum<T>, fill<T>, at_least<T>, keep<T>};
constexpr Kernel kernels[kTypes] = {kernel<float>, kernel<Bf16>, kernel<Half>};
