// A stand-in of libcuda and NVRTC: kernels.cu runs on the CPU, a block as one thread, a stream as a thread with a
// queue; shared device memory is a memfd. It is strict where the driver is: no call without a current context, no
// access to memory before cuMemSetAccess. With -DWITH_CUDA_H its functions have to be those that cuda.h declares.
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#define __global__
#define __launch_bounds__(threads)
#define __device__
#define __noinline__
#define __shared__ static thread_local
struct uint4 {
  unsigned x, y, z, w;
};
static constexpr struct {
  unsigned x;
} threadIdx{0}, blockDim{1};
static thread_local struct {
  unsigned x;
} blockIdx{0}, gridDim{1};
static inline void __syncthreads() {}
template <class T>
static inline T __ldcg(const T* at) {
  return *at;
}
#define LAMINA_GIN
#include "netstack/kernels/kernels.cu"

static_assert(sizeof(Memory) == 15 * 8 && sizeof(Mlx5) == 33 * 8 && sizeof(Gin) == 20 * 8);

#if defined(WITH_CUDA_H)
#define uint4 cuda_uint4
#include <cuda.h>
#undef uint4
#else
using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUmemGenericAllocationHandle = unsigned long long;
using CUmemAllocationHandleType = int;
using CUmemAllocationGranularity_flags = int;
using CUdevice_attribute = int;
using CUmemRangeHandleType = int;
using CUstreamCaptureMode = int;
using CUcontext = struct CUctx_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
using CUstream = struct CUstream_st*;
using CUevent = struct CUevent_st*;
using CUgraph = struct CUgraph_st*;
using CUgraphExec = struct CUgraphExec_st*;
struct CUmemLocation {
  int type, id;
};
struct CUmemAllocationProp {
  int type, requestedHandleTypes;
  CUmemLocation location;
  void* win32HandleMetaData;
  unsigned char allocFlags[8];
};
struct CUmemAccessDesc {
  CUmemLocation location;
  int flags;
};
#endif

namespace {

constexpr std::size_t kGranularity = 1 << 16;
const auto kOkay = CUresult(0), kInvalid = CUresult(1), kNoContext = CUresult(201), kNotFound = CUresult(500);
const auto kRegistered = CUresult(712), kNotPermitted = CUresult(800);
thread_local int current = 0;
std::mutex registered_mutex;
std::map<std::uintptr_t, int> mapped;  // the file of shared memory that is mapped, by its address
std::map<std::uintptr_t, std::uintptr_t> registered;  // host memory that kernels reach: (begin, end)
std::atomic<long> live{0};  // allocations, mappings, registrations, streams, graphs, contexts
std::atomic<long> compilations{0};  // by NVRTC

#define NEEDS_CONTEXT \
  if (!current) return kNoContext

using Work = std::function<void()>;

struct Stream {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Work> queue;
  bool busy = false, over = false, capturing = false;
  std::vector<Work> captured;
  std::thread thread{[this] { run(); }};

  void add(Work work) {
    const std::lock_guard<std::mutex> lock(mutex);
    (capturing ? captured : queue).push_back(std::move(work));
    changed.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return queue.empty() && !busy; });
  }
  void run() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      changed.wait(lock, [this] { return over || !queue.empty(); });
      if (queue.empty()) return;
      const Work work = std::move(queue.front());
      queue.erase(queue.begin());
      busy = true;
      lock.unlock();
      work();
      lock.lock();
      busy = false;
      changed.notify_all();
    }
  }
};

std::mutex streams_mutex;
std::vector<Stream*> streams;

// What the default stream, for which no kernel's stream here waits, has not done yet: as a driver may, copies out of
// pageable memory and memsets return before.
std::mutex late_mutex;
std::vector<Work> late;

void do_late() {
  const std::lock_guard<std::mutex> lock(late_mutex);
  for (const Work& work : late) work();
  late.clear();
}
void do_later(Work work) {
  const std::lock_guard<std::mutex> lock(late_mutex);
  late.push_back(std::move(work));
}

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  std::uint64_t recorded = 0, reached = 0;  // records that were put on streams, and that streams have come to

  void reach(std::uint64_t n) {
    const std::lock_guard<std::mutex> lock(mutex);
    reached = std::max(reached, n);
    changed.notify_all();
  }
  void wait(std::uint64_t n) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this, n] { return reached >= n; });
  }
};

// A kernel with the arguments that `values` points to, copied now.
using Kernel = std::function<Work(void** values)>;

