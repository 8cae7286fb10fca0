// What a channel is to the Python layer, whatever carries its bytes: the calls of one sender and one receiver.
//
// Nothing here or in the engines knows Python. A call that can wait runs without the GIL.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <ctime>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lamina {

constexpr std::uint64_t kLine = 64;
constexpr std::uint64_t kTagBytes = 32;
constexpr std::uint64_t kReasonBytes = 256;
constexpr std::uint64_t kTextBytes = 384;
constexpr int kEpochShift = 48;

inline std::uint64_t now_ns(clockid_t clock = CLOCK_MONOTONIC) {
  timespec t;
  clock_gettime(clock, &t);
  return std::uint64_t(t.tv_sec) * 1'000'000'000 + std::uint64_t(t.tv_nsec);
}

// A moment so many seconds from now, for waits; 0 where there is to be none. Longer than 30 years is 30 years.
inline std::uint64_t deadline_in(double seconds, std::uint64_t now) {
  return seconds > 0 ? now + std::uint64_t(std::min(seconds, 1e9) * 1e9) : 0;
}

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Streaming stores of this thread before whatever it stores from here on; a release store does not do that.
inline void order_streaming_stores() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Spinning pays only while the peer runs on another core and answers at once. A spin that catches its event is
// followed by another; one that does not by ever more waits that sleep right away, until the next try.
struct Patience {
  std::uint32_t skip = 0, backoff = 1;

  bool spins() {
    if (skip == 0) return true;
    --skip;
    return false;
  }
  void caught() { backoff = 1; }
  void missed() {
    skip = backoff;
    backoff = std::min(2 * backoff, std::uint32_t{1024});
  }
};

enum class Role { sender, receiver };

// ready: go on. pending: not yet. stopped: this side aborted or closed. gone: the peer did, or died. fault: the peer
// broke the protocol.
enum class Status { ready, pending, stopped, gone, fault };

enum Farewell : std::uint32_t { kStaying = 0, kClosed = 1, kAborted = 2 };

struct Grant {
  std::uint64_t index;
  std::uint8_t* data;
};

struct Message {
  std::uint64_t seqno, length;
  std::uint8_t tag[kTagBytes];
  std::uint8_t* data;
};

// One channel. `look`, `wait` and `take` answer gone or fault with the reason left for `why`.
class Engine {
 public:
  virtual ~Engine() = default;

  // Without waiting: is a slot free (sender), a message there (receiver)? Looks at the peer's life now and then.
  virtual Status look(Role role) = 0;
  // Waits for a moment, at most until the deadline (now_ns); pending means try again, after a look at the clock.
  virtual Status wait(Role role, std::uint64_t deadline_ns) = 0;

  virtual Grant grant() = 0;  // the slot that look found free
  // Sends the oldest granted slot. Pending means that a signal came in between: call resume until it is not.
  virtual Status publish(std::uint64_t nbytes, const std::uint8_t* tag, std::uint64_t tag_bytes,
                         std::uint64_t* seqno) = 0;
  virtual Status resume() { return Status::ready; }
  virtual void give_up(const char*) {}  // on a put that was interrupted

  virtual Status take(Message* message) = 0;  // the message that look found
  virtual void release() = 0;  // of the oldest taken message

  // Stops this side, tells the peer why, wakes both roles; only the first call counts. From any thread.
  virtual void stop(Farewell farewell, const char* reason, std::uint64_t reason_bytes) = 0;
  virtual bool stopped() const = 0;
  virtual void shut() = 0;  // gives descriptors back, once no call is in progress

  virtual void why(char text[kTextBytes]) const = 0;  // the channel ended, for gone and fault; terminated
};

}  // namespace lamina
