// The kernel's part of mlx5_0, for a process that has this library preloaded. It answers the commands that libmlx5
// writes to its device, and runs a software NIC on the memory that libmlx5 names in them. So the distribution's own
// libibverbs and libmlx5 build rings, records and completion queues, map doorbells, post and poll, without a card.
//
// What a host keeps in files is in the folder that SYSFS_PATH names, and who looks for it in /sys finds it there. Every
// ioctl but one is answered as by a kernel without it, and libibverbs goes on with writes. With FAKE_MLX5_HAS_FIRMWARE
// set, the commands to the NIC's firmware (DEVX) are answered too. Queue pairs of this process are each other's peers;
// those of other processes are too, where their memory was exported. The functions named `fake_mlx5_` let a test move
// the NICs and spoil what they do; with FAKE_MLX5_SERVES set they move by themselves.
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <rdma/ib_user_ioctl_cmds.h>
#include <rdma/ib_user_verbs.h>
#include <rdma/mlx5-abi.h>
#include <rdma/mlx5_user_ioctl_cmds.h>
#include <rdma/rdma_user_ioctl_cmds.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "soft_nic/nic.h"

using namespace lamina::nic_model;

namespace {

constexpr const char* kNode = "/dev/infiniband/uverbs0";
constexpr const char* kBehind = "/dev/zero";  // a character device whose shared mappings are plain memory
constexpr std::uint32_t kPage = 4096, kRegisters = 0x800, kRegisterBytes = 512, kBanks = 16;
constexpr std::uint32_t kAccessRemoteWrite = 2, kEvents = 7;  // the number of the queue of events
enum { kInit = 1, kReadyToReceive, kReadyToSend, kError = 6 };  // of ib_qp_state

struct CompletionQueue {
  std::uint8_t* ring;
  const std::uint32_t* seen;
  std::uint32_t entries;
  std::uint64_t user_handle = 0;
  std::uint32_t told = 0;
};

constexpr std::uint32_t kFirstPage = 0x40;  // of doorbells that are asked for one by one
constexpr std::uint8_t kStation[6] = {2, 0, 0, 0, 0, 1};  // the Ethernet address of every peer
constexpr std::uint16_t kLid = 7;  // that of InfiniBand

// An open file of the device.
struct Node {
  int events = -1;  // the process's end of their pipe
  std::map<std::uint32_t, std::uint8_t*> pages;  // of doorbells, by number
  std::uint32_t next_bank = 1, next_page = kFirstPage;
};

struct Registered {
  std::uint32_t domain;
  MemoryRegion region;
  int file;  // what it was exported by; -1: nothing
};

// As the kernel or the firmware was given it.
struct Path {
  std::uint32_t service_level, traffic_class, gid_index, pkey_index, timeout, retries, access;
};

struct Pair {
  int events;  // the kernel's end
  Path path{};
  std::uint32_t told = 0;
  std::uint64_t user_handle;
  std::uint32_t domain, peer = 0, queue;
  const std::uint8_t* registers;
  std::vector<MemoryRegion> beyond;  // what a peer of another process has open
  std::uint64_t rung[2] = {};
  std::map<std::uint32_t, std::pair<int, std::uint64_t>> wanted;  // event of the firmware -> where to tell it, as what
  Setup setup;
  std::unique_ptr<Nic> nic;
};

std::mutex mutex;
std::map<int, Node> nodes;
std::map<std::uint32_t, CompletionQueue> queues;
std::map<std::uint32_t, std::unique_ptr<Pair>> pairs;  // by number
std::map<std::uint32_t, Registered> memories;  // by handle
std::map<int, int> events;  // the process's end of a pipe, the kernel's
int exports = 0;  // memories that were registered by dma-buf
std::uint32_t granted = 0;  // of ibv_access_flags: all that a memory was ever open for
std::uint32_t next_handle = 1;
Adversary adversary{};
bool is_deaf = false;
std::map<int, std::uint64_t> buffers;  // where the memory of a dma-buf begins
std::map<std::uint32_t, std::uint64_t> ring_memories;  // that the firmware knows, by number

template <class T>
T* at(std::uint64_t address) {
  return reinterpret_cast<T*>(std::uintptr_t(address));
}

bool is_infiniband() { return std::getenv("FAKE_MLX5_IS_INFINIBAND"); }
bool has_firmware() { return std::getenv("FAKE_MLX5_HAS_FIRMWARE"); }

// A command as it was written: what follows its header, and where its answer goes.
struct Command {
  int node;
  const std::uint8_t* body;
  std::uint8_t* answer;
  std::size_t room;

  template <class T>
  const T& as() const {
    return *reinterpret_cast<const T*>(body);
  }
  template <class Core, class Driver>
  const Driver& driver() const {
    return *reinterpret_cast<const Driver*>(body + sizeof(Core));
  }
  template <class T>
  void put(const T& value, std::size_t behind = 0) const {
    if (behind < room) std::memcpy(answer + behind, &value, std::min(sizeof value, room - behind));
  }
};

// Of what the device says of itself: the kernel's end, and the process's.
int make_events() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC)) return -1;
  events[ends[0]] = ends[1];
  return ends[0];
}

