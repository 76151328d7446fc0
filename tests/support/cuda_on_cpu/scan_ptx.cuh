// In the place of kernels/recurrence/scan_ptx.cuh where a kernel runs on a CPU.

static inline void keep(u32&) {}
static inline float exp_of(float x) { return ex2(x * LOG2E); }
static inline float low_bf16(u32 x) { return bf16_value(x, 0); }
static inline float high_bf16(u32 x) { return bf16_value(x, 1); }
static inline u32 upper_halves(float lo, float hi) {
  return __byte_perm(__float_as_uint(lo), __float_as_uint(hi), 0x7632);
}

static inline u32 e4m3_code(float x) {
  const float most = std::min(std::fabs(x), 448.f);
  int exponent = most > 0 ? std::max(ilogbf(most), -6) : -6;
  int steps = (int)nearbyintf(ldexpf(most, 3 - exponent));
  if (steps == 16) steps = 8, exponent++;
  const u32 code = steps >= 8 ? (exponent + 7) << 3 | (steps - 8) : steps;
  return code | (std::signbit(x) ? 128 : 0);
}

static inline u32 e4m3x2_from_f32(float lo, float hi) { return e4m3_code(lo) | e4m3_code(hi) << 8; }

static inline float2 f32x2_from_f16x2(u32 x) {
  _Float16 pair[2];
  memcpy(pair, &x, 4);
  return {(float)pair[0], (float)pair[1]};
}

// ---- matrices of 8 x 8 --------------------------------------------------------------------------------
template <bool TRANSPOSED>
static inline void load_any(u32* r, u32 address) {
  if (address % 16) fail("rows of a matrix must lie at multiples of 16 bytes");
  together(TRANSPOSED ? "ldmatrix.trans" : "ldmatrix", &address, 1, r, 4, [](auto& x, auto& y) {
    for (int m = 0; m < 4; m++) {
      u16 values[8][8];
      for (int row = 0; row < 8; row++) memcpy(values[row], shared_memory + x[8 * m + row][0], 16);
      // Rows that are read together lie in different banks.
      for (int a = 0; a < 8; a++) {
        for (int b = 0; b < a; b++) {
          if (x[8 * m + a][0] / 16 % 8 == x[8 * m + b][0] / 16 % 8) fail("rows lie in the same bank");
        }
      }
      for (int lane = 0; lane < 32; lane++) {
        const int g = lane / 4, c = 2 * (lane % 4);
        y[lane][m] = TRANSPOSED ? values[c][g] | values[c + 1][g] << 16 : values[g][c] | values[g][c + 1] << 16;
      }
    }
  });
}

static inline void load_matrices(u32* r, u32 address) { load_any<false>(r, address); }
static inline void load_transposed(u32* r, u32 address) { load_any<true>(r, address); }

// ---- copies and barriers ------------------------------------------------------------------------------
struct Barrier { u16 expected, pending; u32 phase; };

static inline Barrier& barrier_at(u32 address) { return *(Barrier*)(shared_memory + address); }

static inline void init_barrier(u32 barrier, int arrivals) { barrier_at(barrier) = {(u16)arrivals, (u16)arrivals, 0}; }

static inline void arrive(u32 barrier) {
  Barrier& b = barrier_at(barrier);
  if (!b.pending) fail("more arrivals at a barrier than are expected");
  if (--b.pending == 0) {
    b.pending = b.expected;
    b.phase++;
  }
}

static inline void copy_16_or_zeros(u32 to, const void* from, bool exists) {
  if (to % 16 || (u64)from % 16) fail("a copy must be of 16 aligned bytes");
  threads[threadIdx.x].copies.push_back({shared_memory + to, (const u8*)from, exists ? 16 : 0});
}

static inline void copy_16(u32 to, const void* from) { copy_16_or_zeros(to, from, true); }

// Copies are made as late as may be.
static inline void wait_for_copies() {
  for (const Copy& copy : threads[threadIdx.x].copies) {
    memset(copy.to, 0, 16);
    memcpy(copy.to, copy.from, copy.bytes);
  }
  threads[threadIdx.x].copies.clear();
}

static inline void arrive_after_copies(u32 barrier) {
  for (int turns = turns_to_wait(); turns > 0; turns--) let_others_run();
  wait_for_copies();
  arrive(barrier);
}

static inline bool has_phase(u32 barrier, u32 parity) { return (barrier_at(barrier).phase & 1) != parity; }

static inline void wait_for_phase(u32 barrier, u32 parity) {
  while (!__all_sync(ALL_LANES, has_phase(barrier, parity))) let_others_run();
}
