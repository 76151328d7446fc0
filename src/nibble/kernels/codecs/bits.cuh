// Shared by all CUDA C++ kernels: short names of types, and single PTX instructions as functions.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__

constexpr u32 ALL_LANES = ~0u;
constexpr float LOG2E = 1.4426950408889634f;
// The maximum before any score. It is finite, so that the difference of two of them is 0 and not NaN.
constexpr float LOWEST = -1e30f;

// A number that all lanes of a warp have, as the compiler learns by this: what follows from it is computed once for the
// warp.
DEVICE int uniform(int x) { return __shfl_sync(ALL_LANES, x, 0); }

// ---- launches -----------------------------------------------------------------------------------------
// See dependent_launch.py. Waits until the kernels in front have ended and what they wrote can be read.
DEVICE void wait_for_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start, once a thread of each block has called it.
DEVICE void start_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

DEVICE void wait_for_inputs() { wait_for_kernel(), start_next(); }

// ---- arithmetic ---------------------------------------------------------------------------------------
DEVICE float minus_infinity() { return __int_as_float(0xff800000); }

DEVICE float ex2(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(x));
  return r;
}

DEVICE float lg2(float x) {
  float r;
  asm("lg2.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(x));
  return r;
}

DEVICE float rcp(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(x));
  return r;
}

// x in float16's range. NaN stays NaN.
DEVICE float clamp_f16(float x) {
  float r;
  asm("{\n.reg .f32 t;\nmax.NaN.f32 t,%1,%2;\nmin.NaN.f32 %0,t,%3;\n}"
      : "=f"(r) : "f"(x), "f"(-65504.f), "f"(65504.f));
  return r;
}

// The same for a pair, infinite ones included.
DEVICE u32 clamp_f16x2(u32 x) {
  u32 r;
  asm("{\n.reg .b32 t;\nmax.NaN.f16x2 t,%1,%2;\nmin.NaN.f16x2 %0,t,%3;\n}"
      : "=r"(r) : "r"(x), "r"(0xFBFFFBFFu), "r"(0x7BFF7BFFu));
  return r;
}

DEVICE u32 pack_f16(float lo, float hi) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

DEVICE u32 pack_bf16(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

// The E4M3 values in bytes 0 and 1 of x, as a pair of float16. From SM89 on.
DEVICE u32 f16x2_from_e4m3x2(u32 x) {
  u32 r;
  asm("cvt.rn.f16x2.e4m3x2 %0,%1;" : "=r"(r) : "h"(u16(x)));
  return r;
}

DEVICE u32 mul_f16x2(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.f16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// Both halves of a, times the lower half of b.
DEVICE u32 mul_f16x2_by_low(u32 a, u32 b) {
  u32 r;
  asm("{\n.reg .b16 l,h;\n.reg .b32 t;\nmov.b32 {l,h},%2;\nmov.b32 t,{l,l};\nmul.rn.f16x2 %0,%1,t;\n}"
      : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// Both halves of a, times the upper half of b.
DEVICE u32 mul_f16x2_by_high(u32 a, u32 b) {
  u32 r;
  asm("{\n.reg .b16 l,h;\n.reg .b32 t;\nmov.b32 {l,h},%2;\nmov.b32 t,{h,h};\nmul.rn.f16x2 %0,%1,t;\n}"
      : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// Word i of x. The index must be known at compile time, or x goes through local memory.
DEVICE u32 word_of(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// ---- matrices -----------------------------------------------------------------------------------------
// c += A B, for A of 16 x 16 and B of 16 x 8.
#define MMA_M16N8K16(TYPE)                                      \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE    \
      ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};" \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])          \
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))

DEVICE void mma_f16(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { MMA_M16N8K16("f16"); }

DEVICE void mma_bf16(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { MMA_M16N8K16("bf16"); }

// The transpose of a warp's 8 x 8 matrix of 16-bit values.
DEVICE u32 transpose_8x8(u32 a) {
  u32 r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(r) : "r"(a));
  return r;
}

// ---- shared memory and barriers -----------------------------------------------------------------------
DEVICE u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// Wait until the phase of this parity of an mbarrier is complete. From SM90 on.
DEVICE void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nL: mbarrier.try_wait.parity.shared::cta.b64 p,[%0],%1;\n@p bra E;\nbra L;\nE:\n}"
      :: "r"(barrier), "r"(parity) : "memory");
}

DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _,[%0];" :: "r"(barrier) : "memory");
}
