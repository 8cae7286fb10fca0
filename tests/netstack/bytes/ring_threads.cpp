// Two threads on one channel in shared memory, for -fsanitize=thread: each sends and receives, over many laps of
// small rings, sleeping and spinning. Exits with 0 if every byte arrived in order.
#include <sys/mman.h>
#include <sys/socket.h>

#include <cstdio>
#include <cstdlib>
#include <thread>

#include "netstack/host/link.h"

using namespace lamina;

namespace {

constexpr std::uint64_t kSlots = 3, kSlotBytes = 96, kEpoch = 5;

Status until_ready(Engine& engine, Role role) {
  Status status = engine.look(role);
  const std::uint64_t deadline = now_ns() + 20'000'000'000;
  while (status == Status::pending && now_ns() < deadline) status = engine.wait(role, deadline);
  return status;
}

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

void send(Engine& engine, std::uint64_t n, std::uint64_t* sent) {
  require(until_ready(engine, Role::sender) == Status::ready, "a slot in time");
  const Grant grant = engine.grant();
  const std::uint64_t bytes = n % (kSlotBytes + 1);
  std::memset(grant.data, int(n & 0xff), bytes);
  const std::uint8_t tag[] = {std::uint8_t(n)};
  std::uint64_t seqno;
  require(engine.publish(bytes, tag, 1, &seqno) == Status::ready, "a put");
  require(seqno == (kEpoch << kEpochShift) + ++*sent, "its number");
}

void receive(Engine& engine, std::uint64_t n) {
  require(until_ready(engine, Role::receiver) == Status::ready, "a message in time");
  Message message;
  require(engine.take(&message) == Status::ready, "a good header");
  require(message.length == n % (kSlotBytes + 1) && message.tag[0] == std::uint8_t(n), "its length and tag");
  for (std::uint64_t i = 0; i < message.length; ++i) require(message.data[i] == std::uint8_t(n), "its bytes");
  engine.release();
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t messages = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 20000;
  const std::uint64_t spin_ns = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
  const std::uint64_t bytes = Ring::bytes(kSlots, kSlotBytes);
  // One mapping: the sanitizer knows memory by its address.
  void* mapped = mmap(nullptr, 2 * bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  require(mapped != MAP_FAILED, "memory");
  auto* base = static_cast<std::uint8_t*>(mapped);
  int line[2];
  require(socketpair(AF_UNIX, SOCK_STREAM, 0, line) == 0, "a life line");
  const Ring there(base, kSlots, kSlotBytes, kEpoch), back(base + bytes, kSlots, kSlotBytes, kEpoch);
  there.clear();
  back.clear();
  Link a(there, back, line[0], spin_ns), b(back, there, line[1], spin_ns);
  std::thread other([&] {
    std::uint64_t sent = 0;
    for (std::uint64_t n = 0; n < messages; ++n) {
      receive(b, n);
      send(b, n, &sent);
      if (n % 3 == 0) send(b, n, &sent), receive(b, n);
    }
    require(until_ready(b, Role::receiver) == Status::gone, "the farewell");
    char text[kTextBytes];
    b.why(text);
    require(std::strcmp(text, "the peer aborted: enough") == 0, text);
  });
  std::uint64_t sent = 0;
  for (std::uint64_t n = 0; n < messages; ++n) {
    send(a, n, &sent);
    receive(a, n);
    if (n % 3 == 0) send(a, n, &sent), receive(a, n);
  }
  a.stop(kAborted, "enough", 6);
  other.join();
  std::printf("messages %llu\n", static_cast<unsigned long long>(messages));
}
