// A prompt's recurrence: heads' matrices are brought forward from one multiple of 16 tokens to the next, and rounded.
//
// Compiled at run time, with these macros:
//   K       columns of a head's matrix, a multiple of 16
//   FORMAT  of matrices: 0 float32, 1 bfloat16, 2 E4M3 and 3 int8 with a scale for each row
//   DELTA   whether updates are by the delta rule
//   COLUMN  whether each column has a decay
//   SPLIT   1 where matrices and updates are float32: what is computed of them for the next matrix reads them in two
//           parts of BF16, high and low; what is computed for outputs, the high part of the matrix
//   WARPS   that compute, of a block; each has 16 rows of a matrix
//   STAGES  blocks of tokens in shared memory
// Kernel: scan(...), a block for each request, head and 16 * WARPS rows, and for what lies behind the requests;
// 32 * (WARPS + 1) threads, STAGES * STAGE bytes of dynamic shared memory.
//
// A warp keeps its rows S [16, K] in registers from the first token to the last, and waits for no other warp that
// computes; the last warp of a block copies what they read. For a block of tokens, with X = S k^T and O = S q^T:
//   U = (v^T - X fade) solve^T      (scan_records.cuh), or v^T rate
//   o = O fade + U weights^T
//   S <- round(S end + U left k)
// Rows of S stand on the M side of all products. So the accumulators of one are the operand of the next as they are:
// those of S for X and O, those of v^T - X for U, those of U for o and S. Codes of E4M3 and int8 are exact in BF16, and
// their scales multiply sums, so that with a decay for each head X and O are exact but for their own summation.
//
// Names: g = lane / 4 and c = lane % 4 are the coordinates of mma fragments. n counts groups of eight tokens, t of
// eight columns, r the registers of a fragment: of rows g (0, 1) and g + 8 (2, 3) the columns 2 c and 2 c + 1.

#include "scan_records.cuh"

constexpr int FP32 = 0, BF16 = 1, E4M3 = 2, INT8 = 3;
constexpr int STEPS = K / 16, TILES = K / 8, ROWS = 16 * WARPS, THREADS = 32 * (WARPS + 1);
// A stage: rows of keys, queries, with decays by column also of keys that enter the matrix; values; a record. Pitches
// are odd multiples of 16 bytes, so that eight rows lie in different banks.
constexpr int KEY_PITCH = 2 * K + 16, VALUE_PITCH = 2 * ROWS + 16, KEY_TILE = BLOCK * KEY_PITCH;
constexpr int ENTERING = COLUMN * 2 * KEY_TILE, VALUES = (2 + COLUMN) * KEY_TILE;
constexpr int DATA = VALUES + BLOCK * VALUE_PITCH, STAGE = DATA + RECORD;
constexpr float MAX_CODE = FORMAT == E4M3 ? 448.f : 127.f, MIN_SCALE = 1.f / (1ull << 50) / (1ull << 50);
constexpr float LEAST = MAX_CODE * MIN_SCALE;  // a row's largest value, at least
constexpr float ROUNDER = 12582912.f;  // 1.5 * 2^23: what is added to it is rounded to an integer
constexpr int CODE_BYTES = FORMAT == FP32 ? 4 : FORMAT == BF16 ? 2 : 1;
constexpr int PARTS = 1 + SPLIT;
static_assert(SPLIT == (FORMAT == FP32), "updates are float32 where matrices are");

struct Slots {
  u8* codes;
  float* scales;
  u16* keys;
  void* updates;
  float* decays;
  u64 codes_stride, scales_stride, keys_stride, updates_stride, decays_stride;  // of slots
  int places;
};

// What a block of threads works on.
struct Work {
  int request, head, key_head, heads, key_heads, values, first_value;

  // Of a stored update or a row of values: where the block's are.
  DEVICE u64 value_at(u64 row) const { return (row * heads + head) * values + first_value; }
};

// ---- operands of 16 rows ------------------------------------------------------------------------------
struct Operand {
  u32 a[4];

  // Of accumulators of 16 columns.
  DEVICE void set(const float (*x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = pack_bf16(x[i / 2][i % 2 * 2], x[i / 2][i % 2 * 2 + 1]);
  }

  // What BF16 leaves of them.
  DEVICE void set_rest(const float (*x)[4], const Operand& high) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      a[i] = rest_of(x[i / 2][i % 2 * 2], x[i / 2][i % 2 * 2 + 1], high.a[i]);
    }
  }

  DEVICE void multiply(float* to, u32 b0, u32 b1) const { mma_bf16(to, a[0], a[1], a[2], a[3], b0, b1); }
};

