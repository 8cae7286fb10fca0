// The kernel of recurrent layers as a shared library for tests: see emulation.cpp.
#include <cmath>
#include <tuple>

#include "cuda_emulation/emulation.h"

#include "recurrence/cuda/kernels.cu"

namespace {

template <class... A, std::size_t... i>
void launch(void (*kernel)(A...), int blocks, int shared_bytes, void** arguments, std::index_sequence<i...>) {
  const std::tuple<A...> all{*static_cast<A*>(arguments[i])...};
  lamina::attention::cuda::Warp::now().launch(blocks, shared_bytes, [&] { std::apply(kernel, all); });
}

template <class... A>
void launch(void (*kernel)(A...), int blocks, int shared_bytes, void** arguments) {
  launch(kernel, blocks, shared_bytes, arguments, std::index_sequence_for<A...>());
}

}  // namespace

extern "C" void emulate_recur(int blocks, int shared_bytes, void** arguments) {
  launch(lamina_recur, blocks, shared_bytes, arguments);
}
