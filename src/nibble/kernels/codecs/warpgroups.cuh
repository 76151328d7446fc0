// What products of warpgroups (SM90a) have in common, after bits.cuh: barriers of copies, where matrices lie, when products
// are done, and turns of two warpgroups.
//
// Matrices in shared memory lie as the tensor copy engine leaves them: columns of 128 bytes, whose 16-byte pieces are
// swizzled within 8 rows.

constexpr int SWIZZLED = 128, EIGHT_ROWS = 1024;  // bytes of a row, and of what the swizzle repeats in

// CUtensorMap
struct alignas(64) TensorMap { u64 words[16]; };

DEVICE void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" :: "r"(barrier), "r"(arrivals) : "memory");
}

// Arrive, and let the phase last until so many bytes have been copied.
DEVICE void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" :: "r"(barrier), "r"(bytes) : "memory");
}

// Where a matrix lies, the lower half of its descriptor: rows of A, or columns of B, from `address` on, their values one
// after the other. The upper half is the same for all. Descriptors are to be the same for a warp as the compiler sees it
// (uniform()); else each product waits until theirs have been moved to where it reads them.
// next: bytes to the next columns of 128 bytes, where B's rows lie one after the other.
DEVICE u32 matrix_at(u32 address, u32 next = 16) { return next >> 4 << 16 | address >> 4; }

// The matrix that lies so many bytes behind.
DEVICE u32 behind(u32 matrix, int bytes) { return matrix + (bytes >> 4); }

DEVICE u64 descriptor(u32 matrix) {
  constexpr u64 swizzle_128 = 1ull << 62;
  return swizzle_128 | u64(EIGHT_ROWS >> 4) << 32 | matrix;
}

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

// Sums as operands of a product.
#define OUT_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define OUT_8(d, i) OUT_4(d, i), OUT_4(d, i + 4)
#define OUT_16(d, i) OUT_8(d, i), OUT_8(d, i + 8)

// ---- turns --------------------------------------------------------------------------------------------
// Of two warpgroups of a block, 0 and 1, by named barriers 1 and 2: one goes on where the other has ended its turn.
// Before its first turn, that of 0, 1 ends one.
DEVICE void await_turn(int warpgroup) { asm volatile("bar.sync %0,256;" :: "r"(1 + warpgroup) : "memory"); }
DEVICE void end_turn(int warpgroup) { asm volatile("bar.arrive %0,256;" :: "r"(2 - warpgroup) : "memory"); }

// Whether it is so in one of the warpgroup's threads, by named barriers 3 and 4.
DEVICE bool any_of_warpgroup(bool x, int warpgroup) {
  int any;
  asm volatile("{\n.reg .pred p,q;\nsetp.ne.s32 q,%1,0;\nbar.red.or.pred p,%2,128,q;\nselp.s32 %0,1,0,p;\n}"
               : "=r"(any) : "r"(int(x)), "r"(3 + warpgroup) : "memory");
  return __any_sync(ALL_LANES, any);  // which the compiler knows to be the same for all lanes
}
