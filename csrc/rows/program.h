// A piece of a model as a table of instructions on rows: what each does to one row depends on that row alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "gemm/calls.h"

namespace lamina::rows {

// The first three as gemm::Type; kInt has 64 bits. kByte is the type of quantized weights.
enum class Type : std::uint8_t { kFloat, kBf16, kHalf, kInt, kByte };

constexpr std::size_t kDims = 3, kRegisters = 16, kChunk = 512;

// The place of elements: `offset` bytes after the beginning of a row of slot `slot`, `outer` and `inner` elements apart.
struct View {
  std::int32_t slot;
  Type type;
  std::int64_t offset;
  std::int64_t outer[kDims];
  std::int64_t inner;
};

// The order is that of lamina/ops/rows/instructions.py, as is that of Kind and Type.
enum class Op : std::uint8_t {
  kLoad,
  kStore,
  kAdd,
  kSub,
  kMul,
  kDiv,
  kMax,
  kMin,
  kAddTo,
  kMulBy,
  kDivBy,
  kNeg,
  kSquare,
  kCube,
  kRsqrt,
  kSqrt,
  kExp,
  kSigmoid,
  kSilu,
  kGelu,
  kGeluTanh,
  kTanh,
  kRelu,
  kCos,
  kSin,
  kRoundBf16,
  kRoundHalf,
  kMaxTo,
  kMinTo,
  kReciprocal,
  kCount
};

// One operation on a chunk of floats: register `to` becomes `op` of registers `a` and `b`, or of `a` and `value`.
struct Step {
  Op op;
  std::uint8_t to, a, b;
  float value;
  std::int32_t view;  // of kLoad and kStore
};

enum class Kind : std::uint8_t { kElements, kMean, kLayerNorm, kLinear, kLookUp, kAddInt };

// kElements: `steps` for each of sizes[0] x sizes[1] x sizes[2] x inner elements.
// kMean: of the `inner` elements of view 0, or of what `steps` leave in register n, to view 1. kLayerNorm: of view 0 to view 1, weight view 2, bias view 3 or none.
// kLinear: x view 0, y view 1, w view 2 [n, inner], bias view 3 or none. It has `sizes[2]` rows for each row. Rows of w
// are `leading` elements apart, 0 if w is packed; a quantized w is packed, in `form`. kLookUp: row view 0 of the table view 2, which has `n` rows of `inner`, to view 1. Of a quantized
// table, in `form`, rows become floats by `row`.
// kAddInt: view 0 plus `value` to view 1.
struct Instruction {
  Kind kind;
  std::int64_t sizes[kDims];
  std::int64_t inner, n, leading;
  double value;
  std::vector<View> views;
  std::vector<Step> steps;
  std::optional<gemm::Form> form;
  decltype(gemm::Calls::row) row;
};

// `slots`: pointer and bytes from row to row of each.
struct Slot {
  char* at;
  std::int64_t row_bytes;
};

// The vector code of one instruction set. Rows [begin, end) of `instructions`, none of which is kLinear. False where a
// row looks up what the table has not.
using Run = bool (*)(const Instruction* first, const Instruction* last, const Slot* slots, std::int64_t begin,
                     std::int64_t end);

extern const Run kAvx2, kAvx512;

}  // namespace lamina::rows
