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

// As a Queue of mlx5.h begins; `near`: in memory of the GPU that posts.
struct Layout {
  void *ring, *record, *doorbell, *completions, *seen;
  std::uint32_t number, blocks, cqes, alternate, near = 0;
};

// The depth for which libmlx5 makes a ring of `blocks` blocks, a power of two of at least 8. It counts three blocks for
// each request, as for atomics and memory windows, and rounds up. Ours have one.
inline Depth depth_of(std::uint32_t blocks) { return {blocks / 4, 0, blocks}; }

// As mlx5dv_devx_umem_in, which has its file since rdma-core 43; an older one refuses it by its mask.
struct RingsIn {
  void* address;
  std::size_t bytes;
  std::uint32_t access;
  std::uint64_t page_sizes, mask;
  int file;
};
constexpr std::uint64_t kOfFile = 1;  // in its mask
constexpr std::uint32_t kPlainPage = 1;  // of doorbells, which does not combine writes

// libmlx5 (rdma-core), loaded when it is first asked for.
struct Provider {
  DynamicLibrary file{"libmlx5.so.1"};
  decltype(&::mlx5dv_init_obj) init_obj = file.find("mlx5dv_init_obj");
  // Commands to the NIC's firmware; the first is null before rdma-core 35.
  mlx5dv_devx_umem* (*register_rings)(ibv_context*, RingsIn*) = file.find_newer("mlx5dv_devx_umem_reg_ex");
  decltype(&::mlx5dv_devx_umem_dereg) forget_rings = file.find_newer("mlx5dv_devx_umem_dereg");
  decltype(&::mlx5dv_devx_alloc_uar) take_page = file.find_newer("mlx5dv_devx_alloc_uar");
  decltype(&::mlx5dv_devx_free_uar) free_page = file.find_newer("mlx5dv_devx_free_uar");
  decltype(&::mlx5dv_devx_query_eqn) query_events = file.find_newer("mlx5dv_devx_query_eqn");
  decltype(&::mlx5dv_devx_obj_create) create = file.find_newer("mlx5dv_devx_obj_create");
  decltype(&::mlx5dv_devx_obj_modify) modify = file.find_newer("mlx5dv_devx_obj_modify");
  decltype(&::mlx5dv_devx_obj_destroy) destroy = file.find_newer("mlx5dv_devx_obj_destroy");
  decltype(&::mlx5dv_devx_create_event_channel) open_events = file.find_newer("mlx5dv_devx_create_event_channel");
  decltype(&::mlx5dv_devx_destroy_event_channel) close_events = file.find_newer("mlx5dv_devx_destroy_event_channel");
  decltype(&::mlx5dv_devx_subscribe_devx_event) subscribe = file.find_newer("mlx5dv_devx_subscribe_devx_event");
  decltype(&::mlx5dv_devx_get_event) get_event = file.find_newer("mlx5dv_devx_get_event");
  char fault[256];  // why it cannot be used; empty: it can

  static const Provider& get() {  // of this process
    static const Provider provider;
    return provider;
  }

 private:
  Provider() { file.explain(fault, "it is not rdma-core's"); }
};

// The layout of `pair`, to which only the caller posts, and whose completions only the caller polls. False with the
// cause in `fault`.
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
