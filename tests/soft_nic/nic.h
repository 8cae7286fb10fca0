// A software mlx5 NIC: one RC queue pair and its completion queue, run step by step.
//
// It reads and writes plain memory as the hardware does: work queue, doorbell record, completions and the memory of the
// keys. It shares no code and no constant with mlx5.h, so that an error there cannot cancel out here. What the hardware
// would accept but our protocol never does is counted in `odd`.
#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <vector>

namespace lamina::nic_model {

// splitmix64: small, and the same everywhere.
struct Random {
  std::uint64_t state;

  std::uint64_t next() {
    std::uint64_t z = (state += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  std::uint64_t below(std::uint64_t n) { return next() % n; }
  bool once_in(std::uint64_t n) { return below(n) == 0; }
};

// Sees every write before it happens, so that it can remember what was there.
struct Observer {
  virtual ~Observer() = default;
  virtual void before_write(const void* at, std::uint64_t bytes) = 0;
};

struct MemoryRegion {
  std::uint32_t key;
  std::uint64_t address, bytes;  // as work requests name it
  std::uint8_t* at;
  bool remote_write;
  Observer* observer;  // of the processor that reads it, or null
};

enum class State { reset, init, rtr, rts, error };

enum Syndrome : std::uint8_t {
  kLocalLength = 0x01,
  kLocalOperation = 0x02,
  kLocalProtection = 0x04,
  kFlushed = 0x05,
  kRemoteAccess = 0x13,
  kRetryExceeded = 0x15,
};

struct Setup {
  const std::uint8_t* ring;
  const std::uint32_t* record;
  std::uint8_t* completions;
  const std::uint32_t* seen;
  std::uint32_t number, blocks, cqes, alternate;
  std::uint64_t index;  // of the next WQE; hardware starts at 0, tests start near a wrap
  std::uint64_t completed;  // of the next completion
  Observer* observer;  // of the processor that polls
  bool late = false;  // doorbells may come when the record has gone on
  std::uint32_t user = 0;  // whose queue pair it is, as completions name it in addition to its number
};

// How the outside world may delay, split and repeat; all legal. `reorder` is not: see mlx5::put_signal.
struct Adversary {
  bool split = false;  // writes arrive in pieces
  bool repeat = false;  // doorbells arrive again, late, and the record is read without one
  bool reorder = false;  // two writes may overtake each other, as with adaptive routing
};

struct Counters {
  std::uint64_t executed = 0, completions = 0, doorbells = 0;
  std::uint64_t stale = 0;  // doorbells for what was already fetched: legal, ignored
  std::uint64_t refused = 0;  // doorbells outside the window that the record opens
  std::uint64_t odd = 0;
};

class Nic {
 public:
  Nic(const Setup& setup, Adversary adversary, std::uint64_t seed)
      : setup_(setup), adversary_(adversary), random_{seed}, next_(setup.index), end_(setup.index),
        completed_(setup.completed) {}

  std::vector<MemoryRegion> local, remote;  // of our keys, of the peer's keys
  Counters count;
  bool peer_gone = false;  // nothing is acknowledged
  bool overrun = false;  // the completion queue had no room: fatal on hardware

  State state() const { return state_; }
  bool modify(State to);  // false if the specification has no such transition
  void doorbell(std::uint64_t offset, std::uint64_t value);
  std::uint64_t last_doorbell() const { return last_doorbell_; }
  bool step();  // one small step; false when there is nothing to do
  void run() {
    while (step()) {
    }
  }

 private:
  struct Piece {
    std::uint8_t* to;
    std::vector<std::uint8_t> inlined;
    const std::uint8_t* from;  // where `inlined` is empty
    std::uint64_t bytes;
    Observer* observer;
  };
  struct Flight {  // a WQE on the wire
    std::uint16_t counter;
    std::uint8_t opcode;
    bool signalled;
    std::vector<Piece> pieces;
  };

  void take_doorbell(std::uint64_t value);
  std::uint64_t window() const;
  void read_record();
  void fetch();
  void deliver(Flight& flight);
  void land();
  // Of the WQE of that opcode whose first block has that counter; a syndrome of 0: it is done.
  void complete(std::uint8_t opcode, std::uint16_t counter, std::uint8_t syndrome);
  void fail(std::uint8_t opcode, std::uint16_t counter, Syndrome syndrome);
  std::uint8_t parse_write(const std::uint8_t* wqe, std::uint32_t segments, std::vector<Piece>* pieces);
  const MemoryRegion* find(const std::vector<MemoryRegion>& regions, std::uint32_t key, std::uint64_t address,
                           std::uint64_t bytes, bool remote) const;

  Setup setup_;
  Adversary adversary_;
  Random random_;
  State state_ = State::reset;
  std::uint64_t next_, end_;  // WQEs to fetch
  std::uint64_t completed_;
  std::uint64_t last_register_ = ~0ull, last_doorbell_ = 0;
  std::deque<std::uint64_t> doorbells_;
  std::deque<Flight> flights_;
};

inline std::uint32_t big32(const void* at) {
  std::uint32_t x;
  std::memcpy(&x, at, 4);
  return __builtin_bswap32(x);
}

inline std::uint64_t big64(const void* at) { return std::uint64_t(big32(at)) << 32 | big32((const char*)at + 4); }

}  // namespace lamina::nic_model
