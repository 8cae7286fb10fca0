// Many jobs on a pool of threads, for -fsanitize=thread: `pool_threads JOBS SPINS`. Jobs have few or many pieces, ask for
// few or all threads, and threads are added between them. Exits with 0 if every job was whole when it was over.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "pool.h"

namespace {

constexpr std::size_t kThreads = 4, kPieces = 50;

void require(bool holds, const char* claim) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", claim);
  std::exit(1);
}

// Each thread has a piece, and the caller, which has nothing left to do, waits for the others, asleep or not.
void wait_for_slow_threads(lamina::Pool& pool) {
  std::atomic<std::size_t> begun{0};
  std::vector<int> slow(kThreads);
  pool.each(kThreads, kThreads, [&](std::size_t, std::size_t thread) {
    begun.fetch_add(1);
    while (begun.load() < kThreads) std::this_thread::yield();  // so that no thread takes two
    if (thread == 0) return;
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(2);
    while (std::chrono::steady_clock::now() < end) continue;
    slow[thread] = 1;
  });
  for (std::size_t thread = 1; thread < kThreads; ++thread) require(slow[thread] == 1, "each thread is waited for");
}

}  // namespace

int main(int, char** arguments) {
  const int jobs = std::atoi(arguments[1]), spins = std::atoi(arguments[2]);
  alarm(60);  // a thread that is never woken
  std::mt19937 random(1);
  lamina::Pool pool(1, spins);
  std::vector<int> done(kPieces);  // plain memory: a race on a piece is seen
  std::vector<int> of_thread(kThreads);  // likewise, on a thread's number
  for (int job = 1; job <= jobs; ++job) {
    if (job % (jobs / int(kThreads)) == 0) pool.grow(std::min(pool.size() + 1, kThreads));
    const std::size_t count = random() % 3 ? random() % kPieces : random() % 3, threads = 1 + random() % kThreads;
    pool.each(count, threads, [&](std::size_t piece, std::size_t thread) {
      require(piece < count && thread < threads && thread < pool.size(), "a piece and a thread of this job");
      ++done[piece], ++of_thread[thread];
      for (volatile int i = 0; i < 50; ++i) continue;
    });
    int all = 0;
    for (std::size_t i = 0; i < kPieces; ++i) require(done[i] == int(i < count), "every piece once"), done[i] = 0;
    for (int& n : of_thread) all += n, n = 0;
    require(all == int(count), "pieces counted by thread");
  }
  for (int job = 0; job < 20; ++job) wait_for_slow_threads(pool);
  std::printf("jobs %d, threads %zu\n", jobs, pool.size());
}
