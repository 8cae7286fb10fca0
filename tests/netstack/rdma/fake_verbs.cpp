// libibverbs.so.1 without a NIC: queue pairs of one process that write into each other's memory at once, and keep to
// what the verbs promise. Keys are of a protection domain, a write that leaves its memory breaks both ends, receives
// are used up, completions wake who has armed the queue. The functions named `fake_` let a test do what hardware does
// now and then.
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>

#undef ibv_query_port
#undef ibv_reg_mr

namespace {

struct Device {
  ibv_device base{};
};

struct Context : ibv_context {
  std::deque<ibv_async_event> events;
};

struct Channel : ibv_comp_channel {
  std::deque<ibv_cq*> rung;
};

struct Queue : ibv_cq {
  std::deque<ibv_wc> done;
  int armed = 0;  // 1: for what is solicited, 2: for all
};

struct Memory : ibv_mr {
  int access;
};

struct Pair : ibv_qp {
  ibv_qp_attr attr{};
  std::deque<std::uint64_t> receives;
  bool is_silent = false;  // its peer's NIC answers nothing
  std::uint32_t flood = 0, floods = 0;  // what its peer sends when there is a receive for it, and how often yet
  bool is_late = false;  // what it has sent completes when the test says so:
  std::deque<ibv_wc> late;
  std::uint32_t words = 0;  // that it has sent
};

std::mutex mutex;
std::map<std::uint32_t, Pair*> pairs;
std::map<std::uint32_t, Memory*> memories;  // by key
std::uint32_t next_number = 16, next_key = 0x100;
int open_domains = 0;
std::size_t most_memories = 1 << 20;
std::mutex pinning;
std::condition_variable pinned;
std::size_t slow_from = SIZE_MAX;  // memories of so many bytes take until the test says otherwise
std::uint32_t slow = 0;  // such, that are being registered
Device device;

Queue* queue_of(ibv_cq* queue) { return static_cast<Queue*>(queue); }
Pair* pair_of(ibv_qp* pair) { return static_cast<Pair*>(pair); }

void complete(ibv_cq* cq, const ibv_wc& done, bool wakes) {
  Queue* queue = queue_of(cq);
  queue->done.push_back(done);
  if (!(queue->armed == 2 || (queue->armed == 1 && (wakes || done.status != IBV_WC_SUCCESS)))) return;
  queue->armed = 0;
  auto* channel = static_cast<Channel*>(queue->channel);
  channel->rung.push_back(queue);
  eventfd_write(channel->fd, 1);
}

void complete(Pair* pair, std::uint64_t id, ibv_wc_status status) {
  ibv_wc done{};
  done.wr_id = id;
  done.status = status;
  done.opcode = IBV_WC_RDMA_WRITE;
  if (pair->is_late)
    pair->late.push_back(done);
  else
    complete(pair->send_cq, done, false);
}

void tell(Pair* pair, ibv_event_type type) {
  auto* context = static_cast<Context*>(pair->context);
  ibv_async_event event{};
  event.event_type = type;
  event.element.qp = pair;
  context->events.push_back(event);
  eventfd_write(context->async_fd, 1);
}

void halt(Pair* pair) {
  if (pair->state == IBV_QPS_ERR) return;
  pair->state = IBV_QPS_ERR;
  for (; !pair->receives.empty(); pair->receives.pop_front())
    complete(pair, pair->receives.front(), IBV_WC_WR_FLUSH_ERR);
}

bool may_write(const Pair* peer, const ibv_send_wr* work, std::uint64_t bytes) {
  const auto at = memories.find(work->wr.rdma.rkey);
  if (at == memories.end()) return false;
  const Memory* memory = at->second;
  const auto start = reinterpret_cast<std::uintptr_t>(memory->addr);
  return memory->pd == peer->pd && memory->access & IBV_ACCESS_REMOTE_WRITE && work->wr.rdma.remote_addr >= start &&
         work->wr.rdma.remote_addr + bytes <= start + memory->length;
}

// The oldest receive is used up.
void hear(Pair* pair, std::uint32_t word, bool wakes) {
  ibv_wc done{};
  done.wr_id = pair->receives.front();
  done.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
  done.imm_data = word;
  pair->receives.pop_front();
  complete(pair->recv_cq, done, wakes);
}

ibv_wc_status deliver(Pair* pair, ibv_send_wr* work) {
  const auto there = pairs.find(pair->attr.dest_qp_num);
  if (there == pairs.end() || there->second->state < IBV_QPS_RTR || there->second->state == IBV_QPS_ERR)
    return IBV_WC_RETRY_EXC_ERR;
  Pair* peer = there->second;
  std::uint64_t bytes = 0;
  for (int i = 0; i < work->num_sge; ++i) {
    const auto own = memories.find(work->sg_list[i].lkey);
    if (own == memories.end() || own->second->pd != pair->pd) return IBV_WC_LOC_PROT_ERR;
    bytes += work->sg_list[i].length;
  }
  if (bytes && !may_write(peer, work, bytes)) {
    tell(peer, IBV_EVENT_QP_ACCESS_ERR);
    halt(peer);
    return IBV_WC_REM_ACCESS_ERR;
  }
  auto* to = reinterpret_cast<std::uint8_t*>(work->wr.rdma.remote_addr);
  for (int i = 0; i < work->num_sge; to += work->sg_list[i++].length)
    std::memcpy(to, reinterpret_cast<void*>(work->sg_list[i].addr), work->sg_list[i].length);
  if (work->opcode != IBV_WR_RDMA_WRITE_WITH_IMM) return IBV_WC_SUCCESS;
  if (peer->receives.empty()) return IBV_WC_RNR_RETRY_EXC_ERR;
  ++pair->words;
  hear(peer, work->imm_data, work->send_flags & IBV_SEND_SOLICITED);
  return IBV_WC_SUCCESS;
}

int post_send(ibv_qp* qp, ibv_send_wr* work, ibv_send_wr**) {
  const std::lock_guard<std::mutex> lock(mutex);
  Pair* pair = pair_of(qp);
  if (pair->state == IBV_QPS_ERR) return complete(pair, work->wr_id, IBV_WC_WR_FLUSH_ERR), 0;
  if (pair->state != IBV_QPS_RTS) return EINVAL;
  if (pair->is_silent) return 0;
  const ibv_wc_status status = deliver(pair, work);
  complete(pair, work->wr_id, status);
  if (status != IBV_WC_SUCCESS) halt(pair);
  return 0;
}

int post_recv(ibv_qp* qp, ibv_recv_wr* work, ibv_recv_wr**) {
  const std::lock_guard<std::mutex> lock(mutex);
  Pair* pair = pair_of(qp);
  if (pair->state == IBV_QPS_ERR)
    complete(pair, work->wr_id, IBV_WC_WR_FLUSH_ERR);
  else
    pair->receives.push_back(work->wr_id);
  if (pair->floods && pair->floods--) hear(pair, htobe32(pair->flood), false);
  return 0;
}

int poll_cq(ibv_cq* cq, int most, ibv_wc* to) {
  const std::lock_guard<std::mutex> lock(mutex);
  auto& done = queue_of(cq)->done;
  int count = 0;
  for (; count < most && !done.empty(); done.pop_front()) to[count++] = done.front();
  return count;
}

int req_notify_cq(ibv_cq* cq, int solicited_only) {
  const std::lock_guard<std::mutex> lock(mutex);
  queue_of(cq)->armed = std::max(queue_of(cq)->armed, solicited_only ? 1 : 2);
  return 0;
}

template <class T>
T* none(int error) {
  errno = error;
  return nullptr;
}

std::atomic<int> mtus[2] = {IBV_MTU_4096, IBV_MTU_4096};
std::atomic<unsigned> asked{0};
std::atomic<int> granted{0};  // of ibv_access_flags: all that a memory or a queue pair was ever opened for

}  // namespace