int get_context(const Command& c) {
  ib_uverbs_get_context_resp core{};
  core.async_fd = std::uint32_t(nodes.at(c.node).events = make_events());
  core.num_comp_vectors = 1;
  mlx5_ib_alloc_ucontext_resp mine{};
  mine.qp_tab_size = 1 << 17;
  mine.bf_reg_size = kRegisterBytes;
  mine.tot_bfregs = has_firmware() ? 0 : kBanks;
  mine.cmds_supp_uhw = has_firmware() ? MLX5_USER_CMDS_SUPP_UHW_CREATE_AH : 0;
  mine.cache_line_size = 64;
  mine.max_sq_desc_sz = mine.max_rq_desc_sz = 1024;
  mine.max_send_wqebb = mine.max_recv_wr = mine.max_srq_recv_wr = 1 << 15;
  mine.num_ports = 1;
  mine.cqe_version = 1;
  mine.log_uar_size = 12;
  mine.num_uars_per_page = 1;
  mine.response_length = sizeof mine;
  c.put(core);
  c.put(mine, sizeof core);
  return 0;
}

int query_port(const Command& c) {
  if (c.as<ib_uverbs_query_port>().port_num != 1) return EINVAL;
  ib_uverbs_query_port_resp port{};
  port.max_msg_sz = 1u << 30;
  port.gid_tbl_len = port.pkey_tbl_len = 1;
  port.state = 4;
  const char* const packets = std::getenv("FAKE_MLX5_PACKETS");  // of ibv_mtu
  port.max_mtu = 5;
  port.active_mtu = std::uint8_t(packets ? std::atoi(packets) : 5);
  port.link_layer = is_infiniband() ? 1 : 2;
  port.lid = is_infiniband() ? kLid : 0;
  c.put(port);
  return 0;
}

// No other process has it.
std::uint32_t number_of(std::uint32_t handle, int bits) {
  return (std::uint32_t(getpid()) << 12 | (handle & 0xfff)) & std::uint32_t((1ull << bits) - 1);
}

// Where processes tell each other of the memory that queue pair `number` opens.
std::string page_of(std::uint32_t number) {
  const std::string folder = std::string(std::getenv("SYSFS_PATH")) + "/pairs/";
  mkdir(folder.c_str(), 0700);
  return folder + std::to_string(number);
}

void tell_others(std::uint32_t number, std::uint32_t domain) {
  std::FILE* const page = std::fopen(page_of(number).c_str(), "w");
  for (const auto& [handle, m] : memories)
    if (m.domain == domain && m.region.remote_write && m.file >= 0)
      std::fprintf(page, "%d %d %u %lu %lu\n", getpid(), m.file, m.region.key, m.region.address, m.region.bytes);
  std::fclose(page);
}

std::vector<MemoryRegion> heard_of_others(std::uint32_t number) {
  std::vector<MemoryRegion> open;
  std::FILE* const page = std::fopen(page_of(number).c_str(), "r");
  int process, file;
  MemoryRegion region{};
  region.remote_write = true;
  while (page &&
         std::fscanf(page, "%d %d %u %lu %lu", &process, &file, &region.key, &region.address, &region.bytes) == 5) {
    const std::string name = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(file);
    const int there = openat(AT_FDCWD, name.c_str(), O_RDWR | O_CLOEXEC);
    region.at = reinterpret_cast<std::uint8_t*>(
        syscall(SYS_mmap, nullptr, region.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, there, 0));
    syscall(SYS_close, there);
    if (region.at != MAP_FAILED) open.push_back(region);
  }
  if (page) std::fclose(page);
  return open;
}

std::uint32_t remember(std::uint32_t domain, std::uint64_t address, std::uint64_t bytes, std::uint8_t* place,
                       std::uint32_t access, int file) {
  const std::uint32_t handle = next_handle++, key = number_of(handle, 32);
  granted |= access;
  memories[handle] = {domain, {key, address, bytes, place, (access & kAccessRemoteWrite) != 0, nullptr}, file};
  return handle;
}

int register_memory(const Command& c) {
  if (std::getenv("FAKE_MLX5_KNOWS_NO_GPU")) return EFAULT;
  const auto& asked = c.as<ib_uverbs_reg_mr>();
  const std::uint32_t handle =
      remember(asked.pd_handle, asked.hca_va, asked.length, at<std::uint8_t>(asked.start), asked.access_flags, -1);
  const std::uint32_t key = memories[handle].region.key;
  c.put(ib_uverbs_reg_mr_resp{handle, key, key});
  return 0;
}

