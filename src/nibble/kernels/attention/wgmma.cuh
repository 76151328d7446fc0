// Products of warpgroups (SM90): 64 rows of A, from shared memory or registers, and B from shared memory. A thread's
// sums: those of row 16 * warp + lane / 4 in places 0 and 1 of each four, and of the row 8 below in places 2 and 3;
// columns 8 * four + lane % 4 * 2 and the next.
#include "bits.cuh"
#include "warpgroups.cuh"

#define SUMS_32                                             \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define SUMS_64                                                      \
  SUMS_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45" \
  ",%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define SHAPE(columns) "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." HALF "." HALF " "

// d (+)= A B^T, with both matrices in shared memory.
DEVICE void wgmma(float (&d)[64], u32 a, u32 b, int add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p,%66,0;\n" SHAPE("128") SUMS_64 "},%64,%65,p,1,1,0,0;\n}"
               : OUT_16(d, 0), OUT_16(d, 16), OUT_16(d, 32), OUT_16(d, 48)
               : "l"(descriptor(a)), "l"(descriptor(b)), "r"(add));
}

// d += A B, with A in registers and B's rows in shared memory.
DEVICE void wgmma_by_rows(float (&d)[64], const u32* a, u32 b) {
  asm volatile(SHAPE("128") SUMS_64 "},{%64,%65,%66,%67},%68,1,1,1,1;\n"
               : OUT_16(d, 0), OUT_16(d, 16), OUT_16(d, 32), OUT_16(d, 48)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor(b)));
}

DEVICE void wgmma_by_rows(float (&d)[32], const u32* a, u32 b) {
  asm volatile(SHAPE("64") SUMS_32 "},{%32,%33,%34,%35},%36,1,1,1,1;\n"
               : OUT_16(d, 0), OUT_16(d, 16) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor(b)));
}
