// A stream whose peer sends allowed frames: credit that is known, and more of it as fast as it is read. `recv` of that
// socket is ours. Prints whether a wait of 20 ms was over before the peer was.
#include <dlfcn.h>

#include <vector>

#include "netstack/host/stream.h"

using namespace lamina;

namespace {

constexpr std::uint64_t kSlots = 2, kBytes = 64, kFrames = 2'000'000;

int flooded = -1;
std::uint64_t sent = 0;
std::vector<std::uint8_t> unread;

void send_frame() {
  Frame frame{};
  Guard guard;
  frame.kind = kCredit;
  close_frame(&frame, guard, sent++, nullptr);
  unread.insert(unread.end(), bytes_of(&frame), bytes_of(&frame) + kFrameBytes);
}

}  // namespace

extern "C" ssize_t recv(int sock, void* to, std::size_t room, int flags) {
  static const auto real = reinterpret_cast<ssize_t (*)(int, void*, std::size_t, int)>(dlsym(RTLD_NEXT, "recv"));
  if (sock != flooded) return real(sock, to, room, flags);
  while (unread.size() < room && sent < kFrames) send_frame();
  const std::size_t bytes = std::min(room, unread.size());
  if (!bytes) return errno = EAGAIN, -1;
  std::copy_n(unread.begin(), bytes, static_cast<std::uint8_t*>(to));
  unread.erase(unread.begin(), unread.begin() + std::ptrdiff_t(bytes));
  return ssize_t(bytes);
}

int main() {
  Teller teller;
  std::vector<std::uint8_t> out(Outbox::bytes(kSlots, kBytes)), in(Slots::bytes(kSlots, kBytes));
  int socks[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, socks)) return 1;
  Stream stream(socks[0], {out.data(), kSlots, kBytes}, {in.data(), kSlots, kBytes}, 0, Guard(), Guard(), 20'000,
                5'000'000'000, teller);
  if (!stream.start()) return 1;
  flooded = socks[0];
  const std::uint64_t deadline = now_ns() + 20'000'000;
  Status status = Status::pending;
  while (status == Status::pending && now_ns() < deadline) status = stream.wait(Role::receiver, deadline);
  std::printf("%s, %s\n", status == Status::pending ? "nothing came" : "something came",
              sent < kFrames ? "in time" : "once the peer had done");
  stream.stop(kClosed, "", 0);
  stream.shut();
}
