// How other native modules use an engine of lamina.ops.gemm: its linear layers and its threads.
#pragma once

#include <cstddef>

#include "gemm/linear.h"
#include "pool.h"

namespace lamina::gemm {

// What the capsule `kCalls` of an engine points to. It lives as long as the engine. Calls take turns.
struct Calls {
  static constexpr const char* kName = "lamina.ops.gemm.calls";
  void* engine;
  void (*linear)(void* engine, const Problem&, const void* x);  // throws std::bad_alloc
  void (*run)(void* engine, Pool::Piece, void* job, std::size_t count);  // see Pool::run
  std::size_t threads;
  void (*row)(const Form&, const void* w, std::size_t k_size, std::size_t n, float* to);  // of quantized.h
};

}  // namespace lamina::gemm
