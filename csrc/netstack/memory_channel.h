// A channel of device.h between two GPUs of one host, or two processes on one GPU. Each side has mapped the other's
// inbox as its staging memory, so a message is a few stores and needs no NIC.
#pragma once

#include "netstack/device.h"

namespace lamina::memory {

using namespace device;

struct Channel : Ends {
  // Filled by the control plane: whether both ends are kernels of one context, and both inboxes in its GPU's memory.
  u64 near;
};

// Set a word of the peer's inbox, after everything that was written there and read here.
template <class B>
LAMINA_HD void tell(B& bus, const Channel& c, u64 at, u64 value) {
  u64* word = reinterpret_cast<u64*>(c.staging + at);
  if (c.near) {
    bus.release_near(word, value);
  } else {
    bus.release(word, value);
  }
}

// Put the oldest granted message, whose payload of `bytes` is in place.
template <class B>
LAMINA_HD Status publish(B& bus, Channel& c, u64 bytes, const u64* tag) {
  write_header(bus, c, bytes, tag);
  tell(bus, c, kSignalAt, c.zero + c.published + 1);
  c.published += 1;
  return kOk;
}

// Tell the peer what has been released.
template <class B>
LAMINA_HD Status report(B& bus, Channel& c) {
  if (c.reported == c.released) return kOk;
  tell(bus, c, kCreditAt, c.zero + c.released);
  c.reported = c.released;
  return kOk;
}

}  // namespace lamina::memory