// ---- 16 rows of a matrix ------------------------------------------------------------------------------
struct Matrix {
  float x[TILES][4];            // values; those of the format, once rounded, without scales
  Operand parts[STEPS][PARTS];  // rounded values as operands
  float scale[2], factor[2];    // of rows g and g + 8, where the format has scales, and what they are multiplied by

  DEVICE float scale_of(int r) const { return FORMAT >= E4M3 ? scale[r / 2] : 1.f; }

  // codes: those of the lane's row g and columns 2 c. Row g + 8 is eight rows further.
  DEVICE void load(const u8* codes, const float* scales) {
    if (FORMAT >= E4M3) {
      scale[0] = scales[0];
      scale[1] = scales[8];
    }
    factor[0] = factor[1] = 1;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const u8* from = codes + (8 * half * K + 8 * t) * CODE_BYTES;
        float* to = x[t] + 2 * half;
        if (FORMAT == FP32) {
          *(float2*)to = *(const float2*)from;
        } else if (FORMAT == BF16) {
          const u32 pair = *(const u32*)from;
          to[0] = low_bf16(pair);
          to[1] = high_bf16(pair);
        } else if (FORMAT == E4M3) {
          *(float2*)to = f32x2_from_f16x2(f16x2_from_e4m3x2(*(const u16*)from));
        } else {
          to[0] = (signed char)from[0];
          to[1] = (signed char)from[1];
        }
      }
    }
  }

  DEVICE void clear() {
    scale[0] = scale[1] = MIN_SCALE;
    factor[0] = factor[1] = 1;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
      for (int r = 0; r < 4; r++) x[t][r] = 0;
    }
  }

  DEVICE void store(u8* codes, float* scales, int c) const {
    if (FORMAT >= E4M3 && c == 0) {
      scales[0] = scale[0];
      scales[8] = scale[1];
    }
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u8* to = codes + (8 * half * K + 8 * t) * CODE_BYTES;
        const float a = x[t][2 * half], b = x[t][2 * half + 1];
        if (FORMAT == FP32) {
          *(float2*)to = make_float2(a, b);
        } else if (FORMAT == BF16) {
          *(u32*)to = parts[t / 2][0].a[t % 2 * 2 + half];
        } else if (FORMAT == E4M3) {
          *(u16*)to = e4m3x2_from_f32(a, b);
        } else {
          *(u16*)to = (u16)(((int)a & 255) | ((int)b & 255) << 8);
        }
      }
    }
  }

  // Multiply by what is left at the end of a block of tokens, and by the scales. end: for the lane's columns.
  DEVICE void fade(const float* end) {
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      const float2 ends = COLUMN ? *(const float2*)(end + 8 * t) : make_float2(*end, *end);
#pragma unroll
      for (int r = 0; r < 4; r++) x[t][r] *= scale_of(r) * (r % 2 ? ends.y : ends.x);
    }
  }

  // Round to the format. What is rounded stays what it is.
  DEVICE void round() {
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      Operand& high = parts[s][0];
      if (FORMAT <= BF16) high.set(x + 2 * s);
      if (SPLIT) parts[s][PARTS - 1].set_rest(x + 2 * s, high);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int half = i % 2;  // which of the rows
        float* pair = x[2 * s + i / 2] + 2 * half;
        if (FORMAT == BF16) {
          pair[0] = low_bf16(high.a[i]);
          pair[1] = high_bf16(high.a[i]);
        } else if (FORMAT == E4M3) {
          const u32 codes = e4m3x2_from_f32(pair[0] * factor[half], pair[1] * factor[half]);
          *(float2*)pair = f32x2_from_f16x2(f16x2_from_e4m3x2(codes));
        } else if (FORMAT == INT8) {
          pair[0] = __fmaf_rn(pair[0], factor[half], ROUNDER) - ROUNDER;
          pair[1] = __fmaf_rn(pair[1], factor[half], ROUNDER) - ROUNDER;
        }
        if (FORMAT >= E4M3) high.a[i] = upper_halves(pair[0], pair[1]);
      }
    }
    factor[0] = factor[1] = 1;
  }

  // Scales are largest values over the largest code, divided as float32 does it.
  DEVICE void set_scales() {
    if (FORMAT <= BF16) return;
    float most[2][2] = {{LEAST, LEAST}, {LEAST, LEAST}};
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
      for (int r = 0; r < 4; r++) most[r / 2][r % 2] = fmaxf(most[r / 2][r % 2], fabsf(x[t][r]));
    }
