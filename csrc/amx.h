// Matrix registers (AMX, bf16): whether there are any, and what compilers must be told. Included by files that are
// compiled for them.
#pragma once
#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace lamina {

// Asks the system for the registers, too.
inline bool amx_usable() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // asm/prctl.h; bit of the registers' state
  constexpr unsigned kBf16AndTiles = 1 << 22 | 1 << 24;        // of leaf 7
  unsigned a, b, c, d;
  return __builtin_cpu_supports("avx512bf16") && __get_cpuid_count(7, 0, &a, &b, &c, &d) &&
         (d & kBf16AndTiles) == kBf16AndTiles && !syscall(SYS_arch_prctl, kRequestPermission, kTileData);
#else
  return false;
#endif
}

// GCC's intrinsics do not say that they read memory: what was written there would else be free to come later, or never.
inline void written(const void* at) { asm volatile("" ::"r"(at) : "memory"); }

}  // namespace lamina
#endif
