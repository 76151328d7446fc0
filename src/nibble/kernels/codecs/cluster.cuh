// Blocks of a cluster, from SM90 on: barriers, and words in one another's shared memory.

// All blocks of a cluster have arrived when cluster_wait() returns, and what they wrote before can be read.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }

DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Store a word in the shared memory of a block of the cluster, which must have begun.
DEVICE void store_in_block(void* to, u32 x, u32 rank) {
  asm volatile("{\n.reg .b32 a;\nmapa.shared::cluster.u32 a,%0,%2;\nst.shared::cluster.u32 [a],%1;\n}"
               :: "r"(shared_address(to)), "r"(x), "r"(rank) : "memory");
}