#pragma unroll
    for (int half = 0; half < 2; half++) most[half][0] = fmaxf(most[half][0], most[half][1]);
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
      const float other[2] = {__shfl_xor_sync(ALL_LANES, most[0][0], lanes),
                              __shfl_xor_sync(ALL_LANES, most[1][0], lanes)};
#pragma unroll
      for (int half = 0; half < 2; half++) most[half][0] = fmaxf(most[half][0], other[half]);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      factor[half] = MAX_CODE * rcp(most[half][0]);
      const float quotient = most[half][0] * (1.f / MAX_CODE);
      scale[half] = __fmaf_rn(__fmaf_rn(-quotient, MAX_CODE, most[half][0]), 1.f / MAX_CODE, quotient);
    }
  }
};

// ---- the warp that copies -----------------------------------------------------------------------------
struct Inputs {
  const u16 *q, *k, *v, *rows;  // rows: first blocks' stored keys, or with decays by column tiles (scan_columns.cu)
  const u8* records;
  u64 q_token, q_head, k_token, k_head, v_token, v_head;  // strides
};

// Copy 16 rows of CHUNKS times 16 bytes each. from: row -> where it is, null where there is none.
template <int CHUNKS, int PITCH, class From>
DEVICE void copy_some_rows(u32 to, const u16* any, int lane, From from) {
#pragma unroll
  for (int i = lane; i < BLOCK * CHUNKS; i += 32) {
    const int row = i / CHUNKS, chunk = i % CHUNKS;
    const u16* p = from(row);
    copy_16_or_zeros(to + row * PITCH + 16 * chunk, p ? p + 8 * chunk : any, p != nullptr);
  }
}

// The same where all are there, one behind the other.
template <int CHUNKS, int PITCH>
DEVICE void copy_rows(u32 to, const u16* from, u64 stride, int lane) {
  if (32 % CHUNKS) {
    copy_some_rows<CHUNKS, PITCH>(to, from, lane, [&](int row) { return from + row * stride; });
    return;
  }
  constexpr int ROWS_AT_ONCE = 32 / CHUNKS;
  to += lane / CHUNKS * PITCH + lane % CHUNKS * 16;
  from += lane / CHUNKS * stride + lane % CHUNKS * 8;
#pragma unroll
  for (int row = 0; row < BLOCK; row += ROWS_AT_ONCE) {
    copy_16(to + row * PITCH, from);
    from += ROWS_AT_ONCE * stride;
  }
}

DEVICE void copy_block(u32 stage, const Inputs& inputs, const Slots& slots, const Work& work, const Span& span,
                       u64 record, int begin, int lane) {
  const u64 at = record * work.heads + work.head;
#pragma unroll
  for (int i = lane; i < RECORD / 16; i += 32) {
    copy_16(stage + DATA + 16 * i, inputs.records + at * RECORD + 16 * i);
  }
  if (COLUMN) {
#pragma unroll
    for (int x = DELTA ? 0 : 1; x < 3; x++) {
      copy_rows<TILES, KEY_PITCH>(stage + x * KEY_TILE, inputs.rows + (at * 3 + x) * BLOCK * K, K, lane);
    }
  }
  const u16 *q = inputs.q + work.key_head * inputs.q_head, *k = inputs.k + work.key_head * inputs.k_head;
  const u16* v = inputs.v + work.head * inputs.v_head + work.first_value;
  // --- blocks of this step's tokens alone
  if (begin >= span.start && begin + BLOCK <= span.stop) {
    const u64 row = span.row + begin - span.start;
    if (!COLUMN) {
      copy_rows<TILES, KEY_PITCH>(stage, k + row * inputs.k_token, inputs.k_token, lane);
      copy_rows<TILES, KEY_PITCH>(stage + KEY_TILE, q + row * inputs.q_token, inputs.q_token, lane);
    }
    copy_rows<2 * WARPS, VALUE_PITCH>(stage + VALUES, v + row * inputs.v_token, inputs.v_token, lane);
    return;
  }
  // --- others
  const auto is_new = [&](int i) { return begin + i >= span.start && begin + i < span.stop; };
  const auto row_of = [&](int i) { return u64(span.row + begin + i - span.start); };
  if (!COLUMN) {
    const u16* stored = inputs.rows + ((u64)work.request * work.key_heads + work.key_head) * BLOCK * K;
    copy_some_rows<TILES, KEY_PITCH>(stage, inputs.k, lane, [&](int i) -> const u16* {
      return begin + i < span.start ? stored + i * K : is_new(i) ? k + row_of(i) * inputs.k_token : nullptr;
    });
    copy_some_rows<TILES, KEY_PITCH>(stage + KEY_TILE, inputs.q, lane, [&](int i) -> const u16* {
      return is_new(i) ? q + row_of(i) * inputs.q_token : nullptr;
    });
  }
  // Stored updates stand in the place of values: their `fade` is 0.
  copy_some_rows<2 * WARPS, VALUE_PITCH>(stage + VALUES, inputs.v, lane, [&](int i) -> const u16* {
    if (is_new(i)) return v + row_of(i) * inputs.v_token;
    if (SPLIT || begin + i >= span.start) return nullptr;
    return (const u16*)slots.updates + span.slot * slots.updates_stride +
           work.value_at((begin + i) % slots.places);
  });
}

