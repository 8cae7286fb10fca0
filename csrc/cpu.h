// The sets of instructions of this CPU for which there is code. Included before all that is compiled for them.
#pragma once
#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace lamina {

inline bool avx2_usable() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

inline bool avx512_usable() {
  return avx2_usable() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

inline bool avx512_vnni_usable() { return avx512_usable() && __builtin_cpu_supports("avx512vnni"); }

inline bool avx512_bf16_usable() { return avx512_usable() && __builtin_cpu_supports("avx512bf16"); }

// Matrix registers, of bf16. Asks the system for them, too.
inline bool amx_usable() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // asm/prctl.h; bit of the registers' state
  constexpr unsigned kBf16AndTiles = 1 << 22 | 1 << 24;        // of leaf 7
  unsigned a, b, c, d;
  return avx512_bf16_usable() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kBf16AndTiles) == kBf16AndTiles &&
         !syscall(SYS_arch_prctl, kRequestPermission, kTileData);
#else
  return false;
#endif
}

// GCC's intrinsics of matrix registers do not say that they read memory: what was written there would else be free to come later, or never.
inline void written(const void* at) { asm volatile("" ::"r"(at) : "memory"); }

}  // namespace lamina
#endif
