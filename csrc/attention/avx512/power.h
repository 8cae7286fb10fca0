// Weights of AVX-512's loops: powers of two. Included after kernel.h, in the same namespace.

// 2^(x - n) to 1e-4 of it, whose last bits x alone decides; 0 where it is no normal number.
inline V power(V x, V n) {
  const V y = max(set(-200), x), k = (V)_mm512_roundscale_ps((__m512)y, _MM_FROUND_NO_EXC), r = y - k;
  V p = set(0.05500895f);
  for (float c : {0.24221101f, 0.69328293f, 1.0f}) p = fma(p, r, set(c));
  return (V)_mm512_scalef_ps((__m512)p, (__m512)(k - n));
}

// Scores less a multiple of this are near 0, whatever they are; it is most often 0 itself.
constexpr float kApart = 64;
