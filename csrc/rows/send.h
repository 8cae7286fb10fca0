// Where a chain of rows programs hands Q, and K and V, while it runs.
#pragma once

#include <cstdint>

namespace lamina::rows {

// What the capsule `kName` of a sender points to.
struct Send {
  static constexpr const char* kName = "lamina.ops.rows.send";
  void* self;
  // With the GIL, around the others. `begin`: false with an exception. `end`: false with an exception where one of the
  // others has failed.
  bool (*begin)(void* self);
  bool (*end)(void* self);
  // Without it: q; k and v. Rows without gaps, [rows, heads, dims], of so many bytes each. False: give up.
  bool (*q)(void* self, std::size_t layer, std::int64_t rows, const char* const* tensors, const std::size_t* row_bytes);
  bool (*kv)(void* self, std::size_t layer, std::int64_t rows, const char* const* tensors,
             const std::size_t* row_bytes);
};

}  // namespace lamina::rows
