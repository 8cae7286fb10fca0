// Weights of AVX-512's loops: powers of two. Included after kernel.h, in the same namespace.

// 2^x to 1e-4 of it: of the next lower whole number, and a polynomial for what is left. 0 for -inf.
inline V power(V x) {
  const V r = (V)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  V p = set(0.07706717f);
  for (float c : {0.22764485f, 0.6951168f, 1.0f}) p = fma(p, r, set(c));
  return (V)_mm512_scalef_ps((__m512)p, (__m512)x);
}

// Scores less a multiple of this are near 0, whatever they are; it is most often 0 itself.
constexpr float kApart = 64;
