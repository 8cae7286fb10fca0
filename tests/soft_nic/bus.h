// A processor in front of the software NIC, with the weakest memory order that a GPU may show.
//
// Stores wait in a buffer and leave it in any order (same address: in order) at any time; only a fence empties it. What
// leaves it is in this GPU's memory. Stores to memory elsewhere are then in flight in a second buffer, which a fence of
// the system's empties and one of the GPU's does not. Processors of one GPU share this way, on which stores to one
// address keep their order. Registers are reached past the buffer. A plain load may return what was there before the
// last acquire, and be done as late as the next fence or release. An earlier write to that
// address ends the program.
// Between any two accesses the world, NICs that is, may move. So a fence, a release or an acquire too few is a wrong
// result, sooner or later.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "soft_nic/nic.h"

namespace lamina::nic_model {

inline const char* g_scenario = "";

class WeakBus final : public Observer {
 public:
  using Word = unsigned long long;
  static constexpr unsigned kRestMostNs = 1024;

  // `registers` is where doorbell offset 0 is, as the poster addresses it. No `nic`: doorbells are rung in memory.
  WeakBus(Nic* nic, const void* registers, std::uint64_t seed, std::function<void()> world)
      : random_{seed}, world_(std::move(world)) {
    if (nic) reach(nic, registers);
  }
  // Another one's.
  void reach(Nic* nic, const void* registers) { doorbells_[reinterpret_cast<std::uintptr_t>(registers)] = nic; }

  template <class T>
  void put(T* to, const T& value) {
    static_assert(sizeof(T) == 4 || sizeof(T) % 8 == 0);
    const auto* from = reinterpret_cast<const std::uint8_t*>(&value);
    constexpr std::size_t bytes = sizeof(T) < 8 ? sizeof(T) : 8;
    for (std::size_t at = 0; at < sizeof(T); at += bytes) {
      Store store{reinterpret_cast<std::uint8_t*>(to) + at, bytes, 0, this};
      std::memcpy(&store.value, from + at, bytes);
      buffer_.push_back(store);
      if (random_.once_in(8)) land(taken(buffer_));
      if (!way_->empty() && random_.once_in(8)) write(taken(*way_));
    }
    move();
  }

  void fence() {
    ++system_fences;
    fence_near();
    for (std::uint64_t n = random_.below(4); n && !way_->empty(); --n) {
      write(taken(*way_));
      move();
    }
    std::vector<Store> others;
    for (auto store = way_->begin(); store != way_->end(); ++store) {
      const bool goes =
          std::any_of(store, way_->end(), [&](const Store& s) { return s.by == this && s.to == store->to; });
      goes ? write(*store) : others.push_back(*store);
    }
    *way_ = others;
    move();
  }

  void fence_near() {
    empty(buffer_, [this](const Store& store) { land(store); });
    reading_.clear();
    move();
  }

  void ring(Word* at, Word value) {
    move();
    const auto page = doorbells_.upper_bound(reinterpret_cast<std::uintptr_t>(at));
    if (page == doorbells_.begin()) {
      __atomic_store_n(at, value, __ATOMIC_RELEASE);
    } else {
      const auto& [registers, nic] = *std::prev(page);
      nic->doorbell(reinterpret_cast<std::uintptr_t>(at) - registers, value);
    }
    move();
  }

  void release(Word* at, Word value) {
    fence();
    write({reinterpret_cast<std::uint8_t*>(at), sizeof value, value, this});
    move();
  }

  Word acquire(const Word* at) {
    ++acquires;
    move();
    old_.clear();
    return __atomic_load_n(at, __ATOMIC_ACQUIRE);
  }

  void release_near(Word* at, Word value) {
    fence_near();
    land({reinterpret_cast<std::uint8_t*>(at), sizeof value, value, this});
    move();
  }
  Word acquire_near(const Word* at) { return acquire(at); }

  // This processor is alone: who takes what it holds, or lets go of what it does not, would hang or break others.
  void lock(unsigned* held) { turn(held, 0); }
  void unlock(unsigned* held) {
    fence_near();
    turn(held, 1);
  }

