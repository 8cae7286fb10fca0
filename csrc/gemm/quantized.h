// Weights of few bits: w[n][k] = scale * q + offset. q is an integer of 8 bits, or a 4-bit code that stands for one of 16
// values. A block of k has one scale and one offset. By channel, all blocks of a column have the same.
//
// A product of x and q is exact. The products of a block are added in fp32, then they are scaled:
// - sum: a block's products in the order k1 k0 k3 k2 k5 k4 ..., each added with one rounding;
// - y = fma(scale, sum, y), then y = fma(offset, sum of x, y), for one block after the other.
//
// Every instruction set does this for every number of rows, so numbers have the same bits; a NaN may be another NaN.
// AVX512-BF16 alone takes numbers below 2^-126 in magnitude for zeros.
//
// Form::int8_x: each row of x becomes scale_x * q_x first, and all products and sums of q and q_x are exact int32.
// - scale_x = (largest magnitude of the row) / 127.5, rounded to fp32, as compressed-tensors has it.
// - q_x = x / scale_x, rounded to fp32, then to the nearest integer, to even, then to -128 .. 127. It is 0 if scale_x is.
// - y = fma(scale, sum, y), then y = fma(offset, sum of q_x, y), for one block after the other. Both sums are rounded to
//   fp32. By channel all of k is one block.
// - y = y * scale_x, rounded once. A row with an infinity or NaN gives NaN.
#pragma once

#include "gemm/linear.h"

namespace lamina::gemm::quantized {

constexpr std::size_t kCols = 32;  // of a panel
constexpr std::size_t kCodesTogether = 8;  // numbers of k whose 4-bit codes are one dword of a column

// Panels of columns, one after the other. By block, a panel is [block] of parameters and codes; by channel, it is
// parameters, then [block] of codes. Parameters: scales [column], then offsets [column] if there are any.
// Codes of 4 bits: [k / 8][column] dwords; the lower half has k0 k2 k4 k6 from its lowest bit on, the upper half the
// others. Codes of 8 bits: [k / 2][column][2]. With int8_x: 4 bits: byte i has k(i) in its lower half, and k(i + 4) in
// the upper one; 8 bits: [k / 4][column][4] of q + 128.
struct Layout {
  explicit Layout(const Form& form)
      : values(kCols * (form.scales == Type::kFloat ? 4 : 2)), codes(values * (form.offsets ? 2 : 1)),
        step(kCols * form.block * form.bits / 8 + (form.by_channel ? 0 : codes)),
        parameters(form.by_channel ? 0 : step) {}

  std::size_t panel(std::size_t blocks) const { return (parameters ? 0 : codes) + blocks * step; }

  std::size_t values;  // bytes of a panel's scales, or offsets
  std::size_t codes;  // where codes of the first block begin
  std::size_t step;  // from a block's codes to the next ones
  std::size_t parameters;  // from a block's parameters to the next ones
};

// Whether 4-bit codes stand for consecutive integers, which kernels of int8_x multiply.
inline bool are_integers(const Form& form) {
  for (std::size_t i = 0; i < 16; ++i)
    if (form.values[i] != form.values[0] + static_cast<float>(i) || form.values[0] > 0 || form.values[0] < -128)
      return false;
  return form.values[0] == static_cast<float>(static_cast<int>(form.values[0]));
}

// Whether kernels multiply weights of this form.
inline bool is_known(const Form& form) {
  const bool fits = (form.bits == 4 || form.bits == 8) && form.block && form.block % kCodesTogether == 0;
  return fits && (!form.int8_x || (form.block % 16 == 0 && (form.bits == 8 || are_integers(form))));
}

inline std::size_t blocks(const Form& form, std::size_t k_size) { return (k_size + form.block - 1) / form.block; }

inline std::size_t bytes(const Form& form, std::size_t cols, std::size_t k_size) {
  return (cols + kCols - 1) / kCols * Layout(form).panel(blocks(form, k_size));
}

// What is packed: codes [cols, k], of which 4 bits count or all 8; scales and offsets [cols, blocks], or [cols] by
// channel, of the form's type, without gaps.
struct Plain {
  const std::uint8_t* codes;
  const void *scales, *offsets;
};

// Columns [begin, end), begin a multiple of kCols.
void pack(const Form& form, const Plain& from, std::size_t cols, std::size_t k_size, std::size_t begin, std::size_t end,
          void* to);

// Row n of a packed w to floats. The product of q and its scale is rounded, then the sum with its offset.
void row(const Form& form, const void* w, std::size_t k_size, std::size_t n, float* to);

extern const Kernel kAvx512Bf16;  // of bf16
extern const Kernel kAvx512[3], kAvx2[3];  // by Type
extern const Kernel kInt8Vnni[3], kInt8Avx2[3];  // with int8_x, by Type

}  // namespace lamina::gemm::quantized