template <class... A, std::size_t... I>
Work bound(void (*kernel)(A...), void** values, std::index_sequence<I...>) {
  return [kernel, copy = std::make_tuple(*static_cast<A*>(values[I])...)] { std::apply(kernel, copy); };
}

template <class... A>
Kernel kernel(void (*function)(A...)) {
  static_assert(((sizeof(A) == 8) && ...));
  return [function](void** values) { return bound(function, values, std::index_sequence_for<A...>{}); };
}

std::map<std::string, Kernel>& kernels() {
  static std::map<std::string, Kernel> all = {
#define KERNEL(name) {#name, kernel(name)}
#define KERNELS(link)                                                                                                  \
  KERNEL(lamina_##link##_send), KERNEL(lamina_##link##_send_two), KERNEL(lamina_##link##_receive),                     \
      KERNEL(lamina_##link##_receive_due), KERNEL(lamina_##link##_reserve), KERNEL(lamina_##link##_put),               \
      KERNEL(lamina_##link##_take), KERNEL(lamina_##link##_release), KERNEL(lamina_##link##_rounds),                   \
      KERNEL(lamina_##link##_send_begin), KERNEL(lamina_##link##_send_fill), KERNEL(lamina_##link##_send_end),         \
      KERNEL(lamina_##link##_receive_begin), KERNEL(lamina_##link##_due_begin), KERNEL(lamina_##link##_receive_drain), \
      KERNEL(lamina_##link##_receive_end), KERNEL(lamina_##link##_send_all), KERNEL(lamina_##link##_send_all_begin),   \
      KERNEL(lamina_##link##_send_all_fill), KERNEL(lamina_##link##_send_all_end),                                     \
      KERNEL(lamina_##link##_receive_all), KERNEL(lamina_##link##_receive_all_begin),                                  \
      KERNEL(lamina_##link##_receive_all_drain), KERNEL(lamina_##link##_receive_all_end)
      KERNELS(memory),          KERNELS(mlx5),        KERNEL(lamina_mlx5_flush), KERNELS(gin),
      KERNEL(lamina_gin_flush), KERNEL(lamina_stamp),
  };
  return all;
}

template <class T>
T* pointer(std::uint64_t value) {
  return reinterpret_cast<T*>(std::uintptr_t(value));
}

}  // namespace

extern "C" {

__attribute__((weak)) void fake_mlx5_export(int file, std::uint64_t address);

long fake_cuda_live() { return live; }
long fake_cuda_compilations() { return compilations; }

CUresult cuInit(unsigned) { return kOkay; }
CUresult cuGetErrorName(CUresult error, const char** text) {
  *text = error == kNoContext ? "CUDA_ERROR_INVALID_CONTEXT" : "CUDA_ERROR_OF_THE_STAND_IN";
  return kOkay;
}
CUresult cuDeviceGet(CUdevice* device, int index) {
  *device = 40 + index;
  return index < 2 ? kOkay : kInvalid;
}
CUresult cuDeviceGetPCIBusId(char* text, int bytes, CUdevice device) {
  std::snprintf(text, std::size_t(bytes), "0000:A%d:00.0", device - 40);
  return kOkay;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute name, CUdevice) {
  const bool shares = !std::getenv("FAKE_CUDA_SHARES_NOTHING");
  const bool exports = fake_mlx5_export && !std::getenv("FAKE_CUDA_EXPORTS_NOTHING");
  switch (int(name)) {
    case 75: *value = 9; break;
    case 102:
    case 103:
    case 110: *value = shares; break;
    case 118: *value = std::getenv("FAKE_CUDA_ORDERS_NOTHING") ? 0 : 100; break;
    case 124: *value = exports; break;
    default: *value = 0;
  }
  return kOkay;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  ++live;
  *context = pointer<std::remove_pointer_t<CUcontext>>(0x1234);
  return kOkay;
}
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) {
  --live;
  return kOkay;
}
CUresult cuCtxPushCurrent_v2(CUcontext context) {
  if (std::uintptr_t(context) != 0x1234) return kInvalid;
  ++current;
  return kOkay;
}
CUresult cuCtxPopCurrent_v2(CUcontext*) {
  NEEDS_CONTEXT;
  --current;
  return kOkay;
}

CUresult cuCtxSynchronize() {
  NEEDS_CONTEXT;
  do_late();
  const std::lock_guard<std::mutex> lock(streams_mutex);  // no thread makes or destroys one meanwhile
  for (Stream* stream : streams) stream->wait();
  return kOkay;
}

CUresult cuMemGetAllocationGranularity(std::size_t* bytes, const CUmemAllocationProp* p,
                                       CUmemAllocationGranularity_flags) {
  NEEDS_CONTEXT;
  *bytes = kGranularity;
  return int(p->type) == 1 && int(p->location.type) == 1 ? kOkay : kInvalid;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, std::size_t bytes, const CUmemAllocationProp* p,
                     unsigned long long) {
  NEEDS_CONTEXT;
  if (bytes % kGranularity || int(p->requestedHandleTypes) != 1) return kInvalid;
  const int fd = memfd_create("fake-cuda", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, off_t(bytes))) return kInvalid;
  *handle = CUmemGenericAllocationHandle(fd);
  ++live;
  return kOkay;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  NEEDS_CONTEXT;
  --live;
  return close(int(handle)) ? kInvalid : kOkay;
}
CUresult cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                      unsigned long long) {
  NEEDS_CONTEXT;
  const int fd = dup(int(handle));
  std::memcpy(out, &fd, sizeof fd);
  return int(type) == 1 && fd >= 0 ? kOkay : kInvalid;
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* in, CUmemAllocationHandleType) {
  NEEDS_CONTEXT;
  const int theirs = int(std::intptr_t(in));
  char name[64] = {};
  const std::string link = "/proc/self/fd/" + std::to_string(theirs);
  if (readlink(link.c_str(), name, sizeof name - 1) < 0 || !std::strstr(name, "fake-cuda")) return kInvalid;
  const int fd = dup(theirs);
  if (fd < 0) return kInvalid;
  *handle = CUmemGenericAllocationHandle(fd);
  ++live;
  return kOkay;
}
CUresult cuMemAddressReserve(CUdeviceptr* at, std::size_t bytes, std::size_t, CUdeviceptr, unsigned long long) {
  NEEDS_CONTEXT;
  void* place = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *at = CUdeviceptr(std::uintptr_t(place));
  ++live;
  return place == MAP_FAILED ? kInvalid : kOkay;
}
CUresult cuMemAddressFree(CUdeviceptr at, std::size_t bytes) {
  NEEDS_CONTEXT;
  --live;
  return munmap(pointer<void>(at), bytes) ? kInvalid : kOkay;
}
CUresult cuMemMap(CUdeviceptr at, std::size_t bytes, std::size_t, CUmemGenericAllocationHandle handle,
                  unsigned long long) {
  NEEDS_CONTEXT;
  struct stat info = {};
  if (fstat(int(handle), &info) || std::size_t(info.st_size) < bytes) return kInvalid;
  ++live;
  void* place = mmap(pointer<void>(at), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, int(handle), 0);
  const std::lock_guard<std::mutex> lock(registered_mutex);
  mapped[std::uintptr_t(at)] = int(handle);
  return place == MAP_FAILED ? kInvalid : kOkay;
}
CUresult cuMemUnmap(CUdeviceptr at, std::size_t bytes) {
  NEEDS_CONTEXT;
  do_late();
  --live;
  void* place = mmap(pointer<void>(at), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  return place == MAP_FAILED ? kInvalid : kOkay;
}
CUresult cuMemSetAccess(CUdeviceptr at, std::size_t bytes, const CUmemAccessDesc* access, std::size_t count) {
  NEEDS_CONTEXT;
  if (count != 1 || int(access->location.type) != 1 || int(access->flags) != 3) return kInvalid;
  return mprotect(pointer<void>(at), bytes, PROT_READ | PROT_WRITE) ? kInvalid : kOkay;
}
CUresult cuMemAlloc_v2(CUdeviceptr* at, std::size_t bytes) {
  NEEDS_CONTEXT;
  *at = CUdeviceptr(std::uintptr_t(std::aligned_alloc(256, (bytes + 255) / 256 * 256)));
  ++live;
  return kOkay;
}
CUresult cuMemFree_v2(CUdeviceptr at) {
  NEEDS_CONTEXT;
  do_late();
  std::free(pointer<void>(at));
  --live;
  return kOkay;
}
// Strict: no page twice.
CUresult cuMemHostRegister_v2(void* at, std::size_t bytes, unsigned flags) {
  NEEDS_CONTEXT;
  const auto first = reinterpret_cast<std::uintptr_t>(at);
  if (!at || !bytes || (flags != 3 && flags != 7)) return kInvalid;
  if (flags == 7 && std::getenv("FAKE_CUDA_RINGS_NOTHING")) return kNotPermitted;
  const std::lock_guard<std::mutex> lock(registered_mutex);
  for (const auto& [begin, end] : registered)
    if (first < end && begin < first + bytes) return kRegistered;
  registered[first] = first + bytes;
  ++live;
  return kOkay;
}
CUresult cuMemHostUnregister(void* at) {
  NEEDS_CONTEXT;
  const std::lock_guard<std::mutex> lock(registered_mutex);
  if (!registered.erase(reinterpret_cast<std::uintptr_t>(at))) return kInvalid;
  --live;
  return kOkay;
}
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* there, void* at, unsigned) {
  NEEDS_CONTEXT;
  *there = CUdeviceptr(reinterpret_cast<std::uintptr_t>(at));
  const std::lock_guard<std::mutex> lock(registered_mutex);
  return registered.count(reinterpret_cast<std::uintptr_t>(at)) ? kOkay : kInvalid;
}
// The file is known to the stand-in of a NIC's kernel driver, where there is one.
CUresult cuMemGetHandleForAddressRange(void* out, CUdeviceptr at, std::size_t bytes, CUmemRangeHandleType kind,
                                       unsigned long long) {
  NEEDS_CONTEXT;
  if (int(kind) != 1 || at % 4096 || bytes % 4096 || !fake_mlx5_export) return kInvalid;
  const std::lock_guard<std::mutex> lock(registered_mutex);
  const auto memory = mapped.find(std::uintptr_t(at));
  if (memory == mapped.end()) return kInvalid;
  const int file = dup(memory->second);
  std::memcpy(out, &file, sizeof file);
  fake_mlx5_export(file, at);
  return kOkay;
}
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, std::size_t bytes) {
  NEEDS_CONTEXT;
  do_late();
  const auto* const data = static_cast<const char*>(from);
  do_later(
      [to, data = std::vector<char>(data, data + bytes)] { std::copy(data.begin(), data.end(), pointer<char>(to)); });
  return kOkay;
}
CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, std::size_t bytes) {
  NEEDS_CONTEXT;
  do_late();
  std::memcpy(to, pointer<void>(from), bytes);
  return kOkay;
}
CUresult cuMemsetD8_v2(CUdeviceptr at, unsigned char value, std::size_t bytes) {
  NEEDS_CONTEXT;
  do_later([=] { std::memset(pointer<void>(at), value, bytes); });
  return kOkay;
}

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  NEEDS_CONTEXT;
  if (std::strcmp(static_cast<const char*>(image), "image")) return kInvalid;
  ++live;
  *module = pointer<std::remove_pointer_t<CUmodule>>(1);
  return kOkay;
}
CUresult cuModuleUnload(CUmodule) {
  NEEDS_CONTEXT;
  --live;
  return kOkay;
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  NEEDS_CONTEXT;
  const auto found = kernels().find(name);
  if (found == kernels().end()) return kNotFound;
  *function = reinterpret_cast<CUfunction>(&found->second);
  return kOkay;
}

CUresult cuStreamCreate(CUstream* stream, unsigned) {
  NEEDS_CONTEXT;
  ++live;
  auto* made = new Stream;
  const std::lock_guard<std::mutex> lock(streams_mutex);
  streams.push_back(made);
  *stream = reinterpret_cast<CUstream>(made);
  return kOkay;
}
CUresult cuStreamSynchronize(CUstream stream) {
  NEEDS_CONTEXT;
  if (!stream) return do_late(), kOkay;
  reinterpret_cast<Stream*>(stream)->wait();
  return kOkay;
}
CUresult cuStreamDestroy_v2(CUstream handle) {
  NEEDS_CONTEXT;
  auto* stream = reinterpret_cast<Stream*>(handle);
  {
    const std::lock_guard<std::mutex> lock(streams_mutex);
    streams.erase(std::find(streams.begin(), streams.end(), stream));
  }
  {
    const std::lock_guard<std::mutex> lock(stream->mutex);
    stream->over = true;
    stream->changed.notify_all();
  }
  stream->thread.join();
  delete stream;
  --live;
  return kOkay;
}
// Strict: what is captured is refused, as events of other streams would become parts of the graph.
CUresult cuEventCreate(CUevent* event, unsigned flags) {
  NEEDS_CONTEXT;
  ++live;
  *event = reinterpret_cast<CUevent>(new Event);
  return flags == 2 ? kOkay : kInvalid;
}
CUresult cuEventRecord(CUevent handle, CUstream on) {
  NEEDS_CONTEXT;
  auto* event = reinterpret_cast<Event*>(handle);
  auto* stream = reinterpret_cast<Stream*>(on);
  if (stream->capturing) return kInvalid;
  const std::lock_guard<std::mutex> lock(event->mutex);
  stream->add([event, n = ++event->recorded] { event->reach(n); });
  return kOkay;
}
CUresult cuStreamWaitEvent(CUstream on, CUevent handle, unsigned) {
  NEEDS_CONTEXT;
  auto* event = reinterpret_cast<Event*>(handle);
  auto* stream = reinterpret_cast<Stream*>(on);
  if (stream->capturing) return kInvalid;
  const std::lock_guard<std::mutex> lock(event->mutex);
  stream->add([event, n = event->recorded] { event->wait(n); });
  return kOkay;
}
CUresult cuEventSynchronize(CUevent handle) {
  NEEDS_CONTEXT;
  auto* event = reinterpret_cast<Event*>(handle);
  event->wait(event->recorded);
  return kOkay;
}
CUresult cuEventDestroy_v2(CUevent handle) {
  NEEDS_CONTEXT;
  delete reinterpret_cast<Event*>(handle);
  --live;
  return kOkay;
}
CUresult cuLaunchKernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
                        unsigned, CUstream stream, void** values, void**) {
  NEEDS_CONTEXT;
  if (!x || y != 1 || z != 1 || threads < 32) return kInvalid;
  reinterpret_cast<Stream*>(stream)->add([x, block = (*reinterpret_cast<Kernel*>(function))(values)] {
    gridDim.x = x;
    for (unsigned n = x; n; --n) blockIdx.x = n - 1, block();  // in no order that anybody may count on
  });
  return kOkay;
}
CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode) {
  NEEDS_CONTEXT;
  reinterpret_cast<Stream*>(stream)->capturing = true;
  return kOkay;
}
CUresult cuStreamEndCapture(CUstream handle, CUgraph* graph) {
  NEEDS_CONTEXT;
  auto* stream = reinterpret_cast<Stream*>(handle);
  stream->capturing = false;
  *graph = reinterpret_cast<CUgraph>(new std::vector<Work>(std::move(stream->captured)));
  stream->captured.clear();
  ++live;
  return kOkay;
}
CUresult cuGraphInstantiateWithFlags(CUgraphExec* ready, CUgraph graph, unsigned long long) {
  NEEDS_CONTEXT;
  *ready = reinterpret_cast<CUgraphExec>(new std::vector<Work>(*reinterpret_cast<std::vector<Work>*>(graph)));
  ++live;
  return kOkay;
}
CUresult cuGraphLaunch(CUgraphExec graph, CUstream stream) {
  NEEDS_CONTEXT;
  for (const Work& work : *reinterpret_cast<std::vector<Work>*>(graph)) reinterpret_cast<Stream*>(stream)->add(work);
  return kOkay;
}
CUresult cuGraphDestroy(CUgraph graph) {
  NEEDS_CONTEXT;
  delete reinterpret_cast<std::vector<Work>*>(graph);
  --live;
  return kOkay;
}
CUresult cuGraphExecDestroy(CUgraphExec graph) {
  NEEDS_CONTEXT;
  delete reinterpret_cast<std::vector<Work>*>(graph);
  --live;
  return kOkay;
}

// NVRTC, which compiles anything.
int nvrtcCreateProgram(void** program, const char*, const char*, int, const char* const*, const char* const*) {
  *program = pointer<void>(1);
  return 0;
}
int nvrtcVersion(int* major, int* minor) {
  *major = 13, *minor = 0;
  return 0;
}

int nvrtcCompileProgram(void*, int, const char* const*) {
  compilations += 1;
  return 0;
}
int nvrtcGetProgramLogSize(void*, std::size_t* bytes) {
  *bytes = 1;
  return 0;
}
int nvrtcGetProgramLog(void*, char* log) {
  *log = 0;
  return 0;
}
int nvrtcGetCUBINSize(void*, std::size_t* bytes) {
  *bytes = 6;
  return 0;
}
int nvrtcGetCUBIN(void*, char* image) {
  std::memcpy(image, "image", 6);
  return 0;
}
int nvrtcDestroyProgram(void**) { return 0; }

}  // extern "C"
