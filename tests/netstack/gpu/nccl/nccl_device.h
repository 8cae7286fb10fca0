// A stand-in of NCCL's device API, for kernels that a CPU runs: what of it csrc/netstack/gin_channel.h uses. A put is
// done by a thread, which may do a later one first. A strong signal comes after all earlier puts, a weak one after its
// own put.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <type_traits>

namespace fake_nccl {

struct Put {
  std::function<void()> move, signal;
  bool is_strong;
};

class Network;
void add(Network* network, Put put);
bool is_idle(Network* network);

}  // namespace fake_nccl

using ncclResult_t = int;
constexpr ncclResult_t ncclSuccess = 0, ncclTimeout = 8;

struct ncclWindow_vidmem {
  std::uint8_t* of_rank[2];
  std::size_t bytes;
};
using ncclWindow_t = ncclWindow_vidmem*;

struct ncclDevComm {
  unsigned magic, version;
  int rank, nRanks;
  unsigned ginContextCount;
  fake_nccl::Network* networks[2];  // of each context
};

struct ncclTeam {
  int nRanks, rank, stride;
};
inline ncclTeam ncclTeamWorld(const ncclDevComm& comm) { return {comm.nRanks, comm.rank, 1}; }

struct ncclCoopThread {};
struct ncclGin_None {};
struct ncclGin_StrongVASignalAdd {
  ncclWindow_t signalWindow;
  std::size_t signalOffset;
  std::uint64_t value;
};
struct ncclGin_WeakVASignalAdd : ncclGin_StrongVASignalAdd {};

enum ncclGinResourceSharingMode { NCCL_GIN_RESOURCE_SHARING_THREAD, NCCL_GIN_RESOURCE_SHARING_GPU };

namespace cuda {
enum memory_order { memory_order_acquire };
}

struct ncclGin {
  ncclGin(const ncclDevComm& comm, int context, ncclGinResourceSharingMode) : network(comm.networks[context]) {
    if (context < 0 || unsigned(context) >= comm.ginContextCount) __builtin_trap();
  }

  template <class Signal>
  void put(ncclTeam team, int peer, ncclWindow_t to, std::size_t at, ncclWindow_t from, std::size_t source,
           std::size_t bytes, Signal signal) const {
    if (at + bytes > to->bytes || source + bytes > from->bytes) __builtin_trap();
    const std::uint8_t* data = from->of_rank[team.rank] + source;
    fake_nccl::Put put = made(peer, signal);
    put.move = [there = to->of_rank[peer] + at, data, bytes] { __builtin_memcpy(there, data, bytes); };
    fake_nccl::add(network, put);
  }
  template <class Signal>
  void signal(ncclTeam, int peer, Signal signal) const {
    fake_nccl::add(network, made(peer, signal));
  }
  ncclResult_t flush(ncclCoopThread, cuda::memory_order, ncclGin_None, std::uint64_t cycles) const {
    for (; cycles; --cycles)
      if (fake_nccl::is_idle(network)) return ncclSuccess;
    return ncclTimeout;
  }

 private:
  template <class Signal>
  static fake_nccl::Put made(int peer, Signal signal) {
    auto* word = reinterpret_cast<std::uint64_t*>(signal.signalWindow->of_rank[peer] + signal.signalOffset);
    return {[] {}, [word, more = signal.value] { __atomic_fetch_add(word, more, __ATOMIC_RELEASE); },
            std::is_same_v<Signal, ncclGin_StrongVASignalAdd>};
  }

  fake_nccl::Network* network;
};
