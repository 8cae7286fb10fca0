// bf16 by matrix instructions; all else is AVX-512's.
#include "attention.h"

#if defined(__x86_64__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC bug 105593, in the next header
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
#include "task.h"
#include "tiles.h"

void run_bf16(const Call& call, int64_t number, Scratch& scratch) {
  const int64_t rows = call.rows->count[call.tasks[number].sequence];
  if (Tiles::fits(*call.op, rows)) return run<BFloat16, BFloat16, Tiles>(call, number, scratch);
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
