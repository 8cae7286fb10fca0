// What guards the frames of one direction of a session, part by part: checksums within one host, beyond it a cipher,
// which hides them too.
#pragma once

#include <utility>

#include "cipher.h"
#include "netstack/check.h"

namespace lamina {

enum Part : std::uint64_t { kHeaderPart = 1, kPayloadPart = 2 };
static_assert(kCheckBytes == kCodeBytes);

class Guard {
 public:
  Guard() = default;  // by checksums
  Guard(const std::uint8_t key[kKeyBytes], bool seals) : hides_(true), cipher_(key, seals) {}

  bool hides() const { return hides_; }
  bool sound() const { return !hides_ || cipher_.sound(); }  // whether all could be done so far

  // The part of the frame with that count in its direction; parts in their order of sending have counters that rise
  // by one, payloads before headers.
  void begin(Part part, std::uint64_t frame) {
    if (hides_)
      cipher_.begin(2 * frame + (part == kHeaderPart));
    else
      check_ = Check(part, frame);
  }

  // The next bytes of a part that is sent, in their place.
  void seal(std::uint8_t* p, std::uint64_t bytes) {
    if (hides_)
      cipher_.pass(p, p, bytes);
    else
      check_.update(p, bytes);
  }
  void seal_end(std::uint8_t check[kCheckBytes]) {
    if (hides_)
      cipher_.seal(check);
    else
      check_.finish(check);
  }

  // The next bytes of a part that has come, in their place. They are no peer's before `open_end` is true.
  void open(std::uint8_t* p, std::uint64_t bytes) {
    if (hides_)
      cipher_.pass(p, p, bytes);
    else
      check_.update(p, bytes);
  }
  bool open_end(const std::uint8_t check[kCheckBytes]) {
    if (hides_) return cipher_.open(check);
    std::uint8_t expected[kCheckBytes];
    check_.finish(expected);
    return equal(expected, check);
  }

 private:
  bool hides_ = false;
  Cipher cipher_;
  Check check_{0, 0};
};

}  // namespace lamina
