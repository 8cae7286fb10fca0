// y = x w^T + b on a CPU for few to some hundred rows: fp32, bf16 or fp16, weights read where they lie, or as they were
// packed.
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

// Weights of few bits; csrc/gemm/quantized.h says how they are multiplied, and how they lie.
struct Form {
  std::size_t bits;  // of a code: 4 or 8
  std::size_t block;  // numbers of k that are scaled together, a multiple of 8
  bool by_channel;  // all blocks of a column have one scale and offset
  Type scales;  // type of scales and offsets
  bool offsets;  // there are some
  float values[16];  // of codes of 4 bits, each exact in bf16
  bool int8_x;  // rows of x become int8
};

// x [rows, k] is contiguous, as its kernel prepared it. w [cols, k] has ``type``, and ldw elements from row to row.
// b [cols] has ``type``, or is null. y [rows, cols] has ``type`` and is contiguous. Sums are fp32; y is rounded once, to
// nearest even.
struct Problem {
  Type type;
  const float* x;
  const void* w;
  const void* b;
  void* y;
  std::size_t rows, cols, k_size, ldw;
  bool packed = false;  // w is what a Packing made of it; ldw does not count
  const Form* form = nullptr;  // of w, if it was quantized and packed; ldw does not count
};

inline float to_float(float v) { return v; }
inline float to_float(Bf16 v) {
  const std::uint32_t bits = static_cast<std::uint32_t>(v.bits) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}
float to_float(Half v);

// To nearest even; NaN stays NaN.
Half to_half(float v);
inline Bf16 to_bf16(float v) {
  std::uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  const std::uint32_t near = bits + 0x7fffu + ((bits >> 16) & 1u);
  return {static_cast<std::uint16_t>((v != v ? bits | 0x400000u : near) >> 16)};
}

// How a kernel goes about a problem.
struct Plan {
  std::size_t cols;  // done at a time: pieces of the work are multiples of it
  std::size_t x;  // floats into which x is prepared once; 0: used as it is
  std::size_t scratch;  // floats of memory for each thread
};

constexpr std::size_t kRowsPrepared = 16;  // at once by a thread: a multiple of each kernel's tiles

// For one type of numbers, on CPUs with some instructions.
struct Kernel {
  Plan (*plan)(const Problem&);
  // Rows [begin, end) of x, begin in multiples of kRowsPrepared. `to`: 64-byte aligned, afterwards Problem::x.
  void (*prepare)(const Problem&, const void* x, std::size_t begin, std::size_t end, float* to);
  // [begin, end) of y. `scratch`: 64-byte aligned.
  void (*columns)(const Problem&, std::size_t begin, std::size_t end, float* scratch);
};

// An order of weights by which a variant is faster. Results have the same bits, but a NaN may be another NaN.
struct Packing {
  Kernel kernel;  // for w in this order
  std::size_t (*bytes)(std::size_t cols, std::size_t k_size);
  void (*pack)(const Problem&, std::size_t begin, std::size_t end, void* to);  // columns, in multiples of Plan::cols
};

struct Variant {
  const char* name;
  bool usable;  // on this CPU
  Kernel kernels[3];  // by Type
  const Packing* packing;  // of bf16, or null
  const Kernel* quantized;  // for weights of few bits, by Type of x, b and y
  const Kernel* int8_rows;  // for those whose x becomes int8
};

extern const Kernel kAmx, kAvx512Bf16, kAvx512, kAvx2Bf16;  // bf16
extern const Kernel kAvx2Half;
extern const Packing kAmxPanels, kAvx512Bf16Panels, kAvx512Panels, kAvx2Panels;

constexpr std::size_t kVariants = 4;
extern const Variant* variants();  // best first; kVariants of them

}  // namespace lamina::gemm
