// What the kernels here are written with: names of types, and single instructions.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define DEV __device__ __forceinline__
constexpr float NONE = -1e30f, LOG2E = 1.4426950408889634f;

// ---- arithmetic ------------------------------------------------------------------------------------------------------
DEV float ex2(float x) { float r; asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(x)); return r; }
DEV float lg2(float x) { float r; asm("lg2.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(x)); return r; }
DEV float rcp(float x) { float r; asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(x)); return r; }
DEV float clamped(float x) {  // to float16's range; what is no number stays so
  float r; asm("{\n.reg .f32 t;\nmax.NaN.f32 t,%1,%2;\nmin.NaN.f32 %0,t,%3;\n}" : "=f"(r) : "f"(x), "f"(-65504.f), "f"(65504.f)); return r;
}
DEV u32 halves(float lo, float hi) { u32 r; asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
DEV u32 bf16s(float lo, float hi) { u32 r; asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
DEV u32 e4m3s(u32 x) { u32 r; asm("cvt.rn.f16x2.e4m3x2 %0,%1;" : "=r"(r) : "h"(u16(x))); return r; }  // bytes 0 and 1; from SM89 on
DEV u32 mul2(u32 a, u32 b) { u32 r; asm("mul.rn.f16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
DEV u32 mul_low(u32 a, u32 b) {  // both of a by the lower half of b
  u32 r; asm("{\n.reg .b16 l,h;\n.reg .b32 t;\nmov.b32 {l,h},%2;\nmov.b32 t,{l,l};\nmul.rn.f16x2 %0,%1,t;\n}" : "=r"(r) : "r"(a), "r"(b)); return r;
}
DEV u32 mul_high(u32 a, u32 b) {
  u32 r; asm("{\n.reg .b16 l,h;\n.reg .b32 t;\nmov.b32 {l,h},%2;\nmov.b32 t,{h,h};\nmul.rn.f16x2 %0,%1,t;\n}" : "=r"(r) : "r"(a), "r"(b)); return r;
}
#define MMA(T) asm("mma.sync.aligned.m16n8k16.row.col.f32." T "." T ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};" \
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
DEV void mma_f16(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { MMA("f16"); }
DEV void mma_bf16(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { MMA("bf16"); }
DEV u32 transposed(u32 a) { u32 r; asm("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(r) : "r"(a)); return r; }
DEV u32 at(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// ---- shared memory ---------------------------------------------------------------------------------------------------
DEV u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }
DEV void await(u32 bar, u32 parity) {  // mbarriers of SM90
  asm volatile("{\n.reg .pred p;\nL: mbarrier.try_wait.parity.shared::cta.b64 p,[%0],%1;\n@p bra E;\nbra L;\nE:\n}" :: "r"(bar), "r"(parity) : "memory");
}
DEV void arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _,[%0];" :: "r"(bar) : "memory"); }
