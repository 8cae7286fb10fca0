// The kernels as a shared library for tests: emulate(kernel, blocks, shared bytes, addresses of the kernel's arguments).
#include <cstddef>
#include <cstring>
#include <tuple>
#include <utility>

#include "cuda_emulation/emulation.h"

#include "attention/cuda/kernels.cu"

namespace {

template <class... A, std::size_t... i>
void launch(void (*kernel)(A...), int blocks, int shared_bytes, void** arguments, std::index_sequence<i...>) {
  const std::tuple<A...> all{*static_cast<A*>(arguments[i])...};
  Warp::now().launch(blocks, shared_bytes, [&] { std::apply(kernel, all); });
}

template <class... A>
bool launch_if(const char* name, const char* wanted, void (*kernel)(A...), int blocks, int shared_bytes,
               void** arguments, int count) {
  if (std::strcmp(name, wanted) != 0 || count != int(sizeof...(A))) return false;
  launch(kernel, blocks, shared_bytes, arguments, std::index_sequence_for<A...>());
  return true;
}

}  // namespace

// False if there is no such kernel with so many arguments.
extern "C" bool emulate(const char* name, int blocks, int shared_bytes, void** arguments, int count) {
  const auto is = [&](const char* wanted, auto kernel) {
    return launch_if(name, wanted, kernel, blocks, shared_bytes, arguments, count);
  };
  return is("lamina_plan", lamina_plan) || is("lamina_attend", lamina_attend) || is("lamina_merge", lamina_merge) ||
         is("lamina_close", lamina_close) || is("lamina_append", lamina_append);
}

// From now on; see Warp::take.
extern "C" void emulate_first_is_fast(bool it_is) { Warp::now().first_is_fast = it_is; }

// The emulation's own conversions, which a test compares with others.
extern "C" void emulate_round(int count, const float* from, Element* to, float* back) {
  for (int i = 0; i < count; ++i) round_to(to[i], from[i]), back[i] = to_float(to[i]);
}

// What cuda_geometry.py must know: queries of a tile, numbers of a node, bytes of shared memory, warps that a
// multiprocessor has registers for, levels, the header's parts.
extern "C" void emulate_sizes(int* to) {
  const int shared = Core::kPipelineBytes + Core::kNearLevels * Core::Node::kSize * int(sizeof(float));
  const int header[] = {int(sizeof(Sequence)), int(sizeof(Task)), int(offsetof(Plan, task))};
  const int all[] = {Core::kQueries, Core::Node::kSize, shared,    Core::kWarps, kLevels,
                     kChunk,         header[0],         header[1], header[2]};
  std::memcpy(to, all, sizeof all);
}
