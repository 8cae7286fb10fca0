// Prints what NCCL's own headers declare of what netstack/gin/nccl.py restates. Each struct gives a line of its name
// and bytes; each field that `FIELDS` names gives its name, offset and bytes. Functions have to be those that the
// stand-in has.
#include <nccl.h>
#include <nccl_device/host.h>

#include <cstdio>
#include <type_traits>

#define SAME(function, ...) static_assert(std::is_same_v<decltype(&function), ncclResult_t (*)(__VA_ARGS__)>)
SAME(ncclGetVersion, int*);
SAME(ncclGetUniqueId, ncclUniqueId*);
SAME(ncclCommInitRankConfig, ncclComm_t*, int, ncclUniqueId, int, ncclConfig_t*);
SAME(ncclCommGetAsyncError, ncclComm_t, ncclResult_t*);
SAME(ncclCommQueryProperties, ncclComm_t, ncclCommProperties_t*);
SAME(ncclMemAlloc, void**, size_t);
SAME(ncclMemFree, void*);
SAME(ncclCommWindowRegister, ncclComm_t, void*, size_t, ncclWindow_t*, int);
SAME(ncclCommWindowDeregister, ncclComm_t, ncclWindow_t);
SAME(ncclDevCommCreate, ncclComm_t, const ncclDevCommRequirements_t*, ncclDevComm_t*);
SAME(ncclDevCommDestroy, ncclComm_t, const ncclDevComm_t*);
SAME(ncclCommAbort, ncclComm_t);
static_assert(std::is_same_v<decltype(&ncclGetErrorString), const char* (*)(ncclResult_t)>);
static_assert(std::is_same_v<decltype(&ncclGetLastError), const char* (*)(ncclComm_t)>);
static_assert(NCCL_API_MAGIC == 0xcafebeef && NCCL_UNIQUE_ID_BYTES == 128 && ncclSuccess == 0 && ncclInProgress == 7);
static_assert((NCCL_WIN_COLL_SYMMETRIC | NCCL_WIN_STRICT_ORDERING) == 3 && NCCL_GIN_CONNECTION_FULL == 1);
static_assert(NCCL_CONFIG_UNDEF_INT == -2147483647 - 1 && NCCL_GIN_TYPE_NONE == 0);

// Of what Python leaves as it is, the initializers have nothing else.
constexpr ncclDevCommRequirements_t kUntouched = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
static_assert(kUntouched.ginCustomStride == 1 && !kUntouched.barrierCount && !kUntouched.worldGinBarrierCount &&
              !kUntouched.lsaMultimem && !kUntouched.ginExclusiveContexts && !kUntouched.ginType &&
              !kUntouched.cftCaps);

#define STRUCT(type) std::printf(#type " %zu\n", sizeof(type))
#define FIELD(type, name) std::printf(#name " %zu %zu\n", offsetof(type, name), sizeof(type::name))

int main() {
#include FIELDS
}
