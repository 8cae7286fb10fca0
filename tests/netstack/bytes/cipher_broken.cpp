// A cipher that cannot work, since its library is none: nothing of what goes through a guard stays in clear.
#include <cstdio>
#include <cstring>

#include "netstack/host/frame.h"

using namespace lamina;

int main() {
  setenv("LAMINA_LIBCRYPTO", "/nowhere/libcrypto.so", 1);
  const std::uint8_t key[kKeyBytes] = {7};
  Guard guard(key, true);
  std::uint8_t payload[100];
  std::memset(payload, 'x', sizeof payload);
  Frame frame{};
  std::memset(&frame, 'y', kFrameBytes - kCheckBytes);
  frame.length = sizeof payload;
  close_frame(&frame, guard, 0, payload);
  unsigned left = 0;
  for (std::uint8_t byte : payload) left += byte != 0;
  for (std::uint64_t i = 0; i < kFrameBytes; ++i) left += bytes_of(&frame)[i] != 0;
  std::printf("sound %d left %u\n", guard.sound(), left);
}
