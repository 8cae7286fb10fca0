// A stand-in of NCCL's host API, as far as netstack/gin uses it. Communicators have one or two ranks, of this process
// or of two, and calls end once both have made them. nccl_check.cpp compares what it declares with NCCL's own headers.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "nccl/nccl_device.h"

using ncclComm_t = struct ncclComm*;
struct ncclUniqueId {
  char internal[128];
};
struct ncclConfig_t {
  std::size_t size;
  unsigned magic, version;
  int blocking;
};
using ncclDevComm_t = ncclDevComm;
struct ncclDevCommRequirements_t {
  std::size_t size;
  unsigned magic, version;
  void *resources, *teams;
  bool lsa;
  int unused[5];
  bool forced;
  int contexts, signals, counters, connection;
  bool exclusive;
  int depth, traffic_class, world;
  bool strong, va;
  int stride, type;
  bool runtime;
};
struct ncclCommProperties_t {
  std::size_t size;
  unsigned magic, version;
  int rank, nRanks, cudaDev, nvmlDev;
  bool deviceApiSupport, multimemSupport;
  int ginType, nLsaTeams;
  bool hostRmaSupport;
  int railedGinType;
  std::uint64_t commHash;
  int ginMinStride, ginConnectionType;
  bool ginSupport[64];
  std::size_t devCommRuntimeVersionSize;
};

namespace fake_nccl {

std::chrono::microseconds held_back{0};  // a put waits so long for one to overtake it, and so does the next one

class Network {
 public:
  ~Network() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      over_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }
  void add(Put put) {
    const std::lock_guard<std::mutex> lock(mutex_);
    puts_.emplace_back(std::move(put));
    changed_.notify_all();
  }
  bool is_idle() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return puts_.empty();
  }
  // What has not moved goes nowhere: its memory is about to go.
  void drop() {
    const std::lock_guard<std::mutex> lock(mutex_);
    puts_.clear();
  }
  bool stands_still = false;

 private:
  struct Held : Put {
    explicit Held(Put put) : Put(std::move(put)) {}
    bool moved = false, told = false;
  };

  // Each time one put of those that wait, a later one rather than the first; then what may be signalled.
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (unsigned n = 0;; ++n) {
      changed_.wait(lock, [this] { return over_ || (!puts_.empty() && !stands_still); });
      if (over_) return;
      changed_.wait_for(lock, held_back, [this] { return over_ || puts_.size() != 1; });
      if (puts_.empty()) continue;
      std::size_t which = puts_.size() - 1;
      if (n % 3 == 0) which = 0;
      while (puts_[which].moved) which = (which + 1) % puts_.size();
      puts_[which].move();
      puts_[which].moved = true;
      bool all = true;
      for (Held& put : puts_) {
        all = all && put.moved;
        if (put.told || !put.moved || (put.is_strong && !all)) continue;
        put.signal();
        put.told = true;
      }
      while (!puts_.empty() && puts_.front().told) puts_.pop_front();
      if (held_back.count() == 0) continue;
      lock.unlock();  // a poll sees what there is
      std::this_thread::sleep_for(held_back);
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Held> puts_;
  bool over_ = false;
  std::thread thread_{[this] { run(); }};
};

void add(Network* network, Put put) { network->add(std::move(put)); }
bool is_idle(Network* network) { return network->is_idle(); }

}  // namespace fake_nccl

namespace {

constexpr int kUnhandled = 1, kInvalidUsage = 5, kRemote = 6, kInProgress = 7;
constexpr unsigned kMagic = 0xcafebeef;
constexpr char kIdHead[] = "fakenccl\2";  // and a zero

// What both ranks see of a communicator.
struct Meeting {
  std::atomic<int> joined[2], registered[2], made[2];
  int process[2], file[2];
  std::size_t bytes[2];
};

std::atomic<long> live{0};
std::atomic<int> next_id{1}, failure{0}, slow{0};
std::atomic<long> misused{0};  // calls that the library answers with a crash or with nothing
std::atomic<bool> still{false};
std::atomic<int> held{-1};
std::map<void*, std::pair<int, std::size_t>> memories;  // file and bytes
std::set<void*> in_windows;  // those that a communicator still has
std::mutex memories_mutex;

}  // namespace

