// One engine of verbs with memory of its own, over fake_verbs.cpp, and without Python.
#pragma once

#include <sys/mman.h>

#include <cstdlib>

#include "netstack/verbs/verbs.h"

using namespace lamina;

constexpr std::uint64_t kSlots = 3, kBytes = 200;

struct Side {
  explicit Side(Teller& told) : teller(told) {
    bytes = verbs::Slots::bytes(kSlots, kBytes);
    base = static_cast<std::uint8_t*>(
        mmap(nullptr, 2 * bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    staging = {base, kSlots, kBytes};
    inbox = {base + bytes, kSlots, kBytes};
    end = std::make_unique<verbs::End>();
    const verbs::Port port{"fake0", 1, 0, 0, 0, 0};
    if (!end->open(port, {base, bytes}, {base + bytes, bytes}, verbs::depth_of(staging, inbox))) fail(end->fault());
    route = end->route();
    place = end->inbox();
  }
  ~Side() { munmap(base, 2 * bytes); }

  [[noreturn]] static void fail(const char* why) {
    std::printf("%s\n", why);
    std::exit(1);
  }

  void open(const Side& peer, int sock) {
    if (!end->connect(peer.route, peer.place)) fail(end->fault());
    engine = std::make_unique<verbs::Verbs>(std::move(end), sock, staging, inbox, 7, 20'000, 5'000'000'000, teller);
    if (!engine->start()) fail("no descriptors");
  }

  void await(Role role) {
    Status status;
    while ((status = engine->look(role)) == Status::pending) status = engine->wait(role, now_ns() + 1'000'000'000);
    char text[kTextBytes] = "stopped";
    if (status == Status::gone || status == Status::fault) engine->why(text);
    if (status != Status::ready && engine->look(role) != Status::ready) fail(text);
  }

  void send(std::uint64_t count) {
    const std::uint8_t tag[] = {1, 2, 3};
    for (std::uint64_t n = 0, seqno; n < count; ++n) {
      await(Role::sender);
      const Grant grant = engine->grant();
      std::memset(grant.data, int(n & 0xff), n % kBytes);
      if (engine->publish(n % kBytes, tag, sizeof tag, &seqno) != Status::ready) fail("publish");
    }
  }

  void receive(std::uint64_t count) {
    for (std::uint64_t n = 0; n < count; ++n) {
      await(Role::receiver);
      Message message;
      engine->take(&message);
      if (message.length != n % kBytes) fail("a length");
      for (std::uint64_t i = 0; i < message.length; ++i)
        if (message.data[i] != (n & 0xff)) fail("a byte");
      engine->release();
    }
  }

  Teller& teller;
  std::uint8_t* base;
  std::uint64_t bytes;
  verbs::Slots staging{}, inbox{};
  std::unique_ptr<verbs::End> end;
  verbs::Route route;
  verbs::Inbox place;
  std::unique_ptr<verbs::Verbs> engine;
};

inline void join(Side& a, Side& b) {
  int socks[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, socks)) Side::fail("no sockets");
  a.open(b, socks[0]);
  b.open(a, socks[1]);
}