extern "C" {

ibv_device** ibv_get_device_list(int* count) {
  static ibv_device* list[] = {&device.base, nullptr};
  *count = 1;
  return list;
}
void ibv_free_device_list(ibv_device**) {}
const char* ibv_get_device_name(ibv_device*) { return "fake0"; }

ibv_context* ibv_open_device(ibv_device* of) {
  auto* context = new Context{};
  context->device = of;
  context->ops.poll_cq = poll_cq;
  context->ops.req_notify_cq = req_notify_cq;
  context->ops.post_send = post_send;
  context->ops.post_recv = post_recv;
  context->async_fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
  return context;
}
int ibv_close_device(ibv_context* context) {
  close(context->async_fd);
  delete static_cast<Context*>(context);
  return 0;
}

int ibv_query_port(ibv_context*, std::uint8_t number, _compat_ibv_port_attr* to) {
  if (number != 1) return EINVAL;
  auto* attr = reinterpret_cast<ibv_port_attr*>(to);
  attr->state = IBV_PORT_ACTIVE;
  attr->active_mtu = static_cast<ibv_mtu>(mtus[asked++ % 2].load());
  attr->max_msg_sz = 1u << 30;
  return 0;
}
int ibv_query_gid(ibv_context*, std::uint8_t, int index, ibv_gid* gid) {
  if (index > 1) return -1;
  gid->raw[0] = 0xfe, gid->raw[1] = 0x80, gid->raw[15] = std::uint8_t(index + 1);
  return 0;
}

ibv_pd* ibv_alloc_pd(ibv_context* context) {
  const std::lock_guard<std::mutex> lock(mutex);
  ++open_domains;
  return new ibv_pd{context, 0};
}
int ibv_dealloc_pd(ibv_pd* domain) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (const auto& [key, memory] : memories)
    if (memory->pd == domain) return EBUSY;
  --open_domains;
  delete domain;
  return 0;
}

