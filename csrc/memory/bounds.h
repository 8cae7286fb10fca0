// The least and the largest K of a whole block: the arithmetic of lamina/kv/paged_cache.py, LayerCache.write.
#pragma once

#include "memory/loop.h"

namespace lamina::memory_worker {

// Of `block`, in all heads. Where a number is none, so are its bounds.
void bound_block(const Store& store, const Piece& piece, std::int64_t block);

}  // namespace lamina::memory_worker
