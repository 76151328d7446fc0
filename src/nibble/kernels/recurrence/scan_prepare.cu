// What a prompt's scan needs of each block of 16 tokens, with a decay for each head: records (scan_records.cuh).
//
// Compiled at run time, with these macros:
//   K      columns of a head's matrix, a multiple of 16
//   DELTA  whether updates are by the delta rule
//   SPLIT  whether inverses are kept in two parts
//   BETA   learning rates: 0 none, 1 float32, 2 bfloat16
//   HEADS  heads of a task, which share a head of keys; 1, or even
// Kernel: scan_prepare(...), a warp for each task, a task for each block and HEADS heads, 32 * WARPS threads.
//
// Products of keys and queries are the same for all heads of a task. A lane of half e solves for a column of head e of
// two, by substitution in float32: a product of powers would lose all where keys of a block resemble each other.
//
// Names: g = lane / 4 and c = lane % 4 are the coordinates of mma fragments.

#define COLUMN 0
#include "scan_records.cuh"

constexpr int WARPS = 4, STEPS = K / 16;
constexpr int HALF = BLOCK * PITCH;                // floats of A^T of a head
constexpr int INVERSE_PITCH = 24, INVERSE = BLOCK * INVERSE_PITCH + 16;  // rows and heads lie in different banks
constexpr int SCRATCH = 2 * INVERSE;
static_assert(INVERSE >= HALF, "an inverse takes the place of A^T");

// Load a lane's part of 16 rows as operands. rows: g and g + 8, null where there is none. The lanes of a row have four
// columns that follow one another: products of such rows sum over columns, whose order is free.
DEVICE void load_rows(u32 (*r)[4], const u16* const* rows, int c) {
#pragma unroll
  for (int s = 0; s < STEPS; s++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint2 x = rows[half] ? *(const uint2*)(rows[half] + 16 * s + 4 * c) : make_uint2(0, 0);
      r[s][half] = x.x;
      r[s][2 + half] = x.y;
    }
  }
}

// x k^T. The operand A of 16 keys has what both operands B of 8 keys have.
DEVICE void multiply(float (*to)[4], const u32 (*x)[4], const u32 (*k)[4]) {
#pragma unroll
  for (int s = 0; s < STEPS; s++) {
#pragma unroll
    for (int n = 0; n < 2; n++) mma_bf16(to[n], x[s][0], x[s][1], x[s][2], x[s][3], k[s][n], k[s][2 + n]);
  }
}

DEVICE float rate_of(const void* beta, u64 i) {
  if (BETA == 1) return ((const float*)beta)[i];
  if (BETA == 2) return __uint_as_float((u32)((const u16*)beta)[i] << 16);
  return 1;
}