// Store keys and sums of decays of the last block's new tokens, if it is not full.
DEVICE void store_ends(const Inputs& inputs, const float* decay, const Slots& slots, const Work& work,
                       const Span& span, int lane) {
  const int begin = span.begin + (span.blocks - 1) * BLOCK, first = max(begin, span.start);
  if (begin + BLOCK <= span.stop || work.first_value) return;
  if (work.head % (work.heads / work.key_heads) == 0) {
    for (int i = lane; i < (span.stop - first) * TILES; i += 32) {
      const int position = first + i / TILES, chunk = i % TILES;
      const u16* from = inputs.k + u64(span.row + position - span.start) * inputs.k_token +
                        work.key_head * inputs.k_head + 8 * chunk;
      u16* to = slots.keys + span.slot * slots.keys_stride +
                ((u64)(position % slots.places) * work.key_heads + work.key_head) * K + 8 * chunk;
      *(uint4*)to = *(const uint4*)from;
    }
  }
  constexpr int PACE = COLUMN ? K : 1;  // sums of a head
  for (int x = lane; x < PACE; x += 32) {
    const u64 stored = span.slot * slots.decays_stride;
    const auto place = [&](int position) {
      return stored + ((u64)(position % slots.places) * work.heads + work.head) * PACE + x;
    };
    float sum = first > begin ? slots.decays[place(first - 1)] : 0;
    for (int position = first; position < span.stop; position++) {
      const u64 row = span.row + position - span.start;
      sum += decay[(row * work.heads + work.head) * PACE + x];
      slots.decays[place(position)] = sum;
    }
  }
}

// ---- a block of tokens --------------------------------------------------------------------------------
// Rows g and g + 8 of S, of the 16 that a warp has: where a lane's are.
struct Lane {
  int lane, g, c;
  u32 rows, columns, values;  // addresses of matrices of 8 x 8 in a stage
  u32 fragment, factors;      // addresses in a record, of operands and of what tokens have
  u32 is_first;

  DEVICE Lane(int warp) {
    lane = threadIdx.x % 32, g = lane >> 2, c = lane & 3;
    const int row = lane % 8, one = lane / 8 % 2, two = lane / 16;
    rows = (row + 8 * two) * KEY_PITCH + 16 * one;
    columns = (row + 8 * one) * KEY_PITCH + 16 * two;
    values = VALUES + (row + 8 * two) * VALUE_PITCH + 32 * warp + 16 * one;
    fragment = 16 * lane, factors = 8 * c, is_first = lane == 0;
    keep(rows), keep(columns), keep(values), keep(fragment), keep(factors), keep(is_first);
  }
};