int create_queue(const Command& c, std::uint32_t entries, std::uint64_t user_handle, const mlx5_ib_create_cq& mine,
                 std::size_t core_bytes) {
  if (std::getenv("FAKE_MLX5_LOCKS_NOTHING")) return ENOMEM;
  const std::uint32_t handle = next_handle++;
  queues[handle] = {at<std::uint8_t>(mine.buf_addr), at<std::uint32_t>(mine.db_addr), entries + 1, user_handle};
  if (mine.cqe_size != 64) return EINVAL;
  ib_uverbs_create_cq_resp core{};
  core.cq_handle = handle, core.cqe = entries;
  c.put(core);
  c.put(mlx5_ib_create_cq_resp{handle, 0}, core_bytes);
  return 0;
}

int create_pair(const Command& c) {
  const auto& asked = c.as<ib_uverbs_create_qp>();
  const auto& mine = c.driver<ib_uverbs_create_qp, mlx5_ib_create_qp>();
  const CompletionQueue& queue = queues.at(asked.send_cq_handle);
  const std::uint32_t number = number_of(next_handle++, 24);
  Node& node = nodes.at(c.node);
  const std::uint32_t bank = node.next_bank++;
  auto pair = std::make_unique<Pair>();
  pair->domain = asked.pd_handle, pair->queue = asked.send_cq_handle;
  pair->events = events.at(node.events);
  pair->user_handle = asked.user_handle;
  if (mine.flags & MLX5_QP_FLAG_UAR_PAGE_INDEX)
    pair->registers = node.pages.at(mine.bfreg_index) + kRegisters;
  else
    pair->registers = node.pages.at(bank / 4) + kRegisters + bank % 4 * kRegisterBytes;
  // The receive queue lies first.
  const auto* ring = at<std::uint8_t>(mine.buf_addr) + (std::uint64_t(mine.rq_wqe_count) << mine.rq_wqe_shift);
  pair->setup = {ring,
                 at<std::uint32_t>(mine.db_addr),
                 queue.ring,
                 queue.seen,
                 number,
                 mine.sq_wqe_count,
                 queue.entries,
                 kRegisterBytes / 2,
                 0,
                 0,
                 nullptr,
                 true,
                 mine.uidx};
  pair->nic = std::make_unique<Nic>(pair->setup, adversary, number);
  pair->nic->peer_gone = is_deaf;
  pairs[number] = std::move(pair);
  ib_uverbs_create_qp_resp core{};
  core.qp_handle = core.qpn = number;
  core.max_send_wr = asked.max_send_wr, core.max_recv_wr = asked.max_recv_wr;
  core.max_send_sge = asked.max_send_sge, core.max_recv_sge = asked.max_recv_sge;
  core.max_inline_data = asked.max_inline_data;
  mlx5_ib_create_qp_resp answer{};
  answer.bfreg_index = bank;
  c.put(core);
  c.put(answer, sizeof core);
  return 0;
}

int move_pair(std::uint32_t number, std::uint32_t state, std::uint32_t peer) {
  Pair& pair = *pairs.at(number);
  if (state == kInit) tell_others(number, pair.domain);
  if (state == kReadyToReceive) pair.peer = peer;
  if (state == kReadyToReceive && !pairs.count(pair.peer)) pair.beyond = heard_of_others(pair.peer);
  return pair.nic->modify(state == kError ? State::error : State(state)) ? 0 : EINVAL;
}

int modify_pair(const Command& c) {
  const auto& asked = c.as<ib_uverbs_modify_qp>();
  const ib_uverbs_qp_dest& to = asked.dest;
  Path& path = pairs.at(asked.qp_handle)->path;
  if (asked.qp_state == kInit) path.pkey_index = asked.pkey_index, path.access = asked.qp_access_flags;
  if (asked.qp_state == kReadyToReceive) {
    path.service_level = to.sl, path.traffic_class = to.traffic_class, path.gid_index = to.sgid_index;
    if (!to.is_global || (is_infiniband() && to.dlid != kLid)) return EINVAL;
  }
  if (asked.qp_state == kReadyToSend) path.timeout = asked.timeout, path.retries = asked.retry_cnt;
  return move_pair(asked.qp_handle, asked.qp_state, asked.dest_qp_num);
}

void forget_pair(std::uint32_t number) {
  for (const MemoryRegion& m : pairs.at(number)->beyond) munmap(m.at, m.bytes);
  pairs.erase(number);
}