  Word load(const Word* at) {
    move();
    reading_.insert(at);
    const auto found = old_.find(at);
    return found != old_.end() && random_.once_in(2) ? found->second : *at;
  }

  Word now_ns() { return now_ += 50; }
  void rest(unsigned ns) {
    ++rests;
    longest_rest = ns > longest_rest ? ns : longest_rest;
    now_ += ns;
    move();
  }

  // The processor that reads what this one stores; null: a NIC, which sees memory as it is.
  void tell(Observer* reader) { reader_ = reader; }

  // A processor of the same GPU.
  void join(const WeakBus& other) { way_ = other.way_; }

  // Memory of the GPU of which this is a processor. The struct of a channel always is.
  void own(const void* at, std::uint64_t bytes) { near_[reinterpret_cast<std::uintptr_t>(at) + bytes] = at; }

  unsigned acquires = 0, rests = 0, longest_rest = 0, system_fences = 0;

  // Someone else writes to memory that this processor reads.
  void before_write(const void* at, std::uint64_t bytes) override {
    const auto first = reinterpret_cast<std::uintptr_t>(at) / 8 * 8;
    const auto last = reinterpret_cast<std::uintptr_t>(at) + bytes;
    for (auto word = first; word < last; word += 8) {
      const auto* address = reinterpret_cast<const Word*>(word);
      if (!reading_.empty() && reading_.count(address))
        std::printf("%s: a word is written that may still be read\n", g_scenario), std::exit(1);
      old_.try_emplace(address, *address);
    }
  }

 private:
  struct Store {
    std::uint8_t* to;
    std::size_t bytes;
    std::uint64_t value;
    const WeakBus* by;
  };

  void write(const Store& store) {
    if (reader_) reader_->before_write(store.to, store.bytes);
    if (store.bytes == 8)
      __atomic_store_n(reinterpret_cast<std::uint64_t*>(store.to), store.value, __ATOMIC_RELEASE);
    else
      __atomic_store_n(reinterpret_cast<std::uint32_t*>(store.to), std::uint32_t(store.value), __ATOMIC_RELEASE);
  }

  void turn(unsigned* held, unsigned before) {
    move();
    if (*held != before) std::printf("%s: a queue is held %u times\n", g_scenario, *held), std::exit(1);
    *held = 1 - before;
  }

  // One of a buffer's stores, or an earlier one to the same address in its place.
  Store taken(std::vector<Store>& buffer) {
    std::size_t which = random_.below(buffer.size());
    for (std::size_t i = 0; i < which; ++i)
      if (buffer[i].to == buffer[which].to) which = i;
    const Store store = buffer[which];
    buffer.erase(buffer.begin() + std::ptrdiff_t(which));
    return store;
  }

  // Some first, between which the world moves, then the others.
  template <class Leave>
  void empty(std::vector<Store>& buffer, Leave leave) {
    for (std::uint64_t n = random_.below(4); n && !buffer.empty(); --n) {
      leave(taken(buffer));
      move();
    }
    for (const Store& store : buffer) leave(store);
    buffer.clear();
  }

  // Stores to one address go one way, in order.
  void land(const Store& store) {
    const auto range = near_.upper_bound(reinterpret_cast<std::uintptr_t>(store.to));
    if (range != near_.end() && range->second <= store.to) return write(store);
    way_->push_back(store);
    if (random_.once_in(2)) write(taken(*way_));
  }

  void move() {
    if (world_ && random_.once_in(4)) world_();
  }

  std::map<std::uintptr_t, Nic*> doorbells_;  // by where a NIC's registers begin
  Observer* reader_ = nullptr;
  Random random_;
  std::function<void()> world_;
  std::vector<Store> buffer_;
  std::shared_ptr<std::vector<Store>> way_ = std::make_shared<std::vector<Store>>();
  std::map<std::uintptr_t, const void*> near_;  // end -> begin
  std::unordered_map<const Word*, Word> old_;
  std::unordered_set<const Word*> reading_;
  Word now_ = 1ull << 40;
};

}  // namespace lamina::nic_model
