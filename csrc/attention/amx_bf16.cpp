// bf16 by matrix instructions; all else is AVX-512's.
#include "attention.h"

#if defined(__x86_64__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC bug 105593, in the next header
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <type_traits>
#include <utility>
#include <vector>

#include "cpu.h"
#include "target.h"

LAMINA_TARGET("amx-tile,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")

namespace lamina::attention {
namespace {

#include "avx512/vectors.h"
#include "kernel.h"
#include "loops.h"
#include "transpose512.h"

#include "avx512/power.h"  // after those
#include "tiles.h"

#include "amx_matrix.h"  // after that
#include "task.h"

// Fewer queries than make two blocks of vectors are not worth it while keys come from memory: loads of tiles wait for
// their lines. All rows of the sequence in the step count, not those of a task, so that bits do not depend on tasks.
void run_bf16(const Call& call, int64_t number, Scratch& scratch) {
  const int64_t rows = call.rows->count[call.tasks[number].sequence];
  if (Tiles<Matrix>::fits(*call.op) && rows * call.op->group() > Vectors<BFloat16, BFloat16>::kMost)
    return run<BFloat16, BFloat16, Tiles<Matrix>>(call, number, scratch);
  kAvx512Bf16.run[kBFloat16][kAsQueries](call, number, scratch);
}

}  // namespace
}  // namespace lamina::attention

LAMINA_TARGET_END

namespace lamina::attention {

const Variant kAmxBf16 = [] {  // runs on every CPU
  Variant variant = kAvx512Bf16;
  variant.name = "amx_bf16", variant.usable = amx_usable, variant.run[kBFloat16][kAsQueries] = run_bf16;
  return variant;
}();

}  // namespace lamina::attention
#endif
