// What a native loop has done and when, for lamina.observe.trace.
#pragma once

#include <unistd.h>
#include <csignal>
#include <cstdint>
#include <vector>

#include "netstack/engine.h"

namespace lamina {

// A span of a layer. `event`: of lamina.observe.trace. `number`: that of a step in its round, or of a link.
struct Span {
  std::int64_t event, layer, number;
  std::uint64_t start, end, bytes;
};

// A failpoint of lamina.observe.failpoints, in memory that is shared with the process that sets it. Process `pid` kills
// itself at the event that makes `left` 0.
struct Tripwire {
  volatile std::int64_t pid, event, left;

  void touch(std::int64_t what) {
    if (left > 0 && event == what && pid == getpid() && --left == 0) kill(getpid(), SIGKILL);
  }
};

class Spans {
 public:
  bool on = false;
  Tripwire* tripwire = nullptr;

  // What ran from `start`, which becomes now.
  template <class Event>
  void put(Event event, std::size_t layer, std::size_t number, std::uint64_t* start, std::uint64_t bytes = 0) {
    if (!on) return;
    const std::uint64_t now = now_ns();
    all.push_back({std::int64_t(event), std::int64_t(layer), std::int64_t(number), *start, now, bytes});
    *start = now;
    if (tripwire) tripwire->touch(std::int64_t(event));
  }

  std::vector<Span> all;
};

}  // namespace lamina
