// Prints csrc/netstack/layout.h's layout of a channel, for a test that compares it with the fields themselves.
//
//     layout_check            a line for each struct's bytes, and for each of its fields: name, offset, bytes
//     layout_check NAME <file  the struct NAME in binary -> a line for each field: name, value
#include <cstdio>
#include <cstring>

#include "netstack/layout.h"

using namespace lamina;

namespace {

template <class Channel>
void tell(const char* name) {
  std::printf("%s %zu\n", name, sizeof(Channel));
  for (const device::Field& field : device::fields_of<Channel>())
    std::printf("%s %zu %zu\n", field.name, field.offset, field.bytes);
}

void show(const char* name, unsigned long long value) { std::printf("%s %llu\n", name, value); }
void show(const char* name, const void* at) {
  show(name, static_cast<unsigned long long>(reinterpret_cast<std::size_t>(at)));
}

#define SHOW(field) show(#field, c.field)

void show_all(const device::Ends& c) {
  SHOW(staging), SHOW(inbox), SHOW(abort), SHOW(out.count), SHOW(out.bytes), SHOW(in.count), SHOW(in.bytes), SHOW(zero);
  SHOW(granted), SHOW(published), SHOW(credited), SHOW(received), SHOW(released), SHOW(reported);
}

void show_all(const memory::Channel& c) {
  show_all(static_cast<const device::Ends&>(c));
  SHOW(near);
}

void show_all(const mlx5::Channel& c) {
  show_all(static_cast<const device::Ends&>(c));
  SHOW(queue.ring), SHOW(queue.record), SHOW(queue.doorbell), SHOW(queue.completions), SHOW(queue.seen);
  SHOW(queue.number), SHOW(queue.blocks), SHOW(queue.cqes), SHOW(queue.alternate), SHOW(queue.reserved);
  SHOW(queue.committed), SHOW(queue.completed), SHOW(queue.polled), SHOW(queue.doorbells), SHOW(queue.syndrome);
  SHOW(queue.held), SHOW(queue.near);
  SHOW(peer.address), SHOW(peer.key), SHOW(source.address), SHOW(source.key), SHOW(credits);
  SHOW(lane);
}

template <class Channel>
int read_and_show() {
  Channel c;
  if (std::fread(&c, sizeof c, 1, stdin) != 1) return 1;
  show_all(c);
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1)
    return std::strcmp(arguments[1], "memory") ? read_and_show<mlx5::Channel>() : read_and_show<memory::Channel>();
  tell<memory::Channel>("memory"), tell<mlx5::Channel>("mlx5");
}
