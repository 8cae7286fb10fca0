// Rows of fp16 by F16C, eight at a time. Included by variants that have it, inside their namespaces.

inline void halves_to_floats(const char* from, float* to, std::int64_t n) {
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * i))));
  for (; i < n; ++i) {
    std::uint16_t bits;
    __builtin_memcpy(&bits, from + 2 * i, 2);
    to[i] = _cvtsh_ss(bits);
  }
}

inline void floats_to_halves(const float* from, char* to, std::int64_t n) {
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
  for (; i < n; ++i) {
    const auto bits = static_cast<std::uint16_t>(_cvtss_sh(from[i], _MM_FROUND_TO_NEAREST_INT));
    __builtin_memcpy(to + 2 * i, &bits, 2);
  }
}
