// Products of warpgroups whose matrices both lie in shared memory (SM90a): stages that the tensor copy engine fills.
// After bits.cuh; STAGES is a macro.
#include "warpgroups.cuh"

// Two barriers of each stage: it is full, and it is empty again.
struct Barriers {
  u32 first;
  DEVICE u32 full(int stage) const { return first + 8 * stage; }
  DEVICE u32 empty(int stage) const { return first + 8 * (STAGES + stage); }
};

// Where a product is up to: a stage, and the parity of its phase.
struct Place {
  int stage = 0;
  u32 parity = 0;
  DEVICE void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  // Go so many stages on.
  DEVICE void skip(int count) {
    stage += count % STAGES, parity ^= count / STAGES & 1;
    if (stage >= STAGES) stage -= STAGES, parity ^= 1;
  }
};

// Bring the map itself near.
DEVICE void prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
}

#define COPY "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"

// Copy the box from row y and column x on.
DEVICE void copy(u32 to, const TensorMap& map, int y, int x, u32 barrier) {
  asm volatile(COPY " [%0],[%1,{%2,%3}],[%4];"
               :: "r"(to), "l"(&map), "r"(x), "r"(y), "r"(barrier) : "memory");
}

// The same of what is read once: it must not push other things out of the L2 cache.
DEVICE void copy_once(u32 to, const TensorMap& map, int y, int x, u32 barrier) {
  asm volatile(
      "{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy,1.0;\n"
      COPY ".L2::cache_hint [%0],[%1,{%2,%3}],[%4],policy;\n}"
      :: "r"(to), "l"(&map), "r"(x), "r"(y), "r"(barrier) : "memory");
}

// An address of another block of the cluster.
DEVICE u32 in_block(u32 address, u32 rank) {
  u32 r;
  asm("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(r) : "r"(address), "r"(rank));
  return r;
}

// ---- values of 16 bits --------------------------------------------------------------------------------
DEVICE float low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float high(u32 pair) { return __uint_as_float(pair & 0xffff0000); }

// Far below zero the exponential is infinite, and its inverse 0.
DEVICE float silu(float x) { return x * rcp(1 + ex2(x * -LOG2E)); }
