// y = x w^T + b on a CPU for few to some hundred rows, weights read where they lie: fp32, bf16 or fp16, never copied.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace lamina::gemm {

struct Bf16 {
  std::uint16_t bits;
};
struct Half {
  std::uint16_t bits;
};

enum class Type { kFloat, kBf16, kHalf };

// x [rows, k] as floats without gaps; w [cols, k] of ``type`` with ldw elements from row to row; b [cols] of ``type``
// or null; y [rows, cols] of ``type`` without gaps. Sums are fp32; y is rounded once, to nearest even.
struct Problem {
  Type type;
  const float* x;
  const void* w;
  const void* b;
  void* y;
  std::size_t rows, cols, k_size, ldw;
};

constexpr std::size_t kFewRows = 4;         // up to here each weight is used straight from the load
constexpr std::size_t kSomeRows = 16;       // up to here a widened strip stays in L1
constexpr std::size_t kPanelBytes = 1 << 17;  // of widened weights in L2
constexpr std::size_t kStrip = 3;           // columns of a tile

// Columns done at a time, a multiple of kStrip.
inline std::size_t panel_cols(const Problem& p) {
  if (p.rows <= kFewRows) return 8 * kStrip;
  if (p.rows <= kSomeRows) return kStrip;
  const std::size_t fit = kPanelBytes / (sizeof(float) * p.k_size) / kStrip * kStrip;
  return fit < kStrip ? kStrip : fit > 64 * kStrip ? 64 * kStrip : fit;
}

// Floats of scratch memory that a thread needs: the sums of a panel, and the panel widened.
inline std::size_t scratch_floats(const Problem& p) { return panel_cols(p) * (p.rows + p.k_size); }

inline float to_float(float v) { return v; }
inline float to_float(Bf16 v) {
  const std::uint32_t bits = static_cast<std::uint32_t>(v.bits) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}
float to_float(Half v);

// Computes columns [begin, end) of y. Chosen for the CPU that runs it.
using Columns = void (*)(const Problem&, std::size_t begin, std::size_t end, float* scratch);
using Widen = void (*)(Type, const void* from, float* to, std::size_t count);

struct Variant {
  const char* name;
  bool usable;  // on this CPU
  Columns columns;
  Widen widen;  // ``count`` elements to floats
};

constexpr std::size_t kVariants = 2;
extern const Variant* variants();  // best first; kVariants of them

}  // namespace lamina::gemm