// sum [n] = S rows^T, for 16 rows that are operands; of S so many parts.
template <int COUNT>
DEVICE void multiply_rows(float (*sum)[4], const Matrix& matrix, const u32 (*b)[4]) {
  float chains[2][2 * COUNT][4] = {};  // they do not wait for each other
#pragma unroll
  for (int s = 0; s < STEPS; s++) {
#pragma unroll
    for (int part = 0; part < COUNT; part++) {
#pragma unroll
      for (int n = 0; n < 2; n++) {
        matrix.parts[s][part].multiply(chains[n][2 * part + s % 2], b[s][2 * n], b[s][2 * n + 1]);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < 2; n++) {
#pragma unroll
    for (int r = 0; r < 4; r++) {
      sum[n][r] = chains[n][0][r] + chains[n][1][r];
      if (COUNT > 1) sum[n][r] += chains[n][2 * COUNT - 2][r] + chains[n][2 * COUNT - 1][r];
    }
  }
}

DEVICE void load_rows(u32 (*b)[4], u32 rows) {
#pragma unroll
  for (int s = 0; s < STEPS; s++) load_matrices(b[s], rows + 32 * s);
}

// What a lane has to do with tokens of a block: 2 c, 2 c + 1, 2 c + 8 and 2 c + 9.
DEVICE void load_factors(float (*to)[2], const u8* from) {
#pragma unroll
  for (int n = 0; n < 2; n++) *(float2*)to[n] = *(const float2*)(from + 32 * n);
}

// U [n] of values less what the matrix has of them.
DEVICE void solve_updates(float (*u)[4], const float (*x)[4], const u8* record, const Lane& at) {
  Operand high, low;
  high.set(x);
  const uint4 b = *(const uint4*)(record + SOLVE + at.fragment);
  high.multiply(u[0], b.x, b.y);
  high.multiply(u[1], b.z, b.w);
  if (SPLIT) {
    float more[2][2][4] = {};
    low.set_rest(x, high);
    const uint4 d = *(const uint4*)(record + SOLVE_LOW + at.fragment);
    low.multiply(more[0][0], b.x, b.y);
    low.multiply(more[0][1], b.z, b.w);
    high.multiply(more[1][0], d.x, d.y);
    high.multiply(more[1][1], d.z, d.w);
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int r = 0; r < 4; r++) u[n][r] += more[0][n][r] + more[1][n][r];
    }
  }
}

// Add what queries have of updates, and store outputs. to: the lane's columns 2 c of the row that token g has. first,
// stop: of the block's tokens, those of this step.
DEVICE void finish_outputs(float (*o)[4], const Operand* update, const u8* record, u16* to, u64 row_stride,
                           int first, int stop, const Lane& at) {
  const uint4 weights = *(const uint4*)(record + WEIGHTS + at.fragment);
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    update[part].multiply(o[0], weights.x, weights.y);
    update[part].multiply(o[1], weights.z, weights.w);
  }
#pragma unroll
  for (int n = 0; n < 2; n++) {
    const bool is_new = 8 * n + at.g >= first && 8 * n + at.g < stop;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u32 pair = transpose_8x8(pack_bf16(o[n][2 * half], o[n][2 * half + 1]));
      if (is_new) *(u32*)(to + 8 * n * row_stride + 8 * half) = pair;
    }
  }
}

// Where the update of a register is in its slot, for the token at a position.
DEVICE u64 update_place(const Slots& slots, const Work& work, const Span& span, const Lane& at, int row,
                        int position, int r) {
  return span.slot * slots.updates_stride + work.value_at(position % slots.places) + row + at.g + r / 2 * 8;
}

// Store updates of a block's tokens that are of this step.
DEVICE void store_updates(const Slots& slots, const Work& work, const Span& span, const Lane& at, int row,
                          int begin, const float (*u)[4]) {
#pragma unroll
  for (int n = 0; n < 2; n++) {
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const int position = begin + 8 * n + 2 * at.c + r % 2;
      if (position < span.start || position >= span.stop) continue;
      const u64 place = update_place(slots, work, span, at, row, position, r);
      if (SPLIT) {
        ((float*)slots.updates)[place] = u[n][r];
      } else {
        ((u16*)slots.updates)[place] = (u16)pack_bf16(u[n][r], 0);
      }
    }
  }
}

