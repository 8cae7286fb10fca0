#include "gemm/quantized.h"

#include <algorithm>

namespace lamina::gemm::quantized {
namespace {

// Where the 8-bit code k of a column lies in its block, and the 4-bit one in its dword.
inline std::size_t place8(const Form& form, std::size_t k, std::size_t column) {
  const std::size_t together = form.int8_x ? 4 : 2;
  return (k / together * kCols + column) * together + k % together;
}
inline std::size_t shift4(const Form& form, std::size_t k) {
  const std::size_t i = k % kCodesTogether;
  return form.int8_x ? i % 4 * 8 + i / 4 * 4 : i / 2 * 4 + i % 2 * 16;
}

// What is added to an 8-bit code.
inline std::uint8_t bias8(const Form& form) { return form.int8_x ? 128 : 0; }

// The codes of one block of a column, in its place of a panel. After the end of k codes are 0, and so is x.
void pack_codes(const Form& form, const std::uint8_t* from, std::size_t count, std::size_t column, char* to) {
  if (form.bits == 8) {
    for (std::size_t k = 0; k < form.block; ++k)
      to[place8(form, k, column)] = static_cast<char>((k < count ? from[k] : 0) + bias8(form));
    return;
  }
  for (std::size_t k = 0; k < form.block; k += kCodesTogether) {
    std::uint32_t word = 0;
    for (std::size_t i = 0; i < kCodesTogether && k + i < count; ++i)
      word |= static_cast<std::uint32_t>(from[k + i] & 15) << shift4(form, i);
    std::memcpy(to + (k / kCodesTogether * kCols + column) * sizeof word, &word, sizeof word);
  }
}

float number(const char* at, Type type) {
  float wide;
  std::uint16_t bits;
  switch (type) {
    case Type::kFloat: std::memcpy(&wide, at, sizeof wide); return wide;
    case Type::kBf16: std::memcpy(&bits, at, sizeof bits); return to_float(Bf16{bits});
    default: std::memcpy(&bits, at, sizeof bits); return to_float(Half{bits});
  }
}

// The number q of a column's code at k in a block.
float code(const Form& form, const char* block, std::size_t k, std::size_t column) {
  if (form.bits == 8) return static_cast<signed char>(block[place8(form, k, column)] - bias8(form));
  std::uint32_t word;
  std::memcpy(&word, block + (k / kCodesTogether * kCols + column) * sizeof word, sizeof word);
  return form.values[word >> shift4(form, k) & 15];
}

}  // namespace

void row(const Form& form, const void* w, std::size_t k_size, std::size_t n, float* to) {
  const Layout layout(form);
  const std::size_t all = blocks(form, k_size), column = n % kCols;
  const char* const panel = static_cast<const char*>(w) + n / kCols * layout.panel(all);
  for (std::size_t b = 0; b < all; ++b, to += form.block) {
    const char* const at = panel + b * layout.parameters + column * (layout.values / kCols);
    const char* const codes = panel + layout.codes + b * layout.step;
    const float scale = number(at, form.scales), offset = form.offsets ? number(at + layout.values, form.scales) : 0;
    for (std::size_t k = 0, count = std::min(form.block, k_size - b * form.block); k < count; ++k) {
      const float product = scale * code(form, codes, k, column);
      to[k] = form.offsets ? product + offset : product;
    }
  }
}

void pack(const Form& form, const Plain& from, std::size_t cols, std::size_t k_size, std::size_t begin, std::size_t end,
          void* to) {
  const Layout layout(form);
  const std::size_t all = blocks(form, k_size), size = layout.values / kCols, held = form.by_channel ? 1 : all;
  for (std::size_t first = begin; first < end; first += kCols) {
    char* const panel = static_cast<char*>(to) + first / kCols * layout.panel(all);
    std::memset(panel, 0, layout.panel(all));
    for (std::size_t i = 0; i < std::min(kCols, cols - first); ++i) {
      const std::size_t n = first + i;
      for (std::size_t b = 0; b < held; ++b) {
        char* const at = panel + b * layout.parameters + i * size;
        std::memcpy(at, static_cast<const char*>(from.scales) + (n * held + b) * size, size);
        if (form.offsets)
          std::memcpy(at + layout.values, static_cast<const char*>(from.offsets) + (n * held + b) * size, size);
      }
      for (std::size_t b = 0; b < all; ++b)
        pack_codes(form, from.codes + n * k_size + b * form.block, std::min(form.block, k_size - b * form.block), i,
                   panel + layout.codes + b * layout.step);
    }
  }
}

}  // namespace lamina::gemm::quantized
