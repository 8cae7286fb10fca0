// Compares our work requests, completions and constants with those of rdma-core's public header, bit for bit.
#include <endian.h>
#include <infiniband/mlx5dv.h>

#include <cstdio>
#include <cstring>

#include "netstack/verbs/formats.h"
#include "netstack/verbs/objects.h"
#include "soft_nic/nic.h"

using namespace lamina;
using mlx5::u32;
using mlx5::u64;

static_assert(sizeof(verbs::RingsIn) == sizeof(mlx5dv_devx_umem_in) &&
              offsetof(verbs::RingsIn, page_sizes) == offsetof(mlx5dv_devx_umem_in, pgsz_bitmap) &&
              offsetof(verbs::RingsIn, mask) == offsetof(mlx5dv_devx_umem_in, comp_mask) &&
              offsetof(verbs::RingsIn, file) == offsetof(mlx5dv_devx_umem_in, dmabuf_fd) &&
              verbs::kOfFile == MLX5DV_UMEM_MASK_DMABUF && verbs::kPlainPage == MLX5DV_UAR_ALLOC_TYPE_NC);
static_assert(int(nic_model::kLocalLength) == MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR);
static_assert(int(nic_model::kLocalOperation) == MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR);
static_assert(int(nic_model::kLocalProtection) == MLX5_CQE_SYNDROME_LOCAL_PROT_ERR);
static_assert(int(nic_model::kFlushed) == MLX5_CQE_SYNDROME_WR_FLUSH_ERR);
static_assert(int(nic_model::kRemoteAccess) == MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR);
static_assert(int(nic_model::kRetryExceeded) == MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR);

namespace {

struct Reference {
  alignas(64) char bytes[64] = {};

  Reference(u64 index, u32 queue, mlx5::Remote to, u32 flags, uint8_t segments = 3) {
    mlx5dv_set_ctrl_seg(reinterpret_cast<mlx5_wqe_ctrl_seg*>(bytes), uint16_t(index), MLX5_OPCODE_RDMA_WRITE, 0, queue,
                        uint8_t(flags), segments, 0, 0);
    auto* raddr = reinterpret_cast<mlx5_wqe_raddr_seg*>(bytes + 16);
    raddr->raddr = htobe64(to.address);
    raddr->rkey = htobe32(to.key);
  }
};

bool equal(const mlx5::Wqe& ours, const Reference& theirs) { return std::memcmp(&ours, theirs.bytes, 64) == 0; }

bool check_requests(nic_model::Random& random) {
  const u64 index = random.next(), value = random.next(), other = random.next();
  const u32 queue = u32(random.next()) & 0xffffff, bytes = 1 + u32(random.below(1u << 30));
  const u32 flags = random.once_in(2) ? mlx5::kSignalled : 0;
  const mlx5::Remote to{random.next(), u32(random.next())};
  const mlx5::Local from{random.next(), u32(random.next())};

  Reference data(index, queue, to, flags);
  mlx5dv_set_data_seg(reinterpret_cast<mlx5_wqe_data_seg*>(data.bytes + 32), bytes, from.key, from.address);
  Reference word(index, queue, to, flags);
  reinterpret_cast<mlx5_wqe_inl_data_seg*>(word.bytes + 32)->byte_count = htobe32(8 | MLX5_INLINE_SEG);
  std::memcpy(word.bytes + 36, &value, 8);
  const u64 words[] = {value, other, random.next()};
  const auto of_words = [&](u32 count) {
    Reference inlined(index, queue, to, flags, 4);
    auto* head = reinterpret_cast<mlx5_wqe_inl_data_seg*>(inlined.bytes + 32);
    head->byte_count = htobe32(8 * count | MLX5_INLINE_SEG);
    std::memcpy(inlined.bytes + 36, words, 8 * count);
    return inlined;
  };
  return equal(mlx5::write_wqe(index, queue, to, from, bytes, flags), data) &&
         equal(mlx5::write_words_wqe<1>(index, queue, to, {{value}}, flags), word) &&
         equal(mlx5::write_words_wqe<2>(index, queue, to, {{value, other}}, flags), of_words(2)) &&
         equal(mlx5::write_words_wqe<3>(index, queue, to, {{value, other, words[2]}}, flags), of_words(3));
}

bool check_completion(nic_model::Random& random) {
  mlx5::Cqe completions[8] = {};
  auto* theirs = reinterpret_cast<mlx5_cqe64*>(completions);
  for (int i = 0; i < 8; ++i) theirs[i].op_own = MLX5_CQE_INVALID << 4 | MLX5_CQE_OWNER_MASK;
  u32 seen[2] = {};
  mlx5::Queue q = {};
  q.completions = completions;
  q.seen = seen;
  q.cqes = 8;
  q.number = u32(random.next()) & 0xffffff;
  q.completed = random.next() >> 8;
  q.committed = q.reserved = q.completed + 4;
  q.polled = random.next() >> 8;
  mlx5::Bus bus;
  if (mlx5::poll_cq(bus, q) != mlx5::kPending) return false;
  const u64 polled = q.polled, done = 1 + random.below(4);
  mlx5_cqe64& cqe = theirs[polled % 8];
  cqe.wqe_counter = htobe16(uint16_t(q.completed + done - 1));
  cqe.sop_drop_qpn = htobe32(u32(random.below(256)) << 24 | q.number);
  const bool failed = random.once_in(4);
  if (failed) reinterpret_cast<mlx5_err_cqe*>(&cqe)->syndrome = 0x13;
  const int lap = (polled / 8) & 1;
  const auto set_owner = [&](int owner) {
    cqe.op_own = uint8_t((failed ? MLX5_CQE_REQ_ERR : MLX5_CQE_REQ) << 4 | owner);
  };
  set_owner(!lap);
  if (mlx5dv_get_cqe_owner(&cqe) == lap || mlx5::poll_cq(bus, q) != mlx5::kPending) return false;
  set_owner(lap);
  const u64 before = q.completed;
  const mlx5::Status status = mlx5::poll_cq(bus, q);
  if (be32toh(seen[0]) != ((polled + 1) & 0xffffff)) return false;
  if (failed) return status == mlx5::kFailed && q.syndrome == 0x13 && q.completed == before;
  return status == mlx5::kOk && q.completed == before + done;
}

}  // namespace

int main() {
  nic_model::Random random{42};
  for (int i = 0; i < 100'000; ++i) {
    if (!check_requests(random)) return std::printf("request %d differs\n", i), 1;
    if (!check_completion(random)) return std::printf("completion %d differs\n", i), 1;
  }
  std::puts("equal");
  return 0;
}