// 0, or an error number.
int answer(std::uint32_t command, bool is_extended, const Command& c) {
  if (is_extended && command == IB_USER_VERBS_CMD_CREATE_CQ)
    return create_queue(c, c.as<ib_uverbs_ex_create_cq>().cqe, c.as<ib_uverbs_ex_create_cq>().user_handle,
                        c.driver<ib_uverbs_ex_create_cq, mlx5_ib_create_cq>(), sizeof(ib_uverbs_ex_create_cq_resp));
  if (is_extended) return EOPNOTSUPP;
  switch (command) {
    case IB_USER_VERBS_CMD_GET_CONTEXT: return get_context(c);
    case IB_USER_VERBS_CMD_QUERY_DEVICE: {
      ib_uverbs_query_device_resp device{};
      device.vendor_id = 0x15b3, device.vendor_part_id = 4129, device.phys_port_cnt = 1;
      device.max_qp = device.max_cq = 1 << 17, device.max_qp_wr = device.max_cqe = 1 << 15, device.max_sge = 30;
      c.put(device);
      return 0;
    }
    case IB_USER_VERBS_CMD_QUERY_PORT: return query_port(c);
    case IB_USER_VERBS_CMD_ALLOC_PD:
      c.put(ib_uverbs_alloc_pd_resp{next_handle});
      c.put(mlx5_ib_alloc_pd_resp{next_handle++}, sizeof(ib_uverbs_alloc_pd_resp));
      return 0;
    case IB_USER_VERBS_CMD_DEALLOC_PD: return 0;
    case IB_USER_VERBS_CMD_REG_MR: return register_memory(c);
    case IB_USER_VERBS_CMD_DEREG_MR: {
      const auto memory = memories.find(c.as<ib_uverbs_dereg_mr>().mr_handle);
      if (memory->second.file >= 0) syscall(SYS_close, memory->second.file);
      memories.erase(memory);
      return 0;
    }
    case IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL:
      c.put(ib_uverbs_create_comp_channel_resp{std::uint32_t(eventfd(0, EFD_CLOEXEC))});
      return 0;
    case IB_USER_VERBS_CMD_CREATE_CQ:
      return create_queue(c, c.as<ib_uverbs_create_cq>().cqe, c.as<ib_uverbs_create_cq>().user_handle,
                          c.driver<ib_uverbs_create_cq, mlx5_ib_create_cq>(), sizeof(ib_uverbs_create_cq_resp));
    case IB_USER_VERBS_CMD_DESTROY_CQ: {
      const auto queue = queues.find(c.as<ib_uverbs_destroy_cq>().cq_handle);
      c.put(ib_uverbs_destroy_cq_resp{0, queue->second.told});
      queues.erase(queue);
      return 0;
    }
    case IB_USER_VERBS_CMD_CREATE_QP: return create_pair(c);
    case IB_USER_VERBS_CMD_MODIFY_QP: return modify_pair(c);
    case IB_USER_VERBS_CMD_DESTROY_QP: {
      const std::uint32_t number = c.as<ib_uverbs_destroy_qp>().qp_handle;
      c.put(ib_uverbs_destroy_qp_resp{pairs.at(number)->told});
      forget_pair(number);
      return 0;
    }
    case IB_USER_VERBS_CMD_CREATE_AH: {
      mlx5_ib_create_ah_resp there{};
      there.response_length = sizeof there;
      std::memcpy(there.dmac, kStation, sizeof kStation);
      c.put(ib_uverbs_create_ah_resp{next_handle++});
      c.put(there, sizeof(ib_uverbs_create_ah_resp));
      return 0;
    }
    case IB_USER_VERBS_CMD_DESTROY_AH: return 0;
    default: return EOPNOTSUPP;
  }
}

int take_command(int node, const void* text, std::size_t bytes) {
  const auto* header = static_cast<const ib_uverbs_cmd_hdr*>(text);
  const auto* body = static_cast<const std::uint8_t*>(text) + sizeof *header;
  const bool is_extended = header->command & IB_USER_VERBS_CMD_FLAG_EXTENDED;
  std::uint64_t to = 0;  // some have no answer
  if (bytes >= sizeof *header + sizeof to) std::memcpy(&to, body, sizeof to);
  std::size_t room = header->out_words * 4u;
  if (is_extended) {
    room = 8u * (header->out_words + reinterpret_cast<const ib_uverbs_ex_cmd_hdr*>(body)->provider_out_words);
    body += sizeof(ib_uverbs_ex_cmd_hdr);
  }
  const std::lock_guard<std::mutex> lock(mutex);
  return answer(header->command & IB_USER_VERBS_CMD_COMMAND_MASK, is_extended,
                {node, body, at<std::uint8_t>(to), room});
}

// What an ioctl brings, by name.
std::map<int, ib_uverbs_attr*> attributes(ib_uverbs_ioctl_hdr* header) {
  std::map<int, ib_uverbs_attr*> attrs;
  for (int i = 0; i < header->num_attrs; ++i) attrs[header->attrs[i].attr_id] = &header->attrs[i];
  return attrs;
}

// The firmware, by the manual's layout of its commands: so many bits from there on.
std::uint64_t bits(const std::uint8_t* command, unsigned from, unsigned count) {
  std::uint64_t value = 0;
  for (unsigned i = from; i < from + count; ++i) value = value << 1 | (command[i / 8] >> (7 - i % 8) & 1);
  return value;
}

void answer_with(std::uint8_t* to, std::uint32_t number) {
  for (int i = 0; i < 4; ++i) to[8 + i] = std::uint8_t(number >> (24 - 8 * i));
}

