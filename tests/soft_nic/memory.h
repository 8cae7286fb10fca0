// Two ends of memory_channel.h on weak processors, each of which reads and writes the other's inbox.
#pragma once

#include "netstack/memory_channel.h"
#include "soft_nic/pair.h"

namespace lamina::nic_model {

class MemoryPair {
 public:
  struct End {
    WeakBus bus;
    memory::Channel channel;
  };

  MemoryPair(mlx5::Slots ab, mlx5::Slots ba, u64 zero, u64 seed, bool near = false)
      : inbox_{Bytes(ba.inbox_bytes()), Bytes(ab.inbox_bytes())}, a{{nullptr, nullptr, seed, nullptr}, {}},
        b{{nullptr, nullptr, seed + 1, nullptr}, {}} {
    for (Bytes& inbox : inbox_) open_inbox(inbox.data(), zero);
    a.channel = {{inbox_[1].data(), inbox_[0].data(), &abort, ab, ba, zero, 0, 0, 0, 0, 0, 0}, near};
    b.channel = {{inbox_[0].data(), inbox_[1].data(), &abort, ba, ab, zero, 0, 0, 0, 0, 0, 0}, near};
    a.bus.tell(&b.bus);
    b.bus.tell(&a.bus);
    for (Bytes& inbox : inbox_)
      for (End* end : {&a, &b}) {
        end->bus.own(&end->channel, sizeof end->channel);
        if (near) end->bus.own(inbox.data(), inbox.size());
      }
  }

 private:
  using Bytes = std::vector<std::uint8_t>;
  Bytes inbox_[2];

 public:
  u64 abort = 0;
  End a, b;
};

// Both directions at once, stores seen as late as they may be; everything is verified on arrival.
inline void memory_traffic(u64 messages, u64 slots, u64 slot_bytes, u64 zero, u64 seed, bool near) {
  g_scenario = near ? "memory of one GPU" : "memory";
  MemoryPair pair({slots, slot_bytes}, {2, 136}, zero, seed, near);
  Random random{seed + 30};
  MemoryPair::End* ends[] = {&pair.a, &pair.b};
  u64 idle = 0;
  while (pair.a.channel.received < messages || pair.b.channel.received < messages) {
    MemoryPair::End& end = *ends[random.below(2)];
    auto& c = end.channel;
    const bool moved = random.once_in(2) ? c.granted < messages && send(end) : c.received < messages && receive(end);
    if (random.once_in(2)) {
      CHECK(report(end.bus, c) == mlx5::kOk && c.reported == c.released);
    }
    idle = moved ? 0 : idle + 1;
    CHECK(idle < 2'000);
  }
  CHECK(pair.a.channel.published == messages && pair.b.channel.published == messages);
  for (const MemoryPair::End* end : ends) CHECK((end->bus.system_fences == 0) == near);
}

// The stores that only the signal makes visible, and the reports that each side gets.
inline void memory_lies() {
  g_scenario = "memory, step by step";
  MemoryPair pair({2, 64}, {2, 64}, 3ull << 48, 1);
  auto &a = pair.a.channel, &b = pair.b.channel;
  CHECK(send(pair.a) && send(pair.a) && !send(pair.a));
  CHECK(a.granted == 2 && a.published == 2);
  CHECK(receive(pair.b) && !send(pair.a));
  const u64* credit = mlx5::word_at(a.inbox, mlx5::kCreditAt);
  CHECK(*credit == 3ull << 48);
  CHECK(report(pair.b.bus, b) == mlx5::kOk && *credit == (3ull << 48) + 1);
  mlx5::Header header;
  const mlx5::u8* payload;
  CHECK(mlx5::wait_message(pair.b.bus, b, 0) == mlx5::kOk && mlx5::take(pair.b.bus, b, &header, &payload) == mlx5::kOk);
  WeakBus bystander(nullptr, nullptr, 9, nullptr);
  *const_cast<u64*>(credit) = 77;
  CHECK(report(bystander, b) == mlx5::kOk && *credit == 77);  // nothing new: nothing is written
  *const_cast<u64*>(credit) = (3ull << 48) + 1;
  CHECK(send(pair.a) && !send(pair.a));
  pair.abort = 1;
  CHECK(mlx5::wait_slot(pair.a.bus, a, kLongNs) == mlx5::kAborted);
  MemoryPair other({2, 64}, {2, 64}, 0, 2);
  keep_one<MemoryPair::End>(other.a, other.b, [] {}, [&] { CHECK(report(other.b.bus, other.b.channel) == mlx5::kOk); });
}

}  // namespace lamina::nic_model
