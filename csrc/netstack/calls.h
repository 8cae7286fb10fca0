// How other native modules use a channel: its engine, without Python in between. Included after Python.h.
#pragma once

#include "netstack/engine.h"

namespace lamina {

// What the capsule `kName` of a channel points to. It lives as long as the channel. All functions need the GIL; between
// `enter` and `leave` the engine is used without it, by the thread that makes the channel's other calls.
struct ChannelCalls {
  static constexpr const char* kName = "lamina.netstack.calls";
  PyObject* channel;  // borrowed
  Engine* engine;
  std::uint64_t slot_bytes;  // of the longest message out
  // Memory and descriptors stay until `leave`, even if the channel is closed. False with an exception if Python holds a
  // slot or an arrival.
  bool (*enter)(PyObject* channel);
  // `held`: messages that were taken, and are not released yet; until the next `enter` Python releases nothing.
  void (*leave)(PyObject* channel, std::uint64_t held);
  // The next `wait_signal` returns this message, the last that was taken. Before `leave`.
  void (*unread)(PyObject* channel, const Message&);
  // Sets the exception for what an operation of the contract came to; pending: nothing came within `waited_s`.
  void (*raise)(PyObject* channel, Role, Status, const char* operation, double waited_s);
};

}  // namespace lamina
