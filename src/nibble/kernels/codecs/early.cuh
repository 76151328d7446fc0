// Values that a kernel reads while the one in front of it, which started early too, is still writing them.
//
// The one in front clears them, and only then lets the next kernel start (bits.cuh): by then all its blocks run, so that
// whoever waits for a value waits for a block that goes on. Should that take long, or be no value at all, the end of the
// kernel in front settles it. Values are bfloat16, converted from float32, which never gives EMPTY. From SM90 on.

constexpr u32 EMPTY = 0xFFFF;
constexpr int PATIENCE = 1 << 12;  // reads

DEVICE void store_early(u16* to, u32 x) {
  asm volatile("st.relaxed.gpu.global.u16 [%0],%1;" :: "l"(to), "h"(u16(x)) : "memory");
}

// What this thread stored is there for the kernel that starts next, if that reads it by these functions.
DEVICE void publish() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

DEVICE u32 read_16(const u16* from) {
  u16 x;
  asm volatile("ld.relaxed.gpu.global.u16 %0,[%1];" : "=h"(x) : "l"(from) : "memory");
  return x;
}

DEVICE long long read_64(const long long* from) {
  long long x;
  asm volatile("ld.relaxed.gpu.global.s64 %0,[%1];" : "=l"(x) : "l"(from) : "memory");
  return x;
}

DEVICE uint4 read_128(const u16* from) {
  uint4 x;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from) : "memory");
  return x;
}

DEVICE bool has_empty(u32 pair) { return pair >= EMPTY << 16 || (pair & EMPTY) == EMPTY; }

DEVICE bool has_empty(const uint4& x) { return has_empty(x.x) || has_empty(x.y) || has_empty(x.z) || has_empty(x.w); }

// Read what load(i) gives until all of it is there; once(): what there is to do first, if it is not there at once.
template <int COUNT, typename T, typename Load, typename Once>
DEVICE void load_early(T (&x)[COUNT], Load load, Once once) {
  for (int turn = 0;; turn++) {
    bool is_there = true;
#pragma unroll
    for (int i = 0; i < COUNT; i++) x[i] = load(i);
#pragma unroll
    for (int i = 0; i < COUNT; i++) is_there &= !has_empty(x[i]);
    if (is_there || turn > PATIENCE) return;
    if (turn == 0) once();
    if (turn == PATIENCE) wait_for_kernel();
  }
}

template <int COUNT, typename T, typename Load>
DEVICE void load_early(T (&x)[COUNT], Load load) { load_early(x, load, [] {}); }
