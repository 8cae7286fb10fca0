// Ping-pong over plain sockets and pipes, and over MPI: the baselines of pingpong.py that need no Python.
//
//   baselines KIND CORE CORE WARM_UP SIZE:ROUNDS...
//
// KIND: tcp, unix, pipe (calls that block), tcp-poll, unix-poll (calls that do not, in a loop); mpi (built with -DWITH_MPI,
// started by mpirun with two ranks). A message leaves from one buffer and arrives in another; its bytes are compared
// after the clock has stopped. One line for each size: SIZE, then p50 and p99 of half a round trip in microseconds.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <string>
#include <vector>

#ifdef WITH_MPI
#define OMPI_SKIP_MPICXX
#include <mpi.h>
#endif

namespace {

using Bytes = std::vector<std::uint8_t>;

[[noreturn]] void fail(const char* what) {
  std::perror(what);
  std::exit(1);
}

double now_us() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) * 1e6 + double(t.tv_nsec) / 1e3;
}

void bind_to(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(std::size_t(core), &set);
  if (sched_setaffinity(0, sizeof set, &set)) fail("sched_setaffinity");
}

struct Wire {
  std::function<void(const Bytes&)> put;
  std::function<void(Bytes&)> get;
};

void move_all(int fd, std::uint8_t* at, std::size_t left, bool out, bool polls, bool is_socket) {
  const int flags = polls ? MSG_DONTWAIT : 0;
  while (left) {
    const ssize_t n = !is_socket ? (out ? write(fd, at, left) : read(fd, at, left))
                      : out      ? send(fd, at, left, flags)
                                 : recv(fd, at, left, flags);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (n <= 0) fail("the other side is gone");
    at += n;
    left -= std::size_t(n);
  }
}

Wire wire_of(int in, int out, bool polls, bool is_socket) {
  return {[=](const Bytes& m) { move_all(out, const_cast<std::uint8_t*>(m.data()), m.size(), true, polls, is_socket); },
          [=](Bytes& m) { move_all(in, m.data(), m.size(), false, polls, is_socket); }};
}

void ping_pong(const Wire& wire, bool leads, std::size_t bytes, int warm_up, int rounds) {
  Bytes payloads[3], mine(bytes);
  for (std::size_t k = 0; k < 3; ++k) {
    payloads[k].resize(bytes);
    for (std::size_t i = 0; i < bytes; ++i) payloads[k][i] = std::uint8_t(i * 131 + i / 251 + k * 77);
  }
  std::vector<double> times;
  for (int n = 0; n < warm_up + rounds; ++n) {
    const Bytes& payload = payloads[n % 3];
    const double start = now_us();
    if (leads) wire.put(payload);
    wire.get(mine);
    if (!leads) wire.put(payload);
    if (leads && n >= warm_up) times.push_back((now_us() - start) / 2);
    if (mine != payload) {
      std::fprintf(stderr, "message %d differs from what was sent\n", n);
      std::exit(1);
    }
  }
  if (!leads) return;
  std::sort(times.begin(), times.end());
  std::printf("%zu %.4f %.4f\n", bytes, times[times.size() / 2], times[times.size() * 99 / 100]);
  std::fflush(stdout);
}

void tcp_pair(int fds[2]) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* plain = reinterpret_cast<sockaddr*>(&address);
  if (bind(listener, plain, length) || listen(listener, 1) || getsockname(listener, plain, &length)) fail("listen");
  fds[0] = socket(AF_INET, SOCK_STREAM, 0);
  if (connect(fds[0], plain, length)) fail("connect");
  fds[1] = accept(listener, nullptr, nullptr);
  for (int side = 0; side < 2; ++side) setsockopt(fds[side], IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  close(listener);
}

struct Run {
  std::size_t bytes;
  int rounds;
};

void run_all(const Wire& wire, bool leads, int warm_up, const std::vector<Run>& runs) {
  for (const Run& run : runs) ping_pong(wire, leads, run.bytes, std::min(warm_up, run.rounds), run.rounds);
}

int over_descriptors(const std::string& kind, const int cores[2], int warm_up, const std::vector<Run>& runs) {
  int fds[2], there[2], back[2];
  const bool polls = kind.find("-poll") != std::string::npos, pipes = kind == "pipe";
  if (pipes) {
    if (pipe(there) || pipe(back)) fail("pipe");
  } else if (kind.rfind("tcp", 0) == 0) {
    tcp_pair(fds);
  } else if (socketpair(AF_UNIX, SOCK_STREAM, 0, fds)) {
    fail("socketpair");
  }
  const pid_t child = fork();
  const bool leads = child != 0;
  bind_to(cores[leads ? 0 : 1]);
  const Wire wire = pipes ? wire_of(leads ? back[0] : there[0], leads ? there[1] : back[1], false, false)
                          : wire_of(fds[leads ? 0 : 1], fds[leads ? 0 : 1], polls, true);
  run_all(wire, leads, warm_up, runs);
  if (!leads) _exit(0);
  int status = 0;
  waitpid(child, &status, 0);
  return status != 0;
}

#ifdef WITH_MPI
int over_mpi(const int cores[2], int warm_up, const std::vector<Run>& runs) {
  MPI_Init(nullptr, nullptr);
  int rank;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  bind_to(cores[rank]);
  const int other = 1 - rank;
  const Wire wire{
      [=](const Bytes& m) { MPI_Send(m.data(), int(m.size()), MPI_BYTE, other, 0, MPI_COMM_WORLD); },
      [=](Bytes& m) { MPI_Recv(m.data(), int(m.size()), MPI_BYTE, other, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE); }};
  run_all(wire, rank == 0, warm_up, runs);
  MPI_Finalize();
  return 0;
}
#endif

}  // namespace

int main(int argc, char** argv) {
  if (argc < 6) return std::fprintf(stderr, "usage: %s KIND CORE CORE WARM_UP SIZE:ROUNDS...\n", argv[0]), 2;
  const std::string kind = argv[1];
  const int cores[2] = {std::atoi(argv[2]), std::atoi(argv[3])}, warm_up = std::atoi(argv[4]);
  std::vector<Run> runs;
  for (int i = 5; i < argc; ++i) {
    char* colon;
    const std::size_t bytes = std::strtoull(argv[i], &colon, 10);
    runs.push_back({bytes, std::atoi(colon + 1)});
  }
#ifdef WITH_MPI
  if (kind == "mpi") return over_mpi(cores, warm_up, runs);
#endif
  return over_descriptors(kind, cores, warm_up, runs);
}