// --- kernel
extern "C" __global__ void __launch_bounds__(32 * WARPS) scan_prepare(
    const u16* q, const u16* k, const float* decay, const void* beta, const u16* stored_keys,
    const float* stored_decays, u8* records, u16* first_keys, const int* slots, const int* starts,
    const int* cu_seqlens, u64 q_stride_token, u64 q_stride_head, u64 k_stride_token, u64 k_stride_head,
    u64 keys_stride_slot, u64 decays_stride_slot, int num_requests, int num_blocks, int heads, int key_heads,
    int places) {
  __shared__ __align__(16) float scratch[WARPS][SCRATCH];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, c = lane & 3;
  const int shares = heads / key_heads / HEADS, tasks = key_heads * shares;  // of a block
  const int task = (blockIdx.x * WARPS + warp) % tasks, block = (blockIdx.x * WARPS + warp) / tasks;
  const int key_head = task / shares;
  if (block >= num_blocks) return;
  const Requests requests{slots, starts, cu_seqlens, num_requests};
  const int request = request_of(requests, block);
  const Span span(requests, request);
  const int index = block - requests.first_block(request);
  if (span.slot < 0 || index >= span.blocks) return;
  const int begin = span.begin + index * BLOCK;
  // Of positions: whether they are this step's, and which rows they are.
  const auto is_new = [&](int position) { return position >= span.start && position < span.stop; };
  const auto row_of = [&](int position) { return u64(span.row + position - span.start); };

  // --- products of keys and queries
  float kk[2][4] = {}, qk[2][4] = {};
  {
    const u16 *key_rows[2], *query_rows[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int position = begin + g + 8 * half;
      const u16* stored = stored_keys + span.slot * keys_stride_slot +
                          (u64)(position % places * key_heads + key_head) * K;
      key_rows[half] = position < span.start ? stored
                       : is_new(position)    ? k + row_of(position) * k_stride_token + key_head * k_stride_head
                                             : nullptr;
      query_rows[half] =
          is_new(position) ? q + row_of(position) * q_stride_token + key_head * q_stride_head : nullptr;
    }
    u32 keys[STEPS][4], queries[STEPS][4];
    load_rows(keys, key_rows, c);
    load_rows(queries, query_rows, c);
    if (DELTA) multiply(kk, keys, keys);
    multiply(qk, queries, keys);
    // Later ones of a slot may be written while the scan still reads these.
    if (begin < span.start && task % shares == 0) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u16* to = first_keys + ((u64)(request * key_heads + key_head) * BLOCK + g + 8 * half) * K + 4 * c;
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
          if (begin + g + 8 * half < span.start) {
            *(uint2*)(to + 16 * s) = make_uint2(keys[s][half], keys[s][2 + half]);
          }
        }
      }
    }
  }

  // --- two heads at a time: lane 16 e + i has row i of head e
  const int e = lane / 16, i = lane % 16, position = begin + i;
  float* const at = scratch[warp];
  for (int pair = 0; pair < HEADS; pair += 2) {
    const int first_head = task * HEADS + pair, head = first_head + (HEADS > 1 ? e : 0);
    // --- sums of decays
    const float* stored = stored_decays + span.slot * decays_stride_slot + head;
    float sum = is_new(position) ? decay[row_of(position) * heads + head] : 0;
#pragma unroll
    for (int x = 1; x < BLOCK; x *= 2) {
      const float before = __shfl_up_sync(ALL_LANES, sum, x, BLOCK);
      if (i >= x) sum += before;
    }
    if (begin < span.start) {
      // Of rows that are not stored: added to the last sum that is.
      const float before = stored[(u64)(min(position, span.start - 1) % places) * heads];
      sum = position < span.start ? before : before + sum;
    }
    float rate = position < span.start ? 1.f : 0.f;
    if (is_new(position)) rate = rate_of(beta, row_of(position) * heads + head);
    const float last = __shfl_sync(ALL_LANES, sum, BLOCK - 1, BLOCK);
    u8* const record = records + ((u64)block * heads + head) * RECORD;
    if (e == 0 || HEADS > 1) {
      ((float*)(record + FADE))[i] = position < span.start ? 0.f : exp_of(sum);
      ((float*)(record + LEFT))[i] = exp_of(last - sum);
      ((float*)(record + RATE))[i] = rate;
      if (i == 0) *(float*)(record + END) = exp_of(last);
    }

    // --- weights, and A^T
#pragma unroll
    for (int h = 0; h < (HEADS > 1 ? 2 : 1); h++) {
      float weights[2][4], row_sums[2], row_rates[2], column_sums[2][2];
#pragma unroll
      for (int x = 0; x < 2; x++) {
        row_sums[x] = __shfl_sync(ALL_LANES, sum, 16 * h + g + 8 * x);
        row_rates[x] = __shfl_sync(ALL_LANES, rate, 16 * h + g + 8 * x);
#pragma unroll
        for (int y = 0; y < 2; y++) {
          column_sums[x][y] = __shfl_sync(ALL_LANES, sum, 16 * h + 8 * x + 2 * c + y);
        }
      }
#pragma unroll
      for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int r = 0; r < 4; r++) {
          const int row = g + 8 * (r >> 1), column = 8 * n + 2 * c + (r & 1);
          const float fade = column <= row ? exp_of(row_sums[r >> 1] - column_sums[n][r & 1]) : 0.f;
          weights[n][r] = column <= row ? qk[n][r] * fade : 0.f;
          if (DELTA) {
            const bool is_read = column < row && begin + row >= span.start;
            at[h * HALF + column * PITCH + row] = is_read ? kk[n][r] * fade * row_rates[r >> 1] : 0.f;
          }
        }
      }
      ((uint4*)(records + ((u64)block * heads + first_head + h) * RECORD + WEIGHTS))[lane] = operand(weights);
    }
    if (!DELTA) continue;

    // --- inverses: a lane has column i of head e
    float x[BLOCK];
#pragma unroll
    for (int row = 0; row < BLOCK; row++) x[row] = row == i ? 1.f : 0.f;
    __syncwarp();
    solve(x, at + (HEADS > 1 ? e : 0) * HALF);
    __syncwarp();
#pragma unroll
    for (int row = 0; row < BLOCK; row++) at[e * INVERSE + row * INVERSE_PITCH + i] = x[row] * rate;
    __syncwarp();
#pragma unroll
    for (int h = 0; h < (HEADS > 1 ? 2 : 1); h++) {
      float inverse[2][4];
#pragma unroll
      for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float2 y =
              *(const float2*)(at + h * INVERSE + (g + 8 * half) * INVERSE_PITCH + 8 * n + 2 * c);
          inverse[n][2 * half] = y.x;
          inverse[n][2 * half + 1] = y.y;
        }
      }
      store_solve(records + ((u64)block * heads + first_head + h) * RECORD, inverse, lane);
    }
    __syncwarp();  // before A^T of the next heads is written
  }
}
