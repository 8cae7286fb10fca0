#include "rows/program.h"

#include <immintrin.h>

#include <cstring>

#include "bits.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace lamina::rows::avx2 {
namespace {
#include "rows/kernels.h"
}
}  // namespace lamina::rows::avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,prefer-vector-width=512")
namespace lamina::rows::avx512 {
namespace {
#include "rows/kernels.h"
}
}  // namespace lamina::rows::avx512
#pragma GCC pop_options

namespace lamina::rows {
const Run kAvx2 = avx2::run, kAvx512 = avx512::run;
}
