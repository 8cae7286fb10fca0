// Where libmlx5 has laid out a queue pair's ring, its doorbell and its completions: who knows it posts and polls by
// mlx5.h, and needs libmlx5 no more.
#pragma once

#include <infiniband/mlx5dv.h>

#include <cstring>
#include <string>

#include "netstack/dynamic.h"
#include "netstack/verbs/end.h"

namespace lamina::verbs {

constexpr std::uint32_t kBlockBytes = 64;  // of a ring; of completions too

// As a Queue of mlx5.h begins.
struct Layout {
  void *ring, *record, *doorbell, *completions, *seen;
  std::uint32_t number, blocks, cqes, alternate;
};

// What to ask verbs for so that libmlx5 makes a ring of so many blocks, a power of two from 8 on: it counts requests of
// three blocks each, as those for atomics and memory windows would be, and rounds up. Ours have one.
inline Depth depth_of(std::uint32_t blocks) { return {blocks / 4, 0, blocks}; }

// libmlx5 (rdma-core), loaded when it is first asked for.
struct Provider {
  decltype(&::mlx5dv_init_obj) init_obj;
  char fault[256];  // why it cannot be used; empty: it can

  static const Provider& get() {  // of this process
    static const Provider provider = load();
    return provider;
  }

 private:
  static Provider load() {
    Provider provider{};
    DynamicLibrary file({"libmlx5.so.1"});
    file.find("mlx5dv_init_obj", &provider.init_obj);
    file.explain(provider.fault, "it is not rdma-core's");
    return provider;
  }
};

// Of `pair`, to which nobody else posts, and whose completions nobody else polls. False with the cause in `fault`.
inline bool lay_out(ibv_qp* pair, Layout* layout, std::string* fault) {
  const Provider& provider = Provider::get();
  mlx5dv_qp ring{};
  mlx5dv_cq completions{};
  mlx5dv_obj objects{};
  objects.qp = {pair, &ring};
  objects.cq = {pair->send_cq, &completions};
  *fault = provider.fault;
  if (!fault->empty()) return false;
  if (const int error = provider.init_obj(&objects, MLX5DV_OBJ_QP | MLX5DV_OBJ_CQ)) {
    *fault = std::string("tell where a queue pair lies: ") + std::strerror(error) + "; is it an mlx5 device?";
    return false;
  }
  const auto is_power = [](std::uint32_t n) { return n && !(n & (n - 1)); };
  if (ring.sq.stride != kBlockBytes || completions.cqe_size != kBlockBytes || !is_power(ring.sq.wqe_cnt) ||
      !is_power(completions.cqe_cnt) || completions.cqe_cnt < ring.sq.wqe_cnt) {
    *fault = "use a ring of " + std::to_string(ring.sq.wqe_cnt) + " x " + std::to_string(ring.sq.stride) +
             " bytes with " + std::to_string(completions.cqe_cnt) + " x " + std::to_string(completions.cqe_size) +
             " of completions";
    return false;
  }
  *layout = {ring.sq.buf,  ring.dbrec,      ring.bf.reg,         completions.buf, completions.dbrec,
             pair->qp_num, ring.sq.wqe_cnt, completions.cqe_cnt, ring.bf.size};
  return true;
}

}  // namespace lamina::verbs
