// What scan.cu and scan_prepare*.cu need of PTX beside bits.cuh.
//
// A test puts functions in the place of these and of those in bits.cuh, and so runs the kernels on a CPU: no PTX stands
// anywhere else.

DEVICE float exp_of(float x) { return ex2(x * LOG2E); }

// Keep a value in a register: what is computed of a thread's index would be computed again in each turn of a loop.
DEVICE void keep(u32& x) { asm volatile("" : "+r"(x)); }

// ---- values -------------------------------------------------------------------------------------------
DEVICE float low_bf16(u32 x) { return __uint_as_float(x << 16); }

DEVICE float high_bf16(u32 x) { return __uint_as_float(x & 0xFFFF0000u); }

// The upper halves of two floats: a pair of BF16, where the lower halves are zeros.
DEVICE u32 upper_halves(float lo, float hi) {
  return __byte_perm(__float_as_uint(lo), __float_as_uint(hi), 0x7632);
}

// Two values in E4M3, the largest ones saturated, in the lower bytes. From SM89 on.
DEVICE u32 e4m3x2_from_f32(float lo, float hi) {
  u16 r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0,%1,%2;" : "=h"(r) : "f"(hi), "f"(lo));
  return r;
}

DEVICE float2 f32x2_from_f16x2(u32 x) {
  float2 r;
  asm("{\n.reg .b16 l,h;\nmov.b32 {l,h},%2;\ncvt.f32.f16 %0,l;\ncvt.f32.f16 %1,h;\n}"
      : "=f"(r.x), "=f"(r.y) : "r"(x));
  return r;
}

// ---- matrices of 8 x 8 in shared memory ---------------------------------------------------------------
// Four of them. Lanes 8 m .. 8 m + 7 have the addresses of the rows of the one that becomes register m: in lane
// (g, c) columns 2 c and 2 c + 1 of row g.
DEVICE void load_matrices(u32* r, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// The same, transposed: in lane (g, c) rows 2 c and 2 c + 1 of column g.
DEVICE void load_transposed(u32* r, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// ---- copies to shared memory, and barriers that wait for them -----------------------------------------
DEVICE void copy_16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16;" :: "r"(to), "l"(from) : "memory");
}

DEVICE void copy_16_or_zeros(u32 to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;"
               :: "r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
}

DEVICE void init_barrier(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0],%1;" :: "r"(barrier), "r"(arrivals) : "memory");
}

// Arrive when all copies that this thread has started are complete.
DEVICE void arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(barrier) : "memory");
}

DEVICE void arrive(u32 barrier) {
  asm volatile("{\n.reg .b64 s;\nmbarrier.arrive.shared.b64 s,[%0];\n}" :: "r"(barrier) : "memory");
}

// Whether the phase of this parity is complete.
DEVICE bool has_phase(u32 barrier, u32 parity) {
  u32 r;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p,[%1],%2;\nselp.u32 %0,1,0,p;\n}"
      : "=r"(r) : "r"(barrier), "r"(parity) : "memory");
  return r;
}

// Wait for it. The whole warp does: what follows knows that its lanes are together.
DEVICE void wait_for_phase(u32 barrier, u32 parity) {
  while (!__all_sync(ALL_LANES, has_phase(barrier, parity))) {
  }
}

DEVICE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
