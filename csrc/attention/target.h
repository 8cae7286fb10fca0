// Everything between LAMINA_TARGET("features") and LAMINA_TARGET_END is compiled for CPUs that have them. Standard
// headers come before it: functions that other files share must not be.
#pragma once

#define LAMINA_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define LAMINA_TARGET(features) \
  LAMINA_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define LAMINA_TARGET_END _Pragma("clang attribute pop")
#else
#define LAMINA_TARGET(features) _Pragma("GCC push_options") LAMINA_PRAGMA(GCC target features)
#define LAMINA_TARGET_END _Pragma("GCC pop_options")
#endif
