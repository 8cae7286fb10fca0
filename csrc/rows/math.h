// Functions of one float without branches, so that a loop over them becomes vector code; the same bits on every CPU.
// tests/contract/test_row_programs.py holds each to 8 units in the last place, tails of gelu and silu to those of x / 100.
// Included once for each instruction set, inside a namespace.

// 2^n e^r with x = n ln 2 + r; the power in two halves, since 2^128 and 2^-149 are no normal numbers.
inline float exp_of(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: sums with it have no fraction
  const float low = x < -104.0f ? -104.0f : x, at = low > 89.0f ? 89.0f : low;
  const float shifted = at * 1.44269504f + kRound, n = shifted - kRound;
  const float r = (at - n * 0.693145751953125f) - n * 1.42860677e-6f;
  const float p =
      1.0f +
      r * (1.0f +
           r * (0.5f + r * (0.166666667f +
                            r * (0.0416666667f + r * (0.00833333333f + r * (0.00138888889f + r * 0.000198412698f))))));
  const auto whole = static_cast<std::int32_t>(to_bits(shifted) - to_bits(kRound)), half = whole >> 1;
  const auto power = [](std::int32_t e) { return from_bits(static_cast<std::uint32_t>(e + 127) << 23); };
  return p * power(half) * power(whole - half);
}

inline float sigmoid_of(float x) { return 1.0f / (1.0f + exp_of(-x)); }

inline float tanh_of(float x) {
  const float size = x < 0 ? -x : x, u = x * x;
  const float small =
      x + x * u *
              (-0.3333333316f +
               u * (0.1333330097f +
                    u * (-0.05395862507f + u * (0.02176363855f + u * (-0.008326414439f + u * 0.002272715938f)))));
  const float large = 1.0f - 2.0f / (exp_of(2.0f * size) + 1.0f);
  return u < 0.4f ? small : x < 0 ? -large : large;
}

// x Phi(x), Phi by erfc(z) = t exp(-z^2 + P(t)), t = 1 / (1 + z / 2): P was fitted for z in 0..10.
inline float gelu_of(float x) {
  const float size = x < 0 ? -x : x, z = size * 0.70710678f, t = 1.0f / (1.0f + 0.5f * z);
  const float p =
      -1.265578042f +
      t * (1.001818217f +
           t * (0.3532014795f +
                t * (0.2329245049f +
                     t * (-0.7361437248f +
                          t * (1.720586691f +
                               t * (-3.630209536f +
                                    t * (4.314971659f +
                                         t * (-2.836915773f + t * (0.9902578311f + t * -0.1449133059f)))))))));
  const float tail = 0.5f * t * exp_of(p - z * z);  // Phi(-|x|)
  return x * (x < 0 ? tail : 1.0f - tail);
}

inline float gelu_tanh_of(float x) {
  return x / (1.0f + exp_of(-1.59576912f * (x + 0.044715f * x * x * x)));  // 1 + tanh(u) = 2 sigmoid(2 u)
}

// sin(x + quarters pi / 2), for |x| to 2^30; beyond, as for all of x that is no number, NaN.
inline float sin_of(float value, std::int64_t quarters) {
  constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  const double x = value, shifted = x * 0.63661977236758134 + kRound, n = shifted - kRound;
  const double r = (x - n * 1.5707963267341256) - n * 6.0771005065061922e-11, u = r * r;
  const double s =
      r + r * u *
              (-0.16666666666666666 +
               u * (0.0083333333333333332 +
                    u * (-0.00019841269841269841 + u * (2.7557319223985893e-06 + u * -2.505210838544172e-08))));
  const double c =
      1.0 +
      u * (-0.5 + u * (0.041666666666666664 +
                       u * (-0.0013888888888888889 +
                            u * (2.4801587301587302e-05 + u * (-2.7557319223985888e-07 + u * 2.08767569878681e-09)))));
  std::int64_t bits, origin;
  std::memcpy(&bits, &shifted, sizeof bits);
  std::memcpy(&origin, &kRound, sizeof origin);
  const std::int64_t quarter = bits - origin + quarters;
  const double size = quarter & 1 ? c : s, result = quarter & 2 ? -size : size;
  return static_cast<float>(x < 1073741824.0 && x > -1073741824.0 ? result : (x - x) / (x - x));
}

inline std::uint16_t bf16_of(float v) {
  const std::uint32_t bits = to_bits(v);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}
inline float of_bf16(std::uint16_t bits) { return from_bits(static_cast<std::uint32_t>(bits) << 16); }
