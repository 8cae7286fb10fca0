// The tags of a step's layer messages: protocol.step_plan.Key of layer 0, into which the layer's number is put. Included
// after Python.h.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include "netstack/engine.h"

namespace lamina {

constexpr std::size_t kKeyBytes = 24;  // of a Key
constexpr std::size_t kLayerAt = 16;  // of the layer's number in it, 4 bytes

enum MessageKind { kQ, kKV, kO, kMessageKinds };

class LayerTags {
 public:
  // `keys`: those of Q, of K and V, and of O, one after the other. False with an exception.
  bool read(const char* keys, Py_ssize_t bytes) {
    if (bytes != kMessageKinds * Py_ssize_t(kKeyBytes))
      return PyErr_Format(PyExc_ValueError, "tags of %zd bytes", bytes) != nullptr;
    for (std::size_t kind = 0; kind < kMessageKinds; ++kind)
      std::memcpy(tags_[kind].data(), keys + kind * kKeyBytes, kKeyBytes);
    return true;
  }
  std::array<std::uint8_t, kTagBytes> of(MessageKind kind, std::size_t layer) const {
    auto tag = tags_[kind];
    const auto number = std::uint32_t(layer);
    std::memcpy(tag.data() + kLayerAt, &number, sizeof number);
    return tag;
  }

 private:
  std::array<std::array<std::uint8_t, kTagBytes>, kMessageKinds> tags_{};
};

}  // namespace lamina
