// Included once for each set of instructions with AVX-512 F, inside its own namespace.

// Dwords [16, 16], a row in a register, become [16, 16]^T.
inline void transpose(__m512i (&r)[16]) {
  __m512i t[16];
  for (std::size_t i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (std::size_t i = 0; i < 16; i += 4)
    for (std::size_t j = 0; j < 2; ++j) {
      r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  for (std::size_t j = 0; j < 4; ++j) {  // quarter q of r[i + j] is column 4 q + j of rows i .. i + 3
    const __m512i even = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88), odd = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
    const __m512i even8 = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
    const __m512i odd8 = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
    t[j] = _mm512_shuffle_i32x4(even, even8, 0x88);
    t[4 + j] = _mm512_shuffle_i32x4(odd, odd8, 0x88);
    t[8 + j] = _mm512_shuffle_i32x4(even, even8, 0xdd);
    t[12 + j] = _mm512_shuffle_i32x4(odd, odd8, 0xdd);
  }
  for (std::size_t i = 0; i < 16; ++i) r[i] = t[i];
}
