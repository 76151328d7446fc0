// Products of warpgroups (SM90): 64 rows of A, from shared memory or registers, and B from shared memory.
//
// Matrices in shared memory lie as the tensor copy engine leaves them: columns of 128 bytes, whose 16-byte pieces are
// swizzled within 8 rows. A thread's sums: those of row 16 * warp + lane / 4 in places 0 and 1 of each four, and of the
// row 8 below in places 2 and 3; columns 8 * four + lane % 4 * 2 and the next.
#include "bits.cuh"

constexpr int SWIZZLED = 128;     // bytes of a row
constexpr int EIGHT_ROWS = 1024;  // bytes of what the swizzle repeats in

// Where a matrix lies: rows of A, or columns of B, from `address` on, their values one after the other.
// next: bytes to the next columns of 128 bytes, where B's rows lie one after the other (wgmma_by_rows).
DEVICE u64 matrix_at(u32 address, u32 next = 16) {
  constexpr u64 swizzle_128 = 1ull << 62;
  return swizzle_128 | u64(EIGHT_ROWS >> 4) << 32 | (next >> 4) << 16 | address >> 4;
}

// The matrix that lies so many bytes behind.
DEVICE u64 behind(u64 matrix, int bytes) { return matrix + (bytes >> 4); }

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LATER> DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LATER) : "memory");
}

// Sums stay where they are until a wait: the compiler must not move what uses them in front of it.
template <int N> DEVICE void keep(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i]) :: "memory");
}

#define OUT_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define OUT_16(d, i) OUT_4(d, i), OUT_4(d, i + 4), OUT_4(d, i + 8), OUT_4(d, i + 12)
#define SUMS_32                                             \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define SUMS_64                                                      \
  SUMS_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45" \
  ",%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define SHAPE(columns) "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." HALF "." HALF " "

// d (+)= A B^T, with both matrices in shared memory.
DEVICE void wgmma(float (&d)[64], u64 a, u64 b, int add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p,%66,0;\n" SHAPE("128") SUMS_64 "},%64,%65,p,1,1,0,0;\n}"
               : OUT_16(d, 0), OUT_16(d, 16), OUT_16(d, 32), OUT_16(d, 48) : "l"(a), "l"(b), "r"(add));
}

// d += A B, with A in registers and B's rows in shared memory.
DEVICE void wgmma_by_rows(float (&d)[64], const u32* a, u64 b) {
  asm volatile(SHAPE("128") SUMS_64 "},{%64,%65,%66,%67},%68,1,1,1,1;\n"
               : OUT_16(d, 0), OUT_16(d, 16), OUT_16(d, 32), OUT_16(d, 48)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

DEVICE void wgmma_by_rows(float (&d)[32], const u32* a, u64 b) {
  asm volatile(SHAPE("64") SUMS_32 "},{%32,%33,%34,%35},%36,1,1,1,1;\n"
               : OUT_16(d, 0), OUT_16(d, 16) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