// CREATE_CQ or CREATE_QP; the handle, 0 if it refuses.
std::uint32_t firmware_makes(int node, const std::uint8_t* c) {
  const bool is_queue = bits(c, 0, 16) == 0x400;
  const auto memory = ring_memories.find(std::uint32_t(is_queue ? bits(c, 704, 32) : bits(c, 2112, 32)));
  if (memory == ring_memories.end() || bits(c, 16, 48)) return 0;
  auto* const base = at<std::uint8_t>(memory->second);
  const std::uint32_t handle = next_handle++;
  if (is_queue) {
    if (!bits(c, 736, 1) || !bits(c, 134, 1) || bits(c, 160, 32) != memory->first || bits(c, 312, 8) != kEvents)
      return 0;
    queues[handle] = {base + bits(c, 640, 64), reinterpret_cast<std::uint32_t*>(base + bits(c, 576, 64)),
                      1u << bits(c, 227, 5)};
    return handle;
  }
  const auto queue = queues.find(std::uint32_t(bits(c, 1192, 24)));
  const bool is_sound = bits(c, 0, 16) == 0x500 && bits(c, 200, 8) == 0 && bits(c, 211, 2) == 3 && bits(c, 2144, 1) &&
                        bits(c, 1859, 1) && bits(c, 2016, 32) == memory->first && bits(c, 1573, 3) == 3 &&
                        bits(c, 1448, 24) == bits(c, 1192, 24) && queue != queues.end();
  if (!is_sound) return 0;
  const std::uint32_t number = number_of(handle, 24);
  auto pair = std::make_unique<Pair>();
  Node& file = nodes.at(node);
  pair->domain = std::uint32_t(bits(c, 232, 24)), pair->queue = queue->first;
  pair->events = events.at(file.events);
  pair->user_handle = 0;
  pair->registers = file.pages.at(std::uint32_t(bits(c, 296, 24))) + kRegisters;
  pair->setup = {base + bits(c, 2048, 64),
                 reinterpret_cast<std::uint32_t*>(base + bits(c, 1472, 64)),
                 queue->second.ring,
                 queue->second.seen,
                 number,
                 1u << bits(c, 273, 4),
                 queue->second.entries,
                 0,
                 0,
                 0,
                 nullptr,
                 true,
                 0};
  pair->nic = std::make_unique<Nic>(pair->setup, adversary, number);
  pair->nic->peer_gone = is_deaf;
  pairs[number] = std::move(pair);
  return number;
}

// How long the operator has a queue pair wait for an acknowledgement.
std::uint64_t patience() {
  const char* const told = std::getenv("LAMINA_RDMA_TIMEOUT");
  return told ? std::uint64_t(std::atoi(told)) : 14;
}

// A change of state, of a path that leads to a peer.
int firmware_changes(const std::uint8_t* c) {
  const std::uint32_t number = std::uint32_t(bits(c, 72, 24));
  if (!pairs.count(number)) return EINVAL;
  Path& path = pairs.at(number)->path;
  const auto u = [&](unsigned first, unsigned count) { return std::uint32_t(bits(c, first, count)); };
  switch (bits(c, 0, 16)) {
    case 0x502:
      path.pkey_index = u(400, 16), path.access = 4 * u(1360, 1) + 2 * u(1361, 1) + 8 * u(1362, 1);
      return u(1361, 1) && u(680, 8) == 1 ? move_pair(number, kInit, 0) : EREMOTEIO;
    case 0x503: {
      path.traffic_class = u(484, 8), path.gid_index = u(456, 8);
      path.service_level = is_infiniband() ? u(676, 4) : u(673, 3);
      const bool by_lid = u(424, 1) && u(432, 16) == kLid;
      const bool by_station = !std::memcmp(c + 688 / 8, kStation, sizeof kStation) && u(656, 16) >= 0xc000 &&
                              u(650, 6) == path.traffic_class >> 2;
      const bool leads = (is_infiniband() ? by_lid : by_station) && u(400, 16) == path.pkey_index && u(680, 8) == 1 &&
                         u(472, 8) && u(256, 3) && u(512, 8) == 0xfe;
      return leads ? move_pair(number, kReadyToReceive, u(360, 24)) : EREMOTEIO;
    }
    case 0x504:
      path.timeout = u(448, 5), path.retries = u(1101, 3);
      return path.timeout == std::uint32_t(patience()) && path.retries ? move_pair(number, kReadyToSend, 0) : EREMOTEIO;
    case 0x507: return move_pair(number, kError, 0);
    default: return EINVAL;
  }
}

