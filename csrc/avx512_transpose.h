// 16 x 16 numbers of 32 bits. Included under a target with AVX-512 DQ, in the namespace of who needs it.

inline void transpose(const __m512i (&from)[16], __m512i (&to)[16]) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(from[i], from[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(from[i], from[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]), b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]), b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  for (int j = 0; j < 4; ++j) {
    const __m512i even = _mm512_shuffle_i32x4(b[j], b[4 + j], 0x88), odd = _mm512_shuffle_i32x4(b[j], b[4 + j], 0xdd);
    const __m512i even8 = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0x88);
    const __m512i odd8 = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0xdd);
    to[j] = _mm512_shuffle_i32x4(even, even8, 0x88), to[8 + j] = _mm512_shuffle_i32x4(even, even8, 0xdd);
    to[4 + j] = _mm512_shuffle_i32x4(odd, odd8, 0x88), to[12 + j] = _mm512_shuffle_i32x4(odd, odd8, 0xdd);
  }
}