struct ncclComm {
  std::string name;
  int ranks, rank;
  Meeting* meeting;
  fake_nccl::Network networks[2];  // of each context
  std::function<int()> pending;  // kInProgress until the others have come
  std::set<void*> windows;  // memories
  long parts;  // windows and device sides

  bool both(std::atomic<int> (&step)[2]) const {
    for (int r = 0; r < ranks; ++r)
      if (!step[r]) return false;
    return true;
  }
};

namespace {

// Every call but a look and an abort needs a communicator that has ended its earlier calls.
bool busy(ncclComm_t comm) {
  if (comm->pending) ++misused;
  return bool(comm->pending);
}

// In so many looks as fake_nccl_slow says, then ``end`` has happened.
ncclResult_t ending(ncclComm_t comm, std::function<void()> end) {
  if (slow == 0) return end(), 0;
  comm->pending = [end, left = int(slow)]() mutable {
    if (--left > 0) return kInProgress;
    end();
    return 0;
  };
  return kInProgress;
}

void forget(void* at) {
  const std::lock_guard<std::mutex> lock(memories_mutex);
  in_windows.erase(at);
}

int unsupported(const char* name) { return std::getenv(name) ? 1 : 0; }

std::uint8_t* mapped(int process, int file, std::size_t bytes) {
  const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(file);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  return at == MAP_FAILED ? nullptr : static_cast<std::uint8_t*>(at);
}

}  // namespace

