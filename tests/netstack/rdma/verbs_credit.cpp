// One release that two threads see is sent once: `argv[1]` is fake_verbs.cpp, compiled. What the second thread does, it
// does at the worst moment: when the first has found that it owes credit, and is about to take the lock.
#include <pthread.h>

#include <functional>
#include <utility>

#include "verbs_side.h"

thread_local std::function<void()> before_lock;  // not the teller's

extern "C" int pthread_mutex_trylock(pthread_mutex_t* mutex) noexcept {
  static const auto real = reinterpret_cast<int (*)(pthread_mutex_t*)>(dlsym(RTLD_NEXT, "pthread_mutex_trylock"));
  if (const auto act = std::exchange(before_lock, nullptr)) act();
  return real(mutex);
}

int main(int, char** argv) {
  void* const fake = dlopen(argv[1], RTLD_NOW);
  if (!fake) Side::fail(dlerror());
  const auto words = reinterpret_cast<std::uint32_t (*)(std::uint32_t)>(dlsym(fake, "fake_words"));
  Teller teller;
  Side a(teller), b(teller);
  join(a, b);
  a.send(kSlots);
  Message message;
  for (std::uint64_t n = 0; n < kSlots; ++n) {
    b.await(Role::receiver);
    b.engine->take(&message);
  }
  bool acted = false;
  before_lock = [&] {
    b.engine->wait(Role::sender, 0);
    acted = true;
  };
  b.engine->release();
  std::printf("acted %d, told %u\n", int(acted), words(b.route.number));
  for (Side* side : {&a, &b}) side->engine->stop(kClosed, "", 0);
  for (Side* side : {&a, &b}) side->engine->shut();
}
