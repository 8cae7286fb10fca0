#include "soft_nic/nic.h"

#include <algorithm>

namespace lamina::nic_model {

namespace {

constexpr std::uint32_t kBlock = 64, kSegment = 16, kSegmentsMost = 63;
constexpr std::uint32_t kNop = 0x00, kRdmaWrite = 0x08;
constexpr std::uint32_t kRequestDone = 0x0, kRequestFailed = 0xd;  // of a completion
constexpr std::uint32_t kCompletionWanted = 0x08;
constexpr std::uint64_t kMessageMost = 1ull << 30;

std::uint32_t load(const std::uint32_t* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }

}  // namespace

bool Nic::modify(State to) {
  const bool legal = to == State::error || to == State::reset || int(to) == int(state_) + 1;
  if (legal && state_ != State::error) state_ = to;
  if (legal && to == State::reset) state_ = to;
  return legal;
}

// A write to our registers. It may be acted on much later; the record is read then.
void Nic::doorbell(std::uint64_t offset, std::uint64_t value) {
  ++count.doorbells;
  const auto* head = reinterpret_cast<const std::uint8_t*>(&value);
  const std::uint32_t record = big32(setup_.record + 1);
  const std::uint16_t index = std::uint16_t(big32(head) >> 8);
  count.odd += record >> 16 != 0;
  if (!setup_.late) {
    count.odd += std::uint16_t(index + 1) != std::uint16_t(record);  // ours name the last WQE, which has one block
    count.odd += std::memcmp(setup_.ring + index % setup_.blocks * kBlock, head, 8) != 0;
  }
  count.odd += setup_.alternate ? offset == last_register_ || (offset && offset != setup_.alternate) : offset != 0;
  last_register_ = offset;
  last_doorbell_ = value;
  doorbells_.push_back(value);
  if (adversary_.repeat && random_.once_in(16)) doorbells_.push_back(value);
}

bool Nic::step() {
  if (adversary_.repeat && state_ == State::rts && random_.once_in(4)) read_record();
  if (!doorbells_.empty() && (flights_.empty() || random_.once_in(2))) {
    const std::uint64_t value = doorbells_.front();
    doorbells_.pop_front();
    take_doorbell(value);
    return true;
  }
  if (!flights_.empty()) {
    const bool second = adversary_.reorder && flights_.size() > 1 && random_.once_in(2);
    deliver(flights_[second]);
    land();
    if (flights_.size() < 4 && next_ != end_ && random_.once_in(2)) fetch();
    return true;
  }
  if (next_ != end_) {
    fetch();
    return true;
  }
  return false;
}

// The record is the truth. The doorbell says that it changed, and names a WQE that must lie in the window.
void Nic::take_doorbell(std::uint64_t value) {
  const auto* head = reinterpret_cast<const std::uint8_t*>(&value);
  const std::uint32_t number = big32(head + 4) >> 8;
  const std::uint16_t index = std::uint16_t(big32(head) >> 8);
  if (number != setup_.number || (state_ != State::rts && state_ != State::error)) {
    ++count.refused;
    return;
  }
  const std::uint16_t ahead = std::uint16_t(index - next_);
  if (ahead >= 0x8000) {
    ++count.stale;
  } else if (ahead >= window()) {
    ++count.refused;
  } else {
    read_record();
  }
}

// WQEs that the record announces; 0 if it claims more than the ring holds.
std::uint64_t Nic::window() const {
  const std::uint16_t n = std::uint16_t(__builtin_bswap32(load(setup_.record + 1)) - next_);
  return n <= setup_.blocks ? n : 0;
}

// Hardware that has dropped or merged doorbells reads the record unasked, so whatever the record announces must be
// in the ring before it. It may fetch all of that at once.
void Nic::read_record() { end_ = next_ + window(); }

void Nic::fetch() {
  const std::uint16_t index = std::uint16_t(next_);
  const std::uint8_t* first = setup_.ring + next_ % setup_.blocks * kBlock;
  const std::uint32_t word = big32(first), segments = big32(first + 4) & 0x3f, flags = big32(first + 8);
  const std::uint8_t opcode = std::uint8_t(word);
  if (state_ == State::error) {
    ++next_;
    return complete(opcode, index, kFlushed);
  }
  const std::uint64_t blocks = (segments + 3) / 4;
  const bool sound = (word >> 8 & 0xffff) == index && word >> 24 == 0 && big32(first + 4) >> 8 == setup_.number &&
                     segments >= 1 && blocks <= end_ - next_;
  if (!sound) return fail(opcode, index, kLocalOperation);
  std::uint8_t wqe[kSegmentsMost * kSegment + kBlock];
  for (std::uint64_t i = 0; i < blocks; ++i)  // a WQE may wrap around the end of the ring
    std::memcpy(wqe + i * kBlock, setup_.ring + (next_ + i) % setup_.blocks * kBlock, kBlock);
  Flight flight{index, opcode, (flags & kCompletionWanted) != 0, {}};
  std::uint8_t bad = opcode == kNop ? 0 : kLocalOperation;
  if (opcode == kRdmaWrite) bad = parse_write(wqe, segments, &flight.pieces);
  count.odd += (flags & ~kCompletionWanted) != 0 || big32(first + 12) != 0;
  if (bad) return fail(opcode, index, Syndrome(bad));
  next_ += blocks;
  ++count.executed;
  flights_.push_back(std::move(flight));
}

std::uint8_t Nic::parse_write(const std::uint8_t* wqe, std::uint32_t segments, std::vector<Piece>* pieces) {
  if (segments < 2) return kLocalOperation;
  const std::uint64_t address = big64(wqe + 16);
  const std::uint32_t key = big32(wqe + 24);
  count.odd += big32(wqe + 28) != 0;
  std::uint64_t total = 0;
  for (std::uint32_t at = 2; at < segments;) {
    const std::uint8_t* segment = wqe + at * kSegment;
    const std::uint32_t head = big32(segment);
    Piece piece{};
    if (head >> 31) {
      piece.bytes = head & 0x3ff;
      const std::uint32_t span = std::uint32_t((4 + piece.bytes + kSegment - 1) / kSegment);
      if (head & 0x7ffffc00 || at + span > segments) return kLocalOperation;
      piece.inlined.assign(segment + 4, segment + 4 + piece.bytes);
      at += span;
    } else {
      piece.bytes = head ? head : 1ull << 31;
      const std::uint64_t from = big64(segment + 8);
      const MemoryRegion* region = find(local, big32(segment + 4), from, piece.bytes, false);
      if (!region) return kLocalProtection;
      piece.from = region->at + (from - region->address);
      at += 1;
    }
    total += piece.bytes;
    pieces->push_back(std::move(piece));
  }
  if (total > kMessageMost) return kLocalLength;
  if (peer_gone) return kRetryExceeded;
  const MemoryRegion* region = find(remote, key, address, total, true);
  if (!region) return kRemoteAccess;
  std::uint8_t* to = region->at + (address - region->address);
  for (Piece& piece : *pieces) {
    piece.to = to;
    piece.observer = region->observer;
    to += piece.bytes;
  }
  return 0;
}

// Move some of a flight's bytes. A message's own bytes may land in any order; an aligned word lands at once.
void Nic::deliver(Flight& flight) {
  if (flight.pieces.empty()) return;
  Piece& piece = flight.pieces.back();
  std::uint64_t bytes = piece.bytes, at = 0;
  if (adversary_.split && bytes > 8) {
    bytes = std::min(bytes, 8 * (1 + random_.below(16)));
    if (random_.once_in(2)) at = piece.bytes - bytes;
  }
  const std::uint8_t* from = piece.inlined.empty() ? piece.from : piece.inlined.data();
  if (piece.observer) piece.observer->before_write(piece.to + at, bytes);
  if (bytes <= 24 && (bytes | reinterpret_cast<std::uintptr_t>(piece.to + at)) % 8 == 0) {
    for (std::uint64_t done = 0; done < bytes; done += 8) {  // each word at once
      std::uint64_t word;
      std::memcpy(&word, from + at + done, 8);
      __atomic_store_n(reinterpret_cast<std::uint64_t*>(piece.to + at + done), word, __ATOMIC_RELEASE);
    }
  } else {
    std::memcpy(piece.to + at, from + at, bytes);
  }
  if (at == 0 && bytes < piece.bytes) {
    piece.to += bytes;
    if (piece.inlined.empty()) {
      piece.from += bytes;
    } else {
      piece.inlined.erase(piece.inlined.begin(), piece.inlined.begin() + std::ptrdiff_t(bytes));
    }
  }
  piece.bytes -= bytes;
  if (piece.bytes == 0) flight.pieces.pop_back();
}

// Acknowledgements come in order, whatever order the bytes landed in.
void Nic::land() {
  while (!flights_.empty() && flights_.front().pieces.empty()) {
    const Flight flight = std::move(flights_.front());
    flights_.pop_front();
    if (flight.signalled) complete(flight.opcode, flight.counter, 0);
  }
}

void Nic::fail(std::uint8_t opcode, std::uint16_t counter, Syndrome syndrome) {
  while (!flights_.empty()) {  // what was sent before is done first
    deliver(flights_.front());
    land();
  }
  state_ = State::error;
  ++next_;
  complete(opcode, counter, syndrome);
}

void Nic::complete(std::uint8_t opcode, std::uint16_t counter, std::uint8_t syndrome) {
  const std::uint32_t seen = __builtin_bswap32(load(setup_.seen));
  if (((completed_ - seen) & 0xffffff) >= setup_.cqes) {
    overrun = true;
    state_ = State::error;
    return;
  }
  std::uint8_t cqe[kBlock] = {};
  for (int i = 0; i < 3; ++i) cqe[33 + i] = std::uint8_t(setup_.user >> (16 - 8 * i));
  cqe[54] = syndrome ? 0x99 : 0;
  cqe[55] = syndrome;
  cqe[56] = opcode;
  for (int i = 0; i < 3; ++i) cqe[57 + i] = std::uint8_t(setup_.number >> (16 - 8 * i));
  cqe[60] = std::uint8_t(counter >> 8);
  cqe[61] = std::uint8_t(counter);
  cqe[63] = std::uint8_t((syndrome ? kRequestFailed : kRequestDone) << 4 | ((completed_ / setup_.cqes) & 1));
  std::uint8_t* to = setup_.completions + completed_ % setup_.cqes * kBlock;
  if (setup_.observer) setup_.observer->before_write(to, kBlock);
  std::memcpy(to, cqe, 56);
  std::uint64_t tail;
  std::memcpy(&tail, cqe + 56, 8);
  __atomic_store_n(reinterpret_cast<std::uint64_t*>(to + 56), tail, __ATOMIC_RELEASE);
  ++completed_;
  ++count.completions;
}

const MemoryRegion* Nic::find(const std::vector<MemoryRegion>& regions, std::uint32_t key, std::uint64_t address,
                              std::uint64_t bytes, bool remote) const {
  for (const MemoryRegion& r : regions)
    if (r.key == key && (!remote || r.remote_write) && address >= r.address && bytes <= r.bytes &&
        address - r.address <= r.bytes - bytes)
      return &r;
  return nullptr;
}

}  // namespace lamina::nic_model
