// What a native loop has done and when, for lamina.observe.trace.
#pragma once

#include <cstdint>
#include <vector>

#include "netstack/engine.h"

namespace lamina {

// Of a layer; `number`: of a step in its round, or of a link.
struct Span {
  std::int64_t event, layer, number;
  std::uint64_t start, end, bytes;
};

class Spans {
 public:
  bool on = false;

  // What ran from `start`, which becomes now.
  template <class Event>
  void put(Event event, std::size_t layer, std::size_t number, std::uint64_t* start, std::uint64_t bytes = 0) {
    if (!on) return;
    const std::uint64_t now = now_ns();
    all.push_back({std::int64_t(event), std::int64_t(layer), std::int64_t(number), *start, now, bytes});
    *start = now;
  }

  std::vector<Span> all;
};

}  // namespace lamina