ibv_mr* ibv_reg_mr(ibv_pd* domain, void* address, std::size_t bytes, int access) {
  {
    std::unique_lock<std::mutex> lock(pinning);
    ++slow;
    pinned.wait(lock, [bytes] { return bytes < slow_from; });
    --slow;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  if (memories.size() >= most_memories) return none<ibv_mr>(ENOMEM);
  auto* memory = new Memory{};
  memory->context = domain->context, memory->pd = domain, memory->addr = address, memory->length = bytes;
  memory->lkey = memory->rkey = next_key++;
  memory->access = access;
  granted |= access;
  memories[memory->rkey] = memory;
  return memory;
}
int ibv_dereg_mr(ibv_mr* mr) {
  const std::lock_guard<std::mutex> lock(mutex);
  memories.erase(mr->rkey);
  delete static_cast<Memory*>(mr);
  return 0;
}

ibv_comp_channel* ibv_create_comp_channel(ibv_context* context) {
  auto* channel = new Channel{};
  channel->context = context;
  channel->fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
  return channel;
}
int ibv_destroy_comp_channel(ibv_comp_channel* channel) {
  close(channel->fd);
  delete static_cast<Channel*>(channel);
  return 0;
}

ibv_cq* ibv_create_cq(ibv_context* context, int entries, void*, ibv_comp_channel* channel, int) {
  auto* queue = new Queue{};
  queue->context = context, queue->channel = channel, queue->cqe = entries;
  return queue;
}
int ibv_destroy_cq(ibv_cq* cq) {
  delete queue_of(cq);
  return 0;
}
int ibv_get_cq_event(ibv_comp_channel* of, ibv_cq** cq, void** context) {
  eventfd_t rings;
  if (eventfd_read(of->fd, &rings)) return -1;
  const std::lock_guard<std::mutex> lock(mutex);
  auto& rung = static_cast<Channel*>(of)->rung;
  *cq = rung.front(), *context = nullptr;
  rung.pop_front();
  return 0;
}
void ibv_ack_cq_events(ibv_cq*, unsigned) {}

ibv_qp* ibv_create_qp(ibv_pd* domain, ibv_qp_init_attr* wanted) {
  const std::lock_guard<std::mutex> lock(mutex);
  auto* pair = new Pair{};
  pair->context = domain->context, pair->pd = domain;
  pair->send_cq = wanted->send_cq, pair->recv_cq = wanted->recv_cq;
  pair->qp_num = next_number++;
  pairs[pair->qp_num] = pair;
  return pair;
}
int ibv_modify_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask) {
  const std::lock_guard<std::mutex> lock(mutex);
  Pair* pair = pair_of(qp);
  if (attr->qp_state == IBV_QPS_ERR) return halt(pair), 0;
  if (attr->qp_state != pair->state + 1) return EINVAL;
  pair->state = attr->qp_state;
  if (mask & IBV_QP_ACCESS_FLAGS) granted |= attr->qp_access_flags;
  if (mask & IBV_QP_PKEY_INDEX) pair->attr.pkey_index = attr->pkey_index;
  if (mask & IBV_QP_AV) pair->attr.ah_attr = attr->ah_attr;
  if (mask & IBV_QP_DEST_QPN) pair->attr.dest_qp_num = attr->dest_qp_num;
  if (mask & IBV_QP_PATH_MTU) pair->attr.path_mtu = attr->path_mtu;
  if (mask & IBV_QP_TIMEOUT) pair->attr.timeout = attr->timeout;
  if (mask & IBV_QP_RETRY_CNT) pair->attr.retry_cnt = attr->retry_cnt;
  if (mask & IBV_QP_RNR_RETRY) pair->attr.rnr_retry = attr->rnr_retry;
  return 0;
}
int ibv_destroy_qp(ibv_qp* qp) {
  const std::lock_guard<std::mutex> lock(mutex);
  pairs.erase(qp->qp_num);
  delete pair_of(qp);
  return 0;
}

