// Prints the commands of verbs/mailbox.h, for the values with which mlx5_mailbox.txt was made: a name, then words of four
// bytes.
#include "netstack/verbs/mailbox.h"

#include <cstdio>

using namespace lamina::mlx5;

namespace {

void show(const char* name, const Mailbox& mailbox) {
  std::printf("%s", name);
  for (std::size_t i = 0; i < Mailbox::kBytes; ++i) std::printf(i % 4 ? "%02x" : " %02x", mailbox.data()[i]);
  std::puts("");
}

}  // namespace

int main() {
  const Rings rings{0x11223344, 512, 128, 0x4000, 0x8000, 0x10000, 0x10040};
  const Owner owner{0xabcdef, 0x2a, 0x654321};
  const Patience patience{14, 7, 6, 12};
  Path path{2,
            3,
            3,
            0x6a,
            64,
            5,
            true,
            0xb1b2,
            {2, 0x11, 0x22, 0x33, 0x44, 0x55},
            0xc123,
            {0xfe, 0x80, 0, 0, 0, 0, 0, 0, 2, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77}};
  constexpr std::uint32_t kPair = 0x123456;
  show("queue", create_queue(rings, owner));
  show("pair", create_pair(rings, owner, 0x777777));
  show("init", to_init(kPair, path));
  show("receive-ethernet", to_receive(kPair, path, 0xfedcba, 0x010203, 5, patience));
  path.is_ethernet = false;
  show("receive-infiniband", to_receive(kPair, path, 0xfedcba, 0x010203, 5, patience));
  show("send", to_send(kPair, path, 0x0a0b0c, patience));
  show("error", change(kToError, kPair));
}
