// AVX-512 with BF16: queries meet keys as they are stored.
#include "attention.h"

#if defined(__x86_64__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC bug 105593, in the next header
#include <immintrin.h>

#include <type_traits>
#include <utility>
#include <vector>

#include "target.h"

LAMINA_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")

namespace lamina::attention {
namespace {

#include "avx512_vectors.h"
#include "kernel.h"
#include "loops.h"

template <>
struct Dot<BFloat16> {
  using Row = __m512bh;
  using Part = Row;
  static constexpr int step = 2 * W, parts = 1;
  static Row load(const BFloat16* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static Row load(const BFloat16* p, int64_t n) {
    return (__m512bh)_mm512_maskz_loadu_epi16(~__mmask32(0) >> (step - n), p);
  }
  template <int>
  static const Part& part(const Row& row) {
    return row;
  }
  static V add(V sum, const Part& q, const Part& k) { return (V)_mm512_dpbf16_ps(sum, q, k); }
};

#include "select.h"
#include "tally.h"
#include "task.h"

bool usable() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512bf16");
}

}  // namespace

const Variant kAvx512Bf16 = {"avx512_bf16",
                             usable,
                             {runs<float>, runs<BFloat16>, runs<Half>},
                             merge_partials,
                             {finish<float>, finish<BFloat16>, finish<Half>},
                             {bounds<float>, bounds<BFloat16>, bounds<Half>},
                             {tallies<float>, tallies<BFloat16>, tallies<Half>},
                             read};

}  // namespace lamina::attention

LAMINA_TARGET_END
#endif
