// The passes over a block. Included once for each instruction set, inside a namespace that defines Vec: vectors F of
// kWidth floats and I of as many 32-bit integers, masks M, and Sum, an exact sum of masses.

// Masses of a vector, as floats that are still to be rounded to integers.
inline Vec::F masses(Vec::F x, const Scale& s, Vec::F floor) {
  using V = Vec;
  const V::F steps = V::mul(V::sub(x, V::all(s.best)), V::all(s.factor));
  const V::I level = V::round(V::max(steps, V::all(static_cast<float>(kLowest))));
  const V::I whole = V::shift_right(V::add(level, V::all(1 << (kLevelBits - 1))));
  const V::F r = V::mul(V::to_float(V::sub(level, V::template shift_left<kLevelBits>(whole))), V::all(0x1p-24f));
  V::F power = V::all(kPower[4]);
  for (int i = 3; i >= 0; --i) power = V::add(V::mul(power, r), V::all(kPower[i]));
  power = V::add(V::mul(power, r), V::all(1.0f));
  const V::F two = V::as_float(V::template shift_left<23>(V::add(whole, V::all(127 + kMassBits))));
  return V::keep(V::both(V::at_least(x, floor), V::at_least(level, V::all(s.cut))), V::mul(power, two));
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

template <class T>
std::int64_t sum(const void* data, const Scale& scale, float floor) {
  const T* x = static_cast<const T*>(data);
  const Vec::F least = Vec::all(floor);
  Vec::Sum total;
  for (std::size_t i = 0; i < kBlock; i += Vec::kWidth) total.add(masses(Vec::load(x + i), scale, least));
  return total.value();
}

template <class T>
void fill(const void* data, const Scale& scale, float floor, std::int64_t* out) {
  const T* x = static_cast<const T*>(data);
  const Vec::F least = Vec::all(floor);
  for (std::size_t i = 0; i < kBlock; i += Vec::kWidth) Vec::store(out + i, masses(Vec::load(x + i), scale, least));
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

template <class T>
constexpr Kernel kernel = {scan<T>, sum<T>, fill<T>, at_least<T>};
constexpr Kernel kernels[kTypes] = {kernel<float>, kernel<Bf16>, kernel<Half>};
