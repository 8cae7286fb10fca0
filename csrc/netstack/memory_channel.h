// A channel of device.h between two GPUs of one host, or two processes on one GPU: each side has mapped the other's
// inbox, which is its staging, so a message is a few stores and needs no NIC.
#pragma once

#include "netstack/device.h"

namespace lamina::memory {

using namespace device;

struct Channel : Ends {};

// Put the oldest granted message, whose payload of `bytes` is in place.
template <class B>
LAMINA_HD Status publish(B& bus, Channel& c, u64 bytes, const u64* tag) {
  write_header(bus, c, bytes, tag);
  bus.release(reinterpret_cast<u64*>(c.staging + kSignalAt), c.zero + c.published + 1);
  c.published += 1;
  return kOk;
}

// Tell the peer what has been released.
template <class B>
LAMINA_HD Status report(B& bus, Channel& c) {
  if (c.reported == c.released) return kOk;
  bus.release(reinterpret_cast<u64*>(c.staging + kCreditAt), c.zero + c.released);
  c.reported = c.released;
  return kOk;
}

}  // namespace lamina::memory