// U [n] of a block, and O [n] without what queries have of updates.
DEVICE void read_matrix(float (*u)[4], float (*o)[4], const Matrix& matrix, const u32 (*key_rows)[4], u32 stage,
                        const u8* record, float (*past)[4], const Lane& at) {
  float x[2][4], fade[2][2], rate[2][2];
  u32 values[4], query_rows[STEPS][4];
  load_factors(fade, record + FADE + at.factors);
  if (!DELTA) load_factors(rate, record + RATE + at.factors);
  load_transposed(values, stage + at.values);
  if (DELTA) multiply_rows<PARTS>(x, matrix, key_rows);
  load_rows(query_rows, stage + KEY_TILE + at.rows);
  multiply_rows<1>(o, matrix, query_rows);
#pragma unroll
  for (int n = 0; n < 2; n++) {
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const float factor = fade[n][r % 2] * matrix.scale_of(r);
      const u32 pair = values[2 * n + r / 2];
      float value = r % 2 ? high_bf16(pair) : low_bf16(pair);
      if (DELTA) value -= x[n][r] * factor;
      if (SPLIT) {
        value += past[n][r];
        past[n][r] = 0;
      }
      x[n][r] = value;
      u[n][r] = DELTA ? 0 : value * rate[n][r % 2];
      o[n][r] *= factor;
    }
  }
  if (DELTA) solve_updates(u, x, record, at);
}

DEVICE void set_parts(Operand* parts, const float (*x)[4]) {
  parts[0].set(x);
  if (SPLIT) parts[PARTS - 1].set_rest(x, parts[0]);
}

// What enters the next matrix: updates as they are kept, times what is left of them at the block's end.
DEVICE void fade_updates(Operand* entering, const float (*u)[4], const Operand* update, const u8* record,
                         const Lane& at) {
  float x[2][4], left[2][2];
  load_factors(left, record + LEFT + at.factors);
#pragma unroll
  for (int n = 0; n < 2; n++) {
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const u32 pair = update[0].a[2 * n + r / 2];
      x[n][r] = (SPLIT ? u[n][r] : r % 2 ? high_bf16(pair) : low_bf16(pair)) * left[n][r % 2];
    }
  }
  set_parts(entering, x);
}

// The first block's stored updates, where they are float32; zeros for other tokens.
DEVICE void load_stored(float (*to)[4], const Slots& slots, const Work& work, const Span& span, const Lane& at,
                        int row) {
#pragma unroll
  for (int n = 0; n < 2; n++) {
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const int position = span.begin + 8 * n + 2 * at.c + r % 2;
      const u64 place = update_place(slots, work, span, at, row, position, r);
      to[n][r] = position < span.start ? ((const float*)slots.updates)[place] : 0.f;
    }
  }
}

