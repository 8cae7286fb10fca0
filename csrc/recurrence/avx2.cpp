// AVX2 with FMA and F16C.
#include "recurrence/recurrence.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <initializer_list>
#include <type_traits>

#include "attention/target.h"
#include "bits.h"
#include "cpu.h"

LAMINA_TARGET("avx2,fma,f16c")

namespace lamina::recurrence {
namespace {

constexpr int W = 8, kWide = 4;
using V = float __attribute__((vector_size(32)));

inline V set(float x) { return (V)_mm256_set1_ps(x); }
inline V fma(V a, V b, V c) { return (V)_mm256_fmadd_ps(a, b, c); }
inline void stream(float* p, V x) { _mm256_stream_ps(p, x); }
inline void fence() { _mm_sfence(); }
inline float root(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }

#include "recurrence/f16c.h"
#include "recurrence/kernel.h"

}  // namespace

constexpr Kernel kAvx2{run, copy_past_caches};

}  // namespace lamina::recurrence

LAMINA_TARGET_END
#endif
