// AVX-512 F, BW, DQ and VL.
#include "attention.h"

#if defined(__x86_64__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC bug 105593, in the next header
#include <immintrin.h>

#include <type_traits>
#include <utility>
#include <vector>

#include "cpu.h"
#include "target.h"

LAMINA_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")

namespace lamina::attention {
namespace {

#include "avx512/vectors.h"
#include "kernel.h"
#include "loops.h"

#include "avx512/float_product.h"  // after those
#include "avx512/power.h"

#include "avx512/pairs.h"  // after those
#include "select.h"
#include "tally.h"
#include "task.h"
#include "variant.h"

constexpr std::array<RunTask, kStored> runs_bf16 = {run<BFloat16, BFloat16, Pairs>, run<BFloat16, Int8>,
                                                    run<BFloat16, Fp8>};

}  // namespace

constexpr Variant kAvx512 = variant("avx512", avx512_usable, runs_bf16);

}  // namespace lamina::attention

LAMINA_TARGET_END
#endif
