// Blocks of a cluster, from SM90 on: barriers, and words in one another's shared memory.

// All blocks of a cluster have arrived when cluster_wait() returns, and what they wrote before can be read.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }

DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Store a word in the shared memory of a block of the cluster, which must have begun.
DEVICE void store_in_block(void* to, u32 x, u32 rank) {
  asm volatile("{\n.reg .b32 a;\nmapa.shared::cluster.u32 a,%0,%2;\nst.shared::cluster.u32 [a],%1;\n}"
               :: "r"(shared_address(to)), "r"(x), "r"(rank) : "memory");
}

// A barrier in shared memory of a block that others store to, for so many bytes of one phase; a thread of that block calls
// it, and all blocks arrive and wait before the first store.
DEVICE void expect_stores(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0],1;\nmbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;\n"
               "fence.mbarrier_init.release.cluster;" :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Store a word in the shared memory of a block, which counts it at its barrier.
DEVICE void store_and_count(void* to, u32 x, u64* barrier, u32 rank) {
  asm volatile("{\n.reg .b32 a,b;\nmapa.shared::cluster.u32 a,%0,%3;\nmapa.shared::cluster.u32 b,%2,%3;\n"
               "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [a],%1,[b];\n}"
               :: "r"(shared_address(to)), "r"(x), "r"(shared_address(barrier)), "r"(rank) : "memory");
}

// Wait for all that is expected.
DEVICE void wait_for_stores(u64* barrier) {
  asm volatile(
      "{\n.reg .pred p;\nL: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p,[%0],0;\n@p bra E;\nbra L;\nE:\n}"
      :: "r"(shared_address(barrier)) : "memory");
}
