// AVX-512 F, BW, DQ and VL.
#include "recurrence/recurrence.h"

#if defined(__x86_64__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC bug 105593, in the next header
#include <immintrin.h>

#include <initializer_list>
#include <type_traits>

#include "attention/target.h"
#include "bits.h"
#include "cpu.h"

LAMINA_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")

namespace lamina::recurrence {
namespace {

constexpr int W = 16, kWide = 8;
using V = float __attribute__((vector_size(64)));

inline V set(float x) { return (V)_mm512_set1_ps(x); }
inline V fma(V a, V b, V c) { return (V)_mm512_fmadd_ps(a, b, c); }
inline void stream(float* p, V x) { _mm512_stream_ps(p, x); }
inline void fence() { _mm_sfence(); }
inline float root(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }

#include "recurrence/f16c.h"
#include "recurrence/kernel.h"

}  // namespace

constexpr Kernel kAvx512{run, copy_past_caches};

}  // namespace lamina::recurrence

LAMINA_TARGET_END
#endif
