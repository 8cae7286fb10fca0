// The formats of mlx5.h are held to rdma-core's header, where it is there, when this is compiled.
#pragma once

#include "netstack/mlx5.h"

#if __has_include(<infiniband/mlx5dv.h>)
#include <infiniband/mlx5dv.h>

#include <cstddef>

namespace lamina::mlx5 {

static_assert(kOpWrite == MLX5_OPCODE_RDMA_WRITE && kSignalled == MLX5_WQE_CTRL_CQ_UPDATE);
static_assert(kInline == u32(MLX5_INLINE_SEG) && kSend == MLX5_SND_DBR);
static_assert(kCqeDone == MLX5_CQE_REQ && kCqeError == MLX5_CQE_REQ_ERR && kCqeInvalid == MLX5_CQE_INVALID);
static_assert(sizeof(Wqe) == MLX5_SEND_WQE_BB && sizeof(Cqe) == sizeof(mlx5_cqe64));
static_assert(sizeof(mlx5_wqe_ctrl_seg) == 16 && sizeof(mlx5_wqe_raddr_seg) == 16 && sizeof(mlx5_wqe_data_seg) == 16);
static_assert(offsetof(mlx5_cqe64, sop_drop_qpn) == 56 && offsetof(mlx5_cqe64, wqe_counter) == 60);
static_assert(offsetof(mlx5_cqe64, op_own) == 63 && offsetof(mlx5_err_cqe, syndrome) == 55);

}  // namespace lamina::mlx5

#endif
