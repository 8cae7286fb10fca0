#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "memory/bounds.h"

#include <algorithm>

#include "memory/numbers.h"

namespace lamina::memory_worker {
namespace {

// S: of the numbers of K; B: of their bounds. `scales` [tokens] or null.
template <class S, class B>
void bound(const char* keys, const float* scales, std::size_t tokens, std::size_t dim, char* least, char* most) {
  constexpr std::size_t kPart = 64;  // numbers at once
  const auto* from = reinterpret_cast<const S*>(keys);
  for (std::size_t d = 0; d < dim; d += kPart) {
    const std::size_t count = std::min(kPart, dim - d);
    float low[kPart], high[kPart];
    for (std::size_t t = 0; t < tokens; ++t) {
      const float scale = scales ? scales[t] : 1.0f;
      for (std::size_t i = 0; i < count; ++i) {
        const float x = widen(from[t * dim + d + i]) * scale;
        low[i] = !t || x < low[i] || x != x ? x : low[i];
        high[i] = !t || x > high[i] || x != x ? x : high[i];
      }
    }
    for (std::size_t i = 0; i < count; ++i) {
      reinterpret_cast<B*>(least)[d + i] = narrow<B>(low[i]);
      reinterpret_cast<B*>(most)[d + i] = narrow<B>(high[i]);
    }
  }
}

using BoundRows = void (*)(const char*, const float*, std::size_t, std::size_t, char*, char*);

BoundRows bound_of(const Store& store) {
  if (store.stored == attention::kInt8) return bound<Int8Number, float>;
  if (store.stored == attention::kFp8) return bound<Fp8Number, float>;
  if (store.wire == attention::kFloat32) return bound<float, float>;
  return store.wire == attention::kBFloat16 ? bound<BFloat16, BFloat16> : bound<Half, Half>;
}

}  // namespace

void bound_block(const Store& store, const Piece& piece, std::int64_t block) {
  const auto size = std::size_t(store.block_size), dim = std::size_t(piece.op.qk_dim);
  const std::size_t item = piece.k_scale ? sizeof(float) : store.stored_item;
  const auto head = std::size_t(block) * std::size_t(piece.op.kv_heads);
  for (std::size_t h = head; h < head + std::size_t(piece.op.kv_heads); ++h)
    bound_of(store)(piece.k + h * size * dim * store.stored_item, piece.k_scale ? piece.k_scale + h * size : nullptr,
                    size, dim, piece.least + h * dim * item, piece.most + h * dim * item);
}

}  // namespace lamina::memory_worker