extern "C" {

long fake_nccl_live() { return live; }
// Every communicator reports it from here on; 0: none.
void fake_nccl_fail(int status) { failure = status; }
// So many looks pass until a device side, or a window, is no more.
void fake_nccl_slow(int looks) { slow = looks; }
long fake_nccl_misused() { return misused; }
// Nothing that is put moves.
void fake_nccl_stop(bool on) { still = on; }
// Nothing that is put by this context moves, of communicators that are made from here on; -1: all does.
void fake_nccl_hold(int context) { held = context; }

ncclResult_t ncclGetVersion(int* version) {
  *version = std::getenv("FAKE_NCCL_VERSION") ? std::atoi(std::getenv("FAKE_NCCL_VERSION")) : 23203;
  return 0;
}
const char* ncclGetErrorString(ncclResult_t status) {
  return status == kRemote ? "remote process exited or there was a network error" : "error of the stand-in";
}
const char* ncclGetLastError(ncclComm_t) { return "its last words"; }
// As in NCCL's, which begins with a number and a socket's address, the part that differs lies after a zero.
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::memset(id, 0, sizeof *id);
  std::memcpy(id->internal, kIdHead, sizeof kIdHead);
  std::snprintf(id->internal + sizeof kIdHead, sizeof id->internal - sizeof kIdHead, "/fake-nccl-%d-%d", int(getpid()),
                next_id++);
  return 0;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* made, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  if (config->magic != kMagic || config->size != 120 || config->blocking || ranks > 2) return kInvalidUsage;
  const char* const name = id.internal + sizeof kIdHead;
  if (std::memcmp(id.internal, kIdHead, sizeof kIdHead) || *name != '/') return kInvalidUsage;
  const int fd = shm_open(name, O_RDWR | O_CREAT, 0600);
  if (fd < 0 || ftruncate(fd, sizeof(Meeting))) return kUnhandled;
  void* at = mmap(nullptr, sizeof(Meeting), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  auto* comm = new ncclComm{name, ranks, rank, static_cast<Meeting*>(at), {}, {}, {}, 0};
  for (int context : {0, 1}) comm->networks[context].stands_still = still || context == held;
  *made = comm;
  ++live;
  if (unsupported("FAKE_NCCL_MEETS_NOBODY") && ranks > 1) {
    comm->pending = [] { return kInProgress; };
    return kInProgress;
  }
  comm->meeting->joined[rank] = 1;
  comm->pending = [comm] { return comm->both(comm->meeting->joined) ? 0 : kInProgress; };
  return kInProgress;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* status) {
  *status = failure ? int(failure) : comm->pending ? comm->pending() : 0;
  if (*status != kInProgress) comm->pending = {};
  return 0;
}
ncclResult_t ncclCommQueryProperties(ncclComm_t comm, ncclCommProperties_t* properties) {
  if (properties->magic != kMagic || busy(comm)) return kInvalidUsage;
  properties->rank = comm->rank;
  properties->nRanks = comm->ranks;
  properties->deviceApiSupport = true;
  properties->ginType = unsupported("FAKE_NCCL_HAS_NO_GIN") ? 0 : 3;
  properties->devCommRuntimeVersionSize = sizeof(ncclDevComm);
  return 0;
}
ncclResult_t ncclMemAlloc(void** at, std::size_t bytes) {
  const int fd = memfd_create("fake-nccl", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, off_t(bytes))) return kUnhandled;
  *at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  const std::lock_guard<std::mutex> lock(memories_mutex);
  memories[*at] = {fd, bytes};
  ++live;
  return 0;
}
ncclResult_t ncclMemFree(void* at) {
  const std::lock_guard<std::mutex> lock(memories_mutex);
  const auto memory = memories.at(at);
  if (in_windows.count(at)) ++misused;
  munmap(at, memory.second);
  close(memory.first);
  memories.erase(at);
  --live;
  return 0;
}
// Strict: both ranks give as many bytes, of ncclMemAlloc.
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* at, std::size_t bytes, ncclWindow_t* window, int flags) {
  if (!(flags & 1) || busy(comm)) return kInvalidUsage;
  Meeting& meeting = *comm->meeting;
  {
    const std::lock_guard<std::mutex> lock(memories_mutex);
    if (!memories.count(at)) return kInvalidUsage;
    meeting.file[comm->rank] = memories.at(at).first;
    in_windows.insert(at);
  }
  comm->windows.insert(at);
  ++comm->parts;
  meeting.process[comm->rank] = int(getpid());
  meeting.bytes[comm->rank] = bytes;
  meeting.registered[comm->rank] = 1;
  ++live;
  comm->pending = [comm, at, bytes, window] {
    Meeting& both = *comm->meeting;
    if (!comm->both(both.registered)) return kInProgress;
    if (unsupported("FAKE_NCCL_REGISTERS_NOTHING")) return kInProgress;
    const int peer = 1 - comm->rank;
    if (both.bytes[peer] != bytes) return kInvalidUsage;
    auto* made = new ncclWindow_vidmem{{}, bytes};
    made->of_rank[comm->rank] = static_cast<std::uint8_t*>(at);
    made->of_rank[peer] = mapped(both.process[peer], both.file[peer], bytes);
    *window = made;
    return made->of_rank[peer] ? 0 : kUnhandled;
  };
  return kInProgress;
}
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
  if (busy(comm)) return kInvalidUsage;
  return ending(comm, [comm, window] {
    for (auto& network : comm->networks) network.drop();
    munmap(window->of_rank[1 - comm->rank], window->bytes);
    forget(window->of_rank[comm->rank]);
    comm->windows.erase(window->of_rank[comm->rank]);
    delete window;
    --comm->parts;
    --live;
  });
}
ncclResult_t ncclDevCommCreate(ncclComm_t comm, const ncclDevCommRequirements_t* wanted, ncclDevComm_t* made) {
  const bool suits = wanted->magic == kMagic && wanted->forced && (wanted->contexts == 1 || wanted->contexts == 2) &&
                     wanted->connection == 1 && wanted->depth > 0 && wanted->strong && wanted->va && wanted->runtime;
  if (!suits || busy(comm)) return kInvalidUsage;
  comm->meeting->made[comm->rank] = 1;
  ++comm->parts;
  ++live;
  comm->pending = [comm, made, asked = unsigned(wanted->contexts)] {
    if (unsupported("FAKE_NCCL_MAKES_NO_DEVICE_SIDE")) return kInProgress;
    if (!comm->both(comm->meeting->made)) return kInProgress;
    const unsigned contexts = unsupported("FAKE_NCCL_HAS_ONE_CONTEXT") ? 1 : asked;
    *made = {kMagic, 23203, comm->rank, comm->ranks, contexts, {&comm->networks[0], &comm->networks[1]}};
    return 0;
  };
  return kInProgress;
}
ncclResult_t ncclDevCommDestroy(ncclComm_t comm, const ncclDevComm_t*) {
  if (busy(comm)) return kInvalidUsage;
  return ending(comm, [comm] {
    --comm->parts;
    --live;
  });
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  for (void* at : comm->windows) forget(at);
  live -= comm->parts;
  munmap(comm->meeting, sizeof(Meeting));
  shm_unlink(comm->name.c_str());
  delete comm;
  --live;
  return 0;
}

}  // extern "C"