int ibv_get_async_event(ibv_context* of, ibv_async_event* event) {
  eventfd_t rings;
  if (eventfd_read(of->async_fd, &rings)) return -1;
  const std::lock_guard<std::mutex> lock(mutex);
  auto& events = static_cast<Context*>(of)->events;
  *event = events.front();
  events.pop_front();
  return 0;
}
void ibv_ack_async_event(ibv_async_event*) {}
const char* ibv_event_type_str(ibv_event_type type) {
  return type == IBV_EVENT_QP_FATAL ? "local work queue catastrophic error" : "another event";
}

// That whose protection domain has memory there; 0 if there is none.
std::uint32_t fake_pair(std::uint64_t address) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (const auto& [number, pair] : pairs)
    for (const auto& [key, memory] : memories) {
      const auto start = reinterpret_cast<std::uintptr_t>(memory->addr);
      if (memory->pd == pair->pd && address >= start && address < start + memory->length) return number;
    }
  return 0;
}
// Of ports that are asked in turns, by ibv_mtu.
void fake_mtus(int one, int other) { mtus[0] = one, mtus[1] = other, asked = 0; }
// (service level, traffic class, GID index, pkey index, timeout, retries, retries where no receive is posted, MTU).
void fake_attributes(std::uint32_t number, std::uint32_t to[8]) {
  const std::lock_guard<std::mutex> lock(mutex);
  const ibv_qp_attr& a = pairs.at(number)->attr;
  const std::uint32_t all[] = {
      a.ah_attr.sl, a.ah_attr.grh.traffic_class, a.ah_attr.grh.sgid_index, a.pkey_index, a.timeout, a.retry_cnt,
      a.rnr_retry,  std::uint32_t(a.path_mtu)};
  std::memcpy(to, all, sizeof all);
}
void fake_event(std::uint32_t number, int type) {
  const std::lock_guard<std::mutex> lock(mutex);
  tell(pairs.at(number), static_cast<ibv_event_type>(type));
}
void fake_silence(std::uint32_t number) {
  const std::lock_guard<std::mutex> lock(mutex);
  pairs.at(number)->is_silent = true;
}
// The peer of `number` gets `word` as often as it has posted receives, and so often when it posts another one; what is
// left of these.
void fake_flood(std::uint32_t number, std::uint32_t word, std::uint32_t often) {
  const std::lock_guard<std::mutex> lock(mutex);
  Pair* peer = pairs.at(pairs.at(number)->attr.dest_qp_num);
  peer->flood = word, peer->floods = often;
  while (!peer->receives.empty()) hear(peer, htobe32(word), false);
}
std::uint32_t fake_words(std::uint32_t number) {
  const std::lock_guard<std::mutex> lock(mutex);
  return pairs.at(number)->words;
}
std::uint32_t fake_floods(std::uint32_t number) {
  const std::lock_guard<std::mutex> lock(mutex);
  return pairs.at(pairs.at(number)->attr.dest_qp_num)->floods;
}
int fake_granted() { return granted; }
void fake_late(std::uint32_t number, bool is_late) {
  const std::lock_guard<std::mutex> lock(mutex);
  Pair* pair = pairs.at(number);
  pair->is_late = is_late;
  for (; !is_late && !pair->late.empty(); pair->late.pop_front()) complete(pair->send_cq, pair->late.front(), false);
}
void fake_most_memories(std::size_t most) { most_memories = most; }
void fake_slow_from(std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(pinning);
  slow_from = bytes;
  pinned.notify_all();
}
std::uint32_t fake_slow() {
  const std::lock_guard<std::mutex> lock(pinning);
  return slow;
}
// Everything that is open: protection domains, memories, queue pairs.
void fake_open(std::uint32_t to[3]) {
  const std::lock_guard<std::mutex> lock(mutex);
  to[0] = std::uint32_t(open_domains), to[1] = std::uint32_t(memories.size()), to[2] = std::uint32_t(pairs.size());
}
// Posts for `number` what a liar would: `bytes` to any (key, address), with `word` where that is not negative.
void fake_write(std::uint32_t number, std::uint32_t key, std::uint64_t address, void* data, std::uint32_t bytes,
                std::int64_t word) {
  Pair* pair = pairs.at(number);
  ibv_mr* own = ibv_reg_mr(pair->pd, data, bytes, 0);
  ibv_sge piece{reinterpret_cast<std::uintptr_t>(data), bytes, own->lkey};
  ibv_send_wr work{}, *bad;
  work.wr_id = 4;  // of a piece, which is not counted
  work.sg_list = &piece, work.num_sge = bytes ? 1 : 0;
  work.opcode = word < 0 ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_WRITE_WITH_IMM;
  work.send_flags = IBV_SEND_SOLICITED;
  work.imm_data = htobe32(std::uint32_t(word));
  work.wr.rdma.rkey = key, work.wr.rdma.remote_addr = address;
  post_send(pair, &work, &bad);
  ibv_dereg_mr(own);
}
// (key, address, bytes) of the memory that the peer of `number` may be written to at, and how much of such it has.
void fake_inbox(std::uint32_t number, std::uint64_t to[4]) {
  const std::lock_guard<std::mutex> lock(mutex);
  const Pair* peer = pairs.at(pairs.at(number)->attr.dest_qp_num);
  to[3] = 0;
  for (const auto& [key, memory] : memories)
    if (memory->pd == peer->pd && memory->access & IBV_ACCESS_REMOTE_WRITE)
      to[0] = key, to[1] = reinterpret_cast<std::uintptr_t>(memory->addr), to[2] = memory->length, ++to[3];
}

}  // extern "C"
