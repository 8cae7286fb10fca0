// K and V in 8 bits with a scale for each row and head: the arithmetic of lamina/kv/stored_format.py, bit for bit.
#pragma once

#include <cstddef>

#include "attention/attention.h"

namespace lamina::memory_worker {

// `rows` of `dim` numbers each, of the dtype `wire`, as bytes of `kind` (int8, fp8) and their scales [rows].
void round_rows(attention::Dtype wire, attention::Stored kind, const char* from, std::size_t rows, std::size_t dim,
                char* bytes, float* scales);

}  // namespace lamina::memory_worker