// ---- kernel -------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(THREADS, WARPS > 2 ? 1 : 2) scan(
    const u16* q, const u16* k, const u16* v, const float* decay, u16* out, u8* codes, float* scales, u16* keys,
    void* updates, float* decays, const u8* records, const u16* rows, const int* slot_ids, const int* starts,
    const int* cu_seqlens, u64 q_stride_token, u64 q_stride_head, u64 k_stride_token, u64 k_stride_head,
    u64 v_stride_token, u64 v_stride_head, u64 codes_stride_slot, u64 scales_stride_slot, u64 keys_stride_slot,
    u64 updates_stride_slot, u64 decays_stride_slot, int num_requests, int num_tokens, int heads, int key_heads,
    int values, int places) {
  extern __shared__ __align__(128) u8 smem[];
  __shared__ u64 full_barriers[STAGES], empty_barriers[STAGES];
  const int warp = threadIdx.x / 32, parts = values / ROWS;
  const int head = blockIdx.x / parts % heads, request = blockIdx.x / parts / heads;
  const int first_value = (int)blockIdx.x % parts * ROWS;
  const Work work{request, head, head / (heads / key_heads), heads, key_heads, values, first_value};
  const Requests requests{slot_ids, starts, cu_seqlens, num_requests};
  const u64 row_stride = (u64)heads * values;

  // --- rows that are nobody's are zeros
  if (request == num_requests || slot_ids[request] < 0) {
    const int stop = request == num_requests ? num_tokens : cu_seqlens[request + 1];
    for (int i = cu_seqlens[request] * 2 * WARPS + threadIdx.x; i < stop * 2 * WARPS; i += THREADS) {
      *(uint4*)(out + work.value_at(i / (2 * WARPS)) + i % (2 * WARPS) * 8) = make_uint4(0, 0, 0, 0);
    }
    return;
  }
  const Span span(requests, request);
  if (!span.blocks) return;
  const Inputs inputs{q, k, v, rows, records, q_stride_token, q_stride_head, k_stride_token, k_stride_head,
                      v_stride_token, v_stride_head};
  const Slots slots{codes, scales, keys, updates, decays, codes_stride_slot, scales_stride_slot,
                    keys_stride_slot, updates_stride_slot, decays_stride_slot, places};
  u32 full = shared_address(full_barriers), empty = shared_address(empty_barriers);
  u32 stages = shared_address(smem);
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      init_barrier(full + 8 * s, 32);
      init_barrier(empty + 8 * s, WARPS);
    }
  }
  __syncthreads();

  // --- copy
  if (warp == WARPS) {
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < span.blocks; i++) {
      const int s = i % STAGES;
      if (i >= STAGES) wait_for_phase(empty + 8 * s, (i / STAGES - 1) & 1);
      copy_block(stages + s * STAGE, inputs, slots, work, span,
                 requests.first_block(request) + i, span.begin + i * BLOCK, lane);
      arrive_after_copies(full + 8 * s);
    }
    wait_for_copies();
    store_ends(inputs, decay, slots, work, span, lane);
    return;
  }

  // --- load
  const Lane at(warp);
  const int g = at.g, c = at.c, row = 16 * warp;
  const u64 matrix_row = (u64)head * values + work.first_value + row + g;
  u8* const own_codes = codes + (span.slot * codes_stride_slot + matrix_row * K + 2 * c) * CODE_BYTES;
  float* const own_scales = scales + span.slot * scales_stride_slot + matrix_row;
  Matrix matrix;
  if (span.begin > 0) {
    matrix.load(own_codes, own_scales);
  } else {
    matrix.clear();
  }
  float past[2][4] = {};
  if (SPLIT) load_stored(past, slots, work, span, at, row);
  u32 key_rows[STEPS][4];
  wait_for_phase(full, 0);
  if (DELTA) load_rows(key_rows, stages + at.rows);
  // Where the first row is not of this step, this may lie before the outputs.
  const long long first_row = (long long)span.row + span.begin - span.start + g;
  u16* to = out + work.value_at(0) + row + 2 * c + first_row * (long long)row_stride;

  // --- blocks that are full
  const int full_blocks = (span.stop - span.begin) / BLOCK;
  int first = span.start - span.begin;  // of a block's rows, this step's
  keep(full), keep(empty), keep(stages);
  u32 stage = stages, full_barrier = full, phase = 0;
  const u8* record = smem + DATA;
  const u32 last_stage = stages + (STAGES - 1) * STAGE, to_empty = empty - full;
  float u[2][4], o[2][4];
  Operand update[PARTS];
  for (int i = 0; i < full_blocks; i++) {
    const bool is_last = stage == last_stage;
    const u32 next_stage = is_last ? stages : stage + STAGE;
    const u32 next_barrier = is_last ? full : full_barrier + 8;
    phase ^= is_last;
    const bool is_next_there = i + 1 == span.blocks || has_phase(next_barrier, phase);
    // Values are rounded here and not at the end: to do so goes well with the products that follow.
    matrix.round();
    read_matrix(u, o, matrix, key_rows, stage, record, past, at);
    matrix.fade((const float*)(record + END + (COLUMN ? at.factors : 0)));
    set_parts(update, u);
    Operand entering[PARTS];
    fade_updates(entering, u, update, record, at);
    if (!__all_sync(ALL_LANES, is_next_there)) wait_for_phase(next_barrier, phase);

    // --- the next matrix
#pragma unroll
    for (int t = 0; t < TILES; t += 2) {
      u32 b[4];
      load_transposed(b, stage + ENTERING + at.columns + 16 * t);
#pragma unroll
      for (int part = 0; part < PARTS; part++) {
        entering[part].multiply(matrix.x[t], b[0], b[1]);
        entering[part].multiply(matrix.x[t + 1], b[2], b[3]);
      }
    }
    finish_outputs(o, update, record, to, row_stride, first, BLOCK, at);
    if (DELTA) load_rows(key_rows, next_stage + at.rows);
    __syncwarp();
    if (at.is_first) arrive(full_barrier + to_empty);
    matrix.set_scales();
    first = 0;
    to += BLOCK * row_stride;
    stage = next_stage;
    full_barrier = next_barrier;
    record = is_last ? smem + DATA : record + STAGE;
  }
  matrix.round();
  if (full_blocks) matrix.store(own_codes, own_scales, c);

  // --- the last one, if it is not
  if (full_blocks == span.blocks) return;
  const int begin = span.begin + full_blocks * BLOCK;
  read_matrix(u, o, matrix, key_rows, stage, record, past, at);
  set_parts(update, u);
  finish_outputs(o, update, record, to, row_stride, first, span.stop - begin, at);
  store_updates(slots, work, span, at, row, begin, u);
}
