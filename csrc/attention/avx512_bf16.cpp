// AVX-512 with BF16: queries meet keys as they are stored.
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

LAMINA_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")

namespace lamina::attention {
namespace {

#include "avx512/vectors.h"
#include "kernel.h"
#include "loops.h"
#include "transpose512.h"

#include "avx512/bf16_product.h"  // after those
#include "avx512/power.h"

#include "avx512/pairs.h"  // after those
#include "tiles.h"

#include "avx512/bf16_matrix.h"  // after that
#include "select.h"
#include "tally.h"
#include "task.h"
#include "variant.h"

// Both loops have the same bits, if no pair of tokens is divided. Those for many queries lay out the values first, and
// take the same time for 17 queries as for 32: fewer than these are not worth it.
constexpr int64_t kMany = 24;

void run_bf16(const Call& call, int64_t number, Scratch& scratch) {
  const Task& task = call.tasks[number];
  if (Tiles<Matrix>::fits(*call.op) && task.end - task.begin >= kMany && call.rows->block_size % 2 == 0)
    return run<BFloat16, BFloat16, Tiles<Matrix>>(call, number, scratch);
  run<BFloat16, BFloat16, Pairs>(call, number, scratch);
}

constexpr std::array<RunTask, kStored> runs_bf16 = {run_bf16, run<BFloat16, Int8>, run<BFloat16, Fp8>};

}  // namespace

constexpr Variant kAvx512Bf16 = variant("avx512_bf16", avx512_bf16_usable, runs_bf16);

}  // namespace lamina::attention

LAMINA_TARGET_END
#endif
