// The 32 lanes of a warp, one PTX instruction a function. Another compiler than nvcc and NVRTC gets the types alone, and
// brings the functions: those of tests/cuda_emulation run the same kernels on a CPU.
//
// Fragments are those of mma.m16n8k16 (PTX ISA, "Matrix fragments"), with g = lane / 4 and t = lane % 4:
//
//     A [16, 16]: a[0] = (g, 2t..), a[1] = (g + 8, 2t..), a[2] = (g, 2t + 8..), a[3] = (g + 8, 2t + 8..), two numbers each
//     B [16, 8]:  b[0] = (2t.., g), b[1] = (2t + 8.., g)
//     C [16, 8]:  c0 = (g, 2t), c1 = (g, 2t + 1), c2 = (g + 8, 2t), c3 = (g + 8, 2t + 1)
#pragma once

namespace lamina::attention::cuda {

using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;

struct BFloat16 {
  u16 bits;
};
struct Half {
  u16 bits;
};

struct Int8 {
  signed char number;
};
struct Fp8 {
  unsigned char bits;  // E4M3
};

constexpr int kLanes = 32;

}  // namespace lamina::attention::cuda

#ifdef __CUDACC__

#define LAMINA_DEVICE __device__ __forceinline__

namespace lamina::attention::cuda {

LAMINA_DEVICE float from_bits(u32 bits) { return __uint_as_float(bits); }

LAMINA_DEVICE float to_float(float x) { return x; }
LAMINA_DEVICE float to_float(BFloat16 x) { return __uint_as_float(u32(x.bits) << 16); }
LAMINA_DEVICE float to_float(Half x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

LAMINA_DEVICE void round_to(float& to, float x) { to = x; }
LAMINA_DEVICE void round_to(BFloat16& to, float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(x)); }
LAMINA_DEVICE void round_to(Half& to, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x)); }

// Two numbers in a register, `low` in its low half.
template <class T>
LAMINA_DEVICE u32 pack(float low, float high);
template <>
LAMINA_DEVICE u32 pack<BFloat16>(float low, float high) {
  u32 x;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}
template <>
LAMINA_DEVICE u32 pack<Half>(float low, float high) {
  u32 x;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}

// a . b + c of two numbers T each, rounded once. Subnormal ones count, under -ftz=true too (PTX ISA, fma of 16 bits).
template <class T>
LAMINA_DEVICE u32 fma_pair(u32 a, u32 b, u32 c);
template <>
LAMINA_DEVICE u32 fma_pair<BFloat16>(u32 a, u32 b, u32 c) {
  u32 x;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(c));
  return x;
}
template <>
LAMINA_DEVICE u32 fma_pair<Half>(u32 a, u32 b, u32 c) {
  u32 x;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(c));
  return x;
}
// Byte i of the result is the byte of a that the i-th hexadecimal digit of `from` names, from the right. Digit 4 gives a
// zero; adding 8 gives eight copies of the byte's sign (PTX ISA, prmt). __byte_perm does not promise these.
LAMINA_DEVICE u32 pick_bytes(u32 a, u32 from) {
  u32 x;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(0), "r"(from));
  return x;
}
// Two numbers of 16 bits, at an address that is a multiple of 4.
LAMINA_DEVICE u32 load_pair(const void* p) { return *static_cast<const u32*>(p); }

LAMINA_DEVICE int lane() { return int(threadIdx.x); }  // a block is one warp
LAMINA_DEVICE int block() { return int(blockIdx.x); }
LAMINA_DEVICE int blocks() { return int(gridDim.x); }

LAMINA_DEVICE char* shared_memory() {
  extern __shared__ __align__(16) char memory[];
  return memory;
}

LAMINA_DEVICE void sync() { __syncwarp(); }
LAMINA_DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
LAMINA_DEVICE int shuffle_xor(int x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
LAMINA_DEVICE i64 shuffle_xor(i64 x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
LAMINA_DEVICE float shuffle(float x, int from) { return __shfl_sync(~0u, x, from); }
LAMINA_DEVICE int shuffle(int x, int from) { return __shfl_sync(~0u, x, from); }

LAMINA_DEVICE u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// 16, 8 or 4 bytes to shared memory, in the background; zeros, and nothing is read, unless they are `real`.
template <int kBytes>
LAMINA_DEVICE void copy(void* to, const void* from, bool real) {
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(real ? 16 : 0)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from),
                 "n"(kBytes), "r"(real ? kBytes : 0)
                 : "memory");
}
LAMINA_DEVICE void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all but the last N commits of this lane have landed; `sync` makes them everybody's.
template <int N>
LAMINA_DEVICE void wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Four 8 x 8 matrices; lane l names row l % 8 of matrix l / 8. A lane gets (g, 2t..) of each.
LAMINA_DEVICE void load_matrices(u32 (&x)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared_address(row))
               : "memory");
}
// The same, transposed: a lane gets (2t.., g) of each.
LAMINA_DEVICE void load_transposed(u32 (&x)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared_address(row))
               : "memory");
}
// An 8 x 8 matrix whose lanes hold (g, 2t..), so that they hold (2t.., g).
LAMINA_DEVICE u32 transpose(u32 x) {
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// C += A . B
template <class T>
LAMINA_DEVICE void multiply(float& c0, float& c1, float& c2, float& c3, const u32 (&a)[4], const u32 (&b)[2]);
#define LAMINA_MULTIPLY(T, type)                                                                                   \
  template <>                                                                                                      \
  LAMINA_DEVICE void multiply<T>(float& c0, float& c1, float& c2, float& c3, const u32(&a)[4], const u32(&b)[2]) { \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                                            \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                            \
                 : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)                                                          \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                              \
  }
LAMINA_MULTIPLY(BFloat16, "bf16")
LAMINA_MULTIPLY(Half, "f16")
#undef LAMINA_MULTIPLY

// What this lane has written itself; and what another warp may have written during this launch: past L1, and to be used
// for global memory only.
LAMINA_DEVICE float load_own(const float* p) { return *p; }
LAMINA_DEVICE float load_fresh(const float* p) { return __ldcg(p); }

// The numbers from 0 on, each to one of `of` warps that ask, as they come: lane 0 gets it. The last one leaves a 0 again.
LAMINA_DEVICE int take(u32* counter, int of) { return lane() == 0 ? int(atomicInc(counter, u32(of) - 1)) : 0; }

// Two warps meet at `counter`, each after all its lanes have written what the other one needs. False for the first; true
// for the second, which sees what the first has written. Leaves the counter as it was. The lane that reads the counter
// fences before it passes the value to the other lanes, since a shuffle alone orders no memory.
LAMINA_DEVICE bool second_to(u32* counter) {
  __threadfence();
  __syncwarp();
  u32 before = 0;
  if (lane() == 0) before = atomicInc(counter, 1);
  before = __shfl_sync(~0u, before, 0);
  __threadfence();
  __syncwarp();
  return before != 0;
}

}  // namespace lamina::attention::cuda
#endif