int firmware_call(int node, ib_uverbs_ioctl_hdr* header) {
  const auto attrs = attributes(header);
  const auto number = [&](int name) { return std::uint64_t(attrs.at(name)->data); };
  const auto put = [&](int name, std::uint64_t value) {
    std::memcpy(at<void>(number(name)), &value, std::min<std::size_t>(attrs.at(name)->len, sizeof value));
  };
  const std::lock_guard<std::mutex> lock(mutex);
  const auto is = [&](int object, int method) { return header->object_id == object && header->method_id == method; };
  if (is(MLX5_IB_OBJECT_UAR, MLX5_IB_METHOD_UAR_OBJ_ALLOC)) {
    const std::uint32_t page = nodes.at(node).next_page++;
    put(MLX5_IB_ATTR_UAR_OBJ_ALLOC_MMAP_OFFSET, page * std::uint64_t(kPage));
    put(MLX5_IB_ATTR_UAR_OBJ_ALLOC_MMAP_LENGTH, kPage);
    put(MLX5_IB_ATTR_UAR_OBJ_ALLOC_PAGE_ID, page);
    attrs.at(MLX5_IB_ATTR_UAR_OBJ_ALLOC_HANDLE)->data = page;
    return 0;
  }
  if (is(MLX5_IB_OBJECT_UAR, MLX5_IB_METHOD_UAR_OBJ_DESTROY)) return 0;
  if (is(MLX5_IB_OBJECT_DEVX, MLX5_IB_METHOD_DEVX_QUERY_EQN))
    return put(MLX5_IB_ATTR_DEVX_QUERY_EQN_DEV_EQN, kEvents), 0;
  if (is(MLX5_IB_OBJECT_DEVX_UMEM, MLX5_IB_METHOD_DEVX_UMEM_REG)) {
    const auto buffer = buffers.find(int(number(MLX5_IB_ATTR_DEVX_UMEM_REG_DMABUF_FD)));
    if (std::getenv("FAKE_MLX5_TAKES_NO_EXPORT") || number(MLX5_IB_ATTR_DEVX_UMEM_REG_ADDR)) return EOPNOTSUPP;
    if (buffer == buffers.end()) return EBADF;
    const std::uint32_t handle = next_handle++;
    ring_memories[handle] = buffer->second;
    put(MLX5_IB_ATTR_DEVX_UMEM_REG_OUT_ID, handle);
    attrs.at(MLX5_IB_ATTR_DEVX_UMEM_REG_HANDLE)->data = handle;
    return 0;
  }
  if (is(MLX5_IB_OBJECT_DEVX_UMEM, MLX5_IB_METHOD_DEVX_UMEM_DEREG))
    return ring_memories.erase(std::uint32_t(number(MLX5_IB_ATTR_DEVX_UMEM_DEREG_HANDLE))) ? 0 : EINVAL;
  if (is(MLX5_IB_OBJECT_DEVX_OBJ, MLX5_IB_METHOD_DEVX_OBJ_CREATE)) {
    if (std::getenv("FAKE_MLX5_LOCKS_NOTHING")) return ENOMEM;
    const std::uint32_t handle = firmware_makes(node, at<std::uint8_t>(number(MLX5_IB_ATTR_DEVX_OBJ_CREATE_CMD_IN)));
    if (!handle) return EREMOTEIO;
    answer_with(at<std::uint8_t>(number(MLX5_IB_ATTR_DEVX_OBJ_CREATE_CMD_OUT)), handle);
    attrs.at(MLX5_IB_ATTR_DEVX_OBJ_CREATE_HANDLE)->data = handle;
    return 0;
  }
  if (is(MLX5_IB_OBJECT_DEVX_OBJ, MLX5_IB_METHOD_DEVX_OBJ_MODIFY))
    return firmware_changes(at<std::uint8_t>(number(MLX5_IB_ATTR_DEVX_OBJ_MODIFY_CMD_IN)));
  if (is(MLX5_IB_OBJECT_DEVX_OBJ, MLX5_IB_METHOD_DEVX_OBJ_DESTROY)) {
    const auto handle = std::uint32_t(number(MLX5_IB_ATTR_DEVX_OBJ_DESTROY_HANDLE));
    if (pairs.count(handle)) return forget_pair(handle), 0;
    return queues.erase(handle) ? 0 : EINVAL;
  }
  if (is(MLX5_IB_OBJECT_DEVX_ASYNC_EVENT_FD, MLX5_IB_METHOD_DEVX_ASYNC_EVENT_FD_ALLOC))
    return attrs.at(MLX5_IB_ATTR_DEVX_ASYNC_EVENT_FD_ALLOC_HANDLE)->data = std::uint64_t(make_events()), 0;
  if (is(MLX5_IB_OBJECT_DEVX, MLX5_IB_METHOD_DEVX_SUBSCRIBE_EVENT)) {
    const auto object = std::uint32_t(number(MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_OBJ_HANDLE));
    const bool is_queue = queues.count(object);
    const auto is_its = [=](const auto& each) {
      return is_queue ? each.second->queue == object : each.first == object;
    };
    const auto pair = std::find_if(pairs.begin(), pairs.end(), is_its);
    const int there = events.at(int(number(MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_FD_HANDLE)));
    const auto type = std::uint16_t(number(MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_TYPE_NUM_LIST));
    if (pair != pairs.end() && is_queue == (type == 0x04))
      pair->second->wanted[type] = {there, number(MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_COOKIE)};
    return 0;
  }
  return ENOTTY;
}

