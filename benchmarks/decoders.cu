// Roofline of FP4 decoders: streams packed E2M1 through one way of decoding it, with next to nothing done to the result.
// Compiled with -DDECODER=0..5; what each does is said in decoders.py.
typedef unsigned int u32;
#define DEV __device__ __forceinline__
DEV u32 mask_or(u32 a, u32 m, u32 b) { return (a & m) | b; }
DEV u32 fma2(u32 a, u32 b, u32 c) { u32 r; asm("fma.rn.f16x2 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r; }
DEV u32 half_low(u32 x) { u32 r; asm("cvt.rn.f16x2.e4m3x2 %0,%1;" : "=r"(r) : "h"((unsigned short)x)); return r; }

// E2M1 -> E4M3 by a table of eight bytes in two registers; signs spread over bytes by the sign mode of prmt.
DEV void e4m3(u32 x, u32* b) {
  u32 m = x & 0x77777777u, y = x << 4, s0, s1;
  asm("prmt.b32 %0,%1,%2,0x9D8C;" : "=r"(s0) : "r"(x), "r"(y));
  asm("prmt.b32 %0,%1,%2,0xBFAE;" : "=r"(s1) : "r"(x), "r"(y));
  b[0] = mask_or(s0, 0x80808080u, __byte_perm(0x3C383000u, 0x4C484440u, m));
  b[1] = mask_or(s1, 0x80808080u, __byte_perm(0x3C383000u, 0x4C484440u, m >> 16));
}
DEV int decode(u32 x, u32* h) {  // returns how many registers hold the result
  const u32 S = 0x80008000u, M = 0x0E000E00u;
  if (DECODER == 0) { h[0] = x; return 1; }
  if (DECODER == 1) {
    h[0] = mask_or(x << 9, M, (x << 12) & S); h[1] = mask_or(x << 5, M, (x << 8) & S);
    h[2] = mask_or(x << 1, M, (x << 4) & S); h[3] = mask_or(x >> 3, M, x & S);
  } else if (DECODER == 2) {
    const u32 S4 = 0x80808080u, M4 = 0x0E0E0E0Eu;
    u32 odd = mask_or(x >> 3, M4, x & S4), even = mask_or(x << 1, M4, (x << 4) & S4);
    h[0] = __byte_perm(even, 0, 0x2404); h[1] = __byte_perm(odd, 0, 0x2404);
    h[2] = even & 0xFF00FF00u; h[3] = odd & 0xFF00FF00u;
  } else if (DECODER == 3) {
    h[0] = x & (S | M); h[1] = (x << 3) & (S | M);
    h[2] = mask_or(x << 6, M, (x << 2) & S); h[3] = mask_or(x << 9, M, (x << 1) & S);
  } else {
    u32 b[2]; e4m3(x, b);
    if (DECODER == 4) { h[0] = b[0]; h[1] = b[1]; return 2; }
    h[0] = half_low(b[0]); h[1] = half_low(b[0] >> 16); h[2] = half_low(b[1]); h[3] = half_low(b[1] >> 16);
  }
  return 4;
}
extern "C" __global__ void __launch_bounds__(256) stream(const uint4* in, u32* out, long long n, u32 scale) {
  u32 sum[4] = {0, 0, 0, 0};
  const long long step = (long long)gridDim.x * 256;
  for (long long i = blockIdx.x * 256 + threadIdx.x; i < n; i += 4 * step) {
    uint4 w[4];
#pragma unroll
    for (int j = 0; j < 4; j++) w[j] = i + j * step < n ? __ldcs(in + i + j * step) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int j = 0; j < 16; j++) {
      u32 h[4];
      int count = decode(((const u32*)w)[j], h);
#pragma unroll
      for (int k = 0; k < 4; k++) if (k < count) sum[k] = DECODER == 0 || DECODER == 4 ? sum[k] ^ h[k] : fma2(h[k], scale, sum[k]);
    }
  }
  out[blockIdx.x * 256 + threadIdx.x] = sum[0] ^ sum[1] ^ sum[2] ^ sum[3];
}
// The first word decoded, for the gate: float16 pairs or bytes as they come.
extern "C" __global__ void first(const u32* in, u32* out) { u32 h[4] = {0, 0, 0, 0}; decode(in[threadIdx.x], h); for (int k = 0; k < 4; k++) out[4 * threadIdx.x + k] = h[k]; }
