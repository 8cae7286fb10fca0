// Two engines of verbs, each with a thread that sends and one that receives, over fake_verbs.cpp: `argv[1]` is that,
// compiled; `argv[2]` messages go each way. Compiled with a sanitizer, and without Python.
#include <thread>

#include "verbs_side.h"

int main(int, char** argv) {
  if (!dlopen(argv[1], RTLD_NOW)) Side::fail(dlerror());  // which is then what the engine finds under its name
  const std::uint64_t count = std::strtoull(argv[2], nullptr, 10);
  Teller teller;
  Side a(teller), b(teller);
  join(a, b);
  std::thread threads[] = {std::thread([&] { a.send(count); }), std::thread([&] { b.send(count); }),
                           std::thread([&] { a.receive(count); }), std::thread([&] { b.receive(count); })};
  for (std::thread& thread : threads) thread.join();
  // One leaves while the other waits.
  std::thread left([&] {
    while (b.engine->look(Role::receiver) == Status::pending) b.engine->wait(Role::receiver, now_ns() + 1'000'000'000);
  });
  a.engine->stop(kClosed, "", 0);
  left.join();
  char text[kTextBytes];
  b.engine->why(text);
  b.engine->stop(kClosed, "", 0);
  a.engine->shut();
  b.engine->shut();
  std::printf("messages %llu; %s\n", static_cast<unsigned long long>(count), text);
}