// The one ioctl: memory that another driver has exported.
int register_exported(ib_uverbs_ioctl_hdr* header) {
  const auto attrs = attributes(header);
  const auto number = [&](int name) { return std::uint64_t(attrs.at(name)->data); };
  if (std::getenv("FAKE_MLX5_TAKES_NO_EXPORT")) return EOPNOTSUPP;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto buffer = buffers.find(int(number(UVERBS_ATTR_REG_DMABUF_MR_FD)));
  if (buffer == buffers.end()) return EBADF;
  auto* place = at<std::uint8_t>(buffer->second + number(UVERBS_ATTR_REG_DMABUF_MR_OFFSET));
  const std::uint32_t handle =
      remember(std::uint32_t(number(UVERBS_ATTR_REG_DMABUF_MR_PD_HANDLE)), number(UVERBS_ATTR_REG_DMABUF_MR_IOVA),
               number(UVERBS_ATTR_REG_DMABUF_MR_LENGTH), place,
               std::uint32_t(number(UVERBS_ATTR_REG_DMABUF_MR_ACCESS_FLAGS)), dup(buffer->first));
  ++exports;
  attrs.at(UVERBS_ATTR_REG_DMABUF_MR_HANDLE)->data = handle;
  for (const int key : {UVERBS_ATTR_REG_DMABUF_MR_RESP_LKEY, UVERBS_ATTR_REG_DMABUF_MR_RESP_RKEY})
    *at<std::uint32_t>(attrs.at(key)->data) = memories[handle].region.key;
  return 0;
}

bool is_node(int fd) {
  const std::lock_guard<std::mutex> lock(mutex);
  return nodes.count(fd) != 0;
}

// What of its domain, and of its peer's, a NIC may touch now.
void show_memory(Pair& pair) {
  const auto peer = pairs.find(pair.peer);
  pair.nic->local.clear();
  pair.nic->remote = pair.beyond;
  for (const auto& [handle, m] : memories) {
    if (m.domain == pair.domain) pair.nic->local.push_back(m.region);
    if (peer != pairs.end() && m.domain == peer->second->domain) pair.nic->remote.push_back(m.region);
  }
}

// One step of every NIC, and a look at its registers; false when none had anything to do.
bool move_all() {
  bool moved = false;
  for (auto& [number, pair] : pairs) {
    show_memory(*pair);
    for (std::uint32_t i = 0; i < 2; ++i) {
      const auto* place = reinterpret_cast<const std::uint64_t*>(pair->registers + i * 256);
      const std::uint64_t value = __atomic_load_n(place, __ATOMIC_ACQUIRE);
      if (value == pair->rung[i]) continue;
      pair->rung[i] = value;
      pair->nic->doorbell(i * 256, value);
      moved = true;
    }
    moved = pair->nic->step() || moved;
  }
  return moved;
}

std::atomic<bool> is_serving{false};
std::thread server;

// Where a file of the kernel's is in fact.
std::string found_at(const char* path) {
  const char* const sysfs = std::getenv("SYSFS_PATH");
  if (sysfs && !std::strncmp(path, "/sys/class/infiniband", 21)) return std::string(sysfs) + (path + 4);
  return std::strcmp(path, kNode) ? path : kBehind;
}

}  // namespace

extern "C" {

void fake_mlx5_serve(bool on);

DIR* opendir(const char* path) {
  static const auto real = reinterpret_cast<DIR* (*)(const char*)>(dlsym(RTLD_NEXT, "opendir"));
  return real(found_at(path).c_str());
}
int open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0;
  va_end(rest);
  const bool is_ours = !std::strcmp(path, kNode);
  const int fd = openat(AT_FDCWD, found_at(path).c_str(), flags, mode);
  if (!is_ours || fd < 0) return fd;
  const std::lock_guard<std::mutex> lock(mutex);
  nodes[fd] = {};
  static const bool serves = std::getenv("FAKE_MLX5_SERVES") && (fake_mlx5_serve(true), true);
  static_cast<void>(serves);
  return fd;
}
int open64(const char* path, int flags, ...) __attribute__((alias("open")));
int stat(const char* path, struct stat* to) { return fstatat(AT_FDCWD, found_at(path).c_str(), to, 0); }
int close(int fd) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    nodes.erase(fd);
    if (const auto pipe = events.find(fd); pipe != events.end()) {
      syscall(SYS_close, pipe->second);
      events.erase(pipe);
    }
  }
  return int(syscall(SYS_close, fd));
}
ssize_t write(int fd, const void* data, std::size_t bytes) {
  if (!is_node(fd)) return syscall(SYS_write, fd, data, bytes);
  errno = take_command(fd, data, bytes);
  return errno ? -1 : ssize_t(bytes);
}
int ioctl(int fd, unsigned long request, ...) {
  va_list rest;
  va_start(rest, request);
  void* const argument = va_arg(rest, void*);
  va_end(rest);
  if (!is_node(fd)) return int(syscall(SYS_ioctl, fd, request, argument));
  auto* header = static_cast<ib_uverbs_ioctl_hdr*>(argument);
  errno = ENOTTY;
  if (header->object_id == UVERBS_OBJECT_MR && header->method_id == UVERBS_METHOD_REG_DMABUF_MR)
    errno = register_exported(header);
  else if (has_firmware())
    errno = firmware_call(fd, header);
  return errno ? -1 : 0;
}
void* mmap(void* place, std::size_t bytes, int access, int flags, int fd, off_t offset) {
  if (!is_node(fd)) return reinterpret_cast<void*>(syscall(SYS_mmap, place, bytes, access, flags, fd, offset));
  void* page = reinterpret_cast<void*>(syscall(SYS_mmap, place, bytes, access, flags, fd, 0));
  const std::lock_guard<std::mutex> lock(mutex);
  if (page != MAP_FAILED) nodes.at(fd).pages[std::uint32_t(offset / kPage) & 0xff] = static_cast<std::uint8_t*>(page);
  return page;
}
int socket(int family, int kind, int protocol) {
  if (family == 16 && protocol == 20) return errno = EPROTONOSUPPORT, -1;  // netlink's list of the real devices
  return int(syscall(SYS_socket, family, kind, protocol));
}

