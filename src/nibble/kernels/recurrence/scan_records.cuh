// What scan_prepare.cu or scan_columns.cu write of a block of 16 tokens and a head, and scan.cu reads: a record.
//
// Needs the macros K, DELTA and SPLIT. Requests' blocks stand at multiples of 16 of their positions. A block's row i is
// the token at its first position + i: stored, if that is before the step's first token, or of the step, or none.
//
// With A[i][j] = beta_i (k_i . k_j e^(G_i - G_j)) for j < i, of rows i of the step:
//   solve    (I + A)^-1 diag(beta), which makes updates of values less what the matrix has of them. A stored row's
//            is that of the unit matrix, so that its update stays what it is.
//   weights  q_i . k_j e^(G_i - G_j) for j <= i
// both as operand B of their transpose: lane (g, c) has of rows g and g + 8 columns 2 c, 2 c + 1 and 2 c + 8, 2 c + 9.
//   fade     e^G_i, and 0 for stored rows: by what is multiplied that rows read of the matrix. By column: 1 or 0
//   left     e^(G_15 - G_i): by what an update is multiplied in the next matrix. By column: 1
//   rate     beta_i, and 1 for stored rows
//   end      e^G_15; by column, K of them

#include "bits.cuh"
#include "scan_ptx.cuh"

constexpr int BLOCK = 16;
constexpr int FRAGMENT = 512;  // bytes of 16 x 16 operands
constexpr int SOLVE = 0, SOLVE_LOW = FRAGMENT, WEIGHTS = DELTA * (1 + SPLIT) * FRAGMENT;
constexpr int FADE = WEIGHTS + FRAGMENT, LEFT = FADE + 4 * BLOCK, RATE = LEFT + 4 * BLOCK, END = RATE + 4 * BLOCK;
#if COLUMN
constexpr int RECORD = END + 4 * K;
#else
constexpr int RECORD = END + 16;
#endif
static_assert(K % 16 == 0 && RECORD % 16 == 0, "rows and records are copied by 16 bytes");

// ---- which tokens ------------------------------------------------------------------------------------
struct Requests {
  const int *slots, *starts, *cu_seqlens;
  int size;

  // Of records: that of a request's first block. Requests have at least as many as they need.
  DEVICE int first_block(int request) const { return cu_seqlens[request] / BLOCK + 3 * request; }
};

struct Span {
  int slot, start, stop, begin;  // positions: the step's first token, behind its last, the first block's begin
  int row;                       // of the step's tokens: the first one's
  int blocks;

  DEVICE Span(const Requests& requests, int request) {
    slot = requests.slots[request];
    start = requests.starts[request];
    row = requests.cu_seqlens[request];
    stop = start + requests.cu_seqlens[request + 1] - row;
    begin = start / BLOCK * BLOCK;
    blocks = stop > start ? (stop - begin + BLOCK - 1) / BLOCK : 0;
  }
};

// The request that has a block's record.
DEVICE int request_of(const Requests& requests, int block) {
  int low = 0, high = requests.size - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (requests.first_block(middle) <= block) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// ---- the inverse of I + A -----------------------------------------------------------------------------
constexpr int PITCH = 20;  // of A^T in shared memory: whole float4s, and rows that lie in different banks

// x = (I + A)^-1 x. at: A^T, of which the strictly upper triangle is read.
DEVICE void solve(float* x, const float* at) {
#pragma unroll
  for (int j = 0; j < BLOCK - 1; j++) {
#pragma unroll
    for (int i = (j + 1) / 4 * 4; i < BLOCK; i += 4) {
      const float4 a = *(const float4*)(at + j * PITCH + i);
      if (i > j) x[i] -= a.x * x[j];
      if (i + 1 > j) x[i + 1] -= a.y * x[j];
      if (i + 2 > j) x[i + 2] -= a.z * x[j];
      if (i + 3 > j) x[i + 3] -= a.w * x[j];
    }
  }
}

// ---- operands -----------------------------------------------------------------------------------------
// The operand of a lane (g, c). m[n]: what the accumulators of an mma have of 16 x 16: of rows g (elements 0 and 1) and
// g + 8 the columns 8 n + 2 c and 8 n + 2 c + 1.
DEVICE uint4 operand(const float (*m)[4]) {
  return make_uint4(pack_bf16(m[0][0], m[0][1]), pack_bf16(m[1][0], m[1][1]), pack_bf16(m[0][2], m[0][3]),
                    pack_bf16(m[1][2], m[1][3]));
}

// What BF16 leaves of a pair of values, in BF16.
DEVICE u32 rest_of(float lo, float hi, u32 pair) { return pack_bf16(lo - low_bf16(pair), hi - high_bf16(pair)); }

// Store a 16 x 16 inverse, where it is wanted exactly with what BF16 leaves of it.
DEVICE void store_solve(u8* record, const float (*m)[4], int lane) {
  const uint4 x = operand(m);
  ((uint4*)(record + SOLVE))[lane] = x;
  if (SPLIT) {
    ((uint4*)(record + SOLVE_LOW))[lane] =
        make_uint4(rest_of(m[0][0], m[0][1], x.x), rest_of(m[1][0], m[1][1], x.y),
                   rest_of(m[0][2], m[0][3], x.z), rest_of(m[1][2], m[1][3], x.w));
  }
}
