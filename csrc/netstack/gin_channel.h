// A lane of a channel of device.h over NCCL's device API (GIN). The two peers have their own communicator, and one
// symmetric window. Each direction has one offset in it on both sides: the sender's staging, and the receiver's inbox.
// Each lane has its own context, which is a queue for NCCL, and signals only its own messages.
//
// HARDWARE-UNVERIFIED: compiled for GPUs with NCCL's headers; run on CPUs over a stand-in of NCCL, where the source is
// the same.
#pragma once

#include "netstack/device.h"

#if defined(LAMINA_GIN)
#include <nccl_device.h>
#endif

namespace lamina::gin {

using namespace device;

struct Channel : Ends {
  // Filled by the control plane.
  u64 communicator;  // address of the ncclDevComm
  u64 window;  // an ncclWindow_t
  u64 peer;  // its rank
  u64 to, from;  // offsets in the window of the direction that we send, and of the other
  u64 context;  // NCCL may have made fewer than it was asked for
};

#if defined(LAMINA_GIN)

// Sends and receives of a lane are in no order, but both put by one context, which NCCL guards.
struct Putter {
  const ncclDevComm& communicator;
  ncclGin gin;
  ncclTeam team = ncclTeamWorld(communicator);
  ncclWindow_t window;
  int peer;

  __device__ explicit Putter(const Channel& c)
      : communicator(*reinterpret_cast<const ncclDevComm*>(c.communicator)),
        gin(communicator, int(c.context % communicator.ginContextCount), NCCL_GIN_RESOURCE_SHARING_GPU),
        window(reinterpret_cast<ncclWindow_t>(c.window)), peer(int(c.peer)) {}
};

// Adds to a word of the peer's inbox, after everything that this context has put there before: a strong signal of NCCL.
// A weak one follows only its own put, so it could count a message before an earlier one has arrived.
__device__ inline ncclGin_StrongVASignalAdd behind_all(const Channel& c, u64 at, u64 more) {
  return {reinterpret_cast<ncclWindow_t>(c.window), c.to + at, more};
}

// `bytes` at `at` of the staging to the same place of the inbox, then one more message. Once in the machine code, as is
// `add_credit`: each holds the code of all NICs that NCCL knows.
__device__ __noinline__ void put_message(const Channel& c, u64 at, u64 bytes) {
  const Putter p(c);
  p.gin.put(p.team, p.peer, p.window, c.to + at, p.window, c.to + at, bytes, behind_all(c, kSignalAt, 1));
}

__device__ __noinline__ void add_credit(const Channel& c, u64 more) {
  const Putter p(c);
  p.gin.signal(p.team, p.peer, behind_all(c, kCreditAt, more));
}

// Put the oldest granted message, whose payload of `bytes` is in its staging.
template <class B>
__device__ Status publish(B& bus, Channel& c, u64 bytes, const u64* tag) {
  write_header(bus, c, bytes, tag);
  put_message(c, c.out.at(c.published), sizeof(Header) + bytes);
  c.published += 1;
  return kOk;
}

// Tell the peer what has been released. Its word for that lies in its inbox.
template <class B>
__device__ Status report(B&, Channel& c) {
  if (c.reported == c.released) return kOk;
  add_credit(c, c.released - c.reported);
  c.reported = c.released;
  return kOk;
}

#endif

}  // namespace lamina::gin