// NICs of queue pairs that are made from here on delay, split and repeat what they may.
void fake_mlx5_hostile() { adversary = {true, true, false}; }
// Until no NIC has anything to do.
void fake_mlx5_run() {
  const std::lock_guard<std::mutex> lock(mutex);
  while (move_all()) {
  }
}
// In a thread of their own, until the next call.
void fake_mlx5_serve(bool on) {
  is_serving = false;
  if (server.joinable()) server.join();
  if (!on) return;
  is_serving = true;
  server = std::thread([] {
    while (is_serving) {
      std::unique_lock<std::mutex> lock(mutex);
      const bool moved = move_all();
      lock.unlock();
      if (!moved) std::this_thread::yield();
    }
  });
}
// What queue pair `number` sends is never acknowledged.
void fake_mlx5_silence(std::uint32_t number) {
  const std::lock_guard<std::mutex> lock(mutex);
  pairs.at(number)->nic->peer_gone = true;
}
// What queue pairs send that are made from here on is never acknowledged.
void fake_mlx5_deafen(bool on) {
  const std::lock_guard<std::mutex> lock(mutex);
  is_deaf = on;
}
// The device tells the owner of queue pair `number` of it.
void fake_mlx5_event(std::uint32_t number, std::uint32_t type) {
  const std::lock_guard<std::mutex> lock(mutex);
  Pair& pair = *pairs.at(number);
  const std::map<std::uint32_t, std::uint32_t> by_firmware = {{0, 0x04}, {1, 0x05}, {2, 0x10}, {3, 0x11}};
  if (const auto its = by_firmware.find(type); its != by_firmware.end() && pair.wanted.count(its->second)) {
    const auto& [there, cookie] = pair.wanted.at(its->second);
    if (syscall(SYS_write, there, &cookie, sizeof cookie) < 0) std::abort();
    return;
  }
  if (!pair.user_handle && by_firmware.count(type)) return;  // which the firmware was not asked for
  CompletionQueue& queue = queues.at(pair.queue);
  const ib_uverbs_async_event_desc event{type ? pair.user_handle : queue.user_handle, type, 0};
  if (syscall(SYS_write, pair.events, &event, sizeof event) < 0) std::abort();
  pair.told += type >= 1 && type <= 3;  // of a queue pair; others are of its queue, its port or device
  queue.told += type == 0;
}
// Memories that are registered now, their bytes, and how many ever were by dma-buf, since the last call.
int fake_mlx5_memories() {
  const std::lock_guard<std::mutex> lock(mutex);
  return int(memories.size());
}
// Memories that the firmware knows for rings.
int fake_mlx5_rings() {
  const std::lock_guard<std::mutex> lock(mutex);
  return int(ring_memories.size());
}
unsigned long long fake_mlx5_bytes() {
  const std::lock_guard<std::mutex> lock(mutex);
  unsigned long long sum = 0;
  for (const auto& [handle, memory] : memories) sum += memory.region.bytes;
  return sum;
}
int fake_mlx5_exported() {
  const std::lock_guard<std::mutex> lock(mutex);
  return std::exchange(exports, 0);
}
// (executed, completions, doorbells, refused, odd) of that queue pair's NIC.
void fake_mlx5_counters(std::uint32_t number, std::uint64_t to[5]) {
  const std::lock_guard<std::mutex> lock(mutex);
  const Counters& n = pairs.at(number)->nic->count;
  const std::uint64_t all[] = {n.executed, n.completions, n.doorbells, n.refused, n.odd};
  std::memcpy(to, all, sizeof all);
}
void fake_mlx5_path(std::uint32_t number, std::uint32_t to[7]) {
  const std::lock_guard<std::mutex> lock(mutex);
  std::memcpy(to, &pairs.at(number)->path, sizeof(Path));
}
std::uint32_t fake_mlx5_granted() {
  const std::lock_guard<std::mutex> lock(mutex);
  return granted;
}
// `fd` stands for memory from there on.
void fake_mlx5_export(int fd, std::uint64_t address) {
  const std::lock_guard<std::mutex> lock(mutex);
  buffers[fd] = address;
}
}  // extern "C"

namespace {
const struct Ending {
  ~Ending() { fake_mlx5_serve(false); }
} ending;
}  // namespace
