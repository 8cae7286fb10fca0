// bf16 weights in panels of columns, by which AVX512-BF16 multiplies faster than as they lie, with the same bits.
//
// A panel has [chain][link][column] pairs of numbers. A chain is one lane of avx512_bf16.cpp: pairs 32 numbers of k
// apart, which are its links. So a product fills a vector of columns, no lanes are left to add, and a thread reads its
// panels from one end to the other.
#pragma once

#include "gemm/linear.h"

namespace lamina::gemm::panels {

constexpr std::size_t kCols = 32;  // of a panel

// Of columns [n, n + kCols) of p.w, as they lie. What of it is no number or no column is never looked at, or 0.
std::size_t bytes(std::size_t k_size);
void pack(const Problem& p, std::size_t n, void* to);

// Rows for `multiply`, and its scratch.
Plan plan(const Problem& p);
void prepare(const Problem& p, const void* x, std::size_t begin, std::size_t end, float* to);

// Columns [n, n + kCols) of y, by their panel `w`.
void multiply(const Problem& p, std::size_t n, const void* w, float* scratch);

}  // namespace lamina::gemm::panels
