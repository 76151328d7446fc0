// The products of decode.cu: stored keys and values become operands of mma.m16n8k16, and the running softmax.
//
// Needs decode_formats.cuh. KV stands on the M side of the products and query columns on N. A lane's stored
// bytes are its fragments as they are, since dims may come in any order in K Q^T, and tokens in any order in
// V^T P^T.
//
// Names: g = lane / 4 and c = lane % 4 are the coordinates of mma fragments. In arrays of fragments, n counts
// groups of eight columns, e the two columns of a lane in a group, i and j the registers of a fragment.

constexpr int GROUPS = TILE / 16;         // of 16 tokens, the M side of a product
constexpr int COLUMN_GROUPS = COLUMNS / 8;
constexpr int STEPS = D / 16;             // products along the dims of a key

// Where a lane begins to read a tile.
struct LaneBase {
  const u8 *values, *scales;
};

// Load N words from aligned shared memory.
template <int N>
DEVICE void load_words(u32* words, const u8* from) {
  if (N >= 4) {
#pragma unroll
    for (int i = 0; i < N / 4; i++) *(uint4*)(words + 4 * i) = *(const uint4*)(from + 16 * i);
  } else if (N == 2) {
    *(uint2*)words = *(const uint2*)from;
  } else {
    *words = *(const u32*)from;
  }
}

// ---- keys: S^T += K Q^T for 16 tokens -----------------------------------------------------------------
// A lane's bytes of a row come in chunks: its chunk j is chunk 4 * j + c of the row.
CONSTANT int chunk_bytes(Format f) { return smaller(16, row_bytes(f) / 4); }
CONSTANT int chunk_dims(Format f) { return chunk_bytes(f) * 8 / bits(f); }
CONSTANT int chunk_words(Format f) { return chunk_bytes(f) / 4; }
CONSTANT int lane_words(Format f) { return row_bytes(f) / 16; }

// The dim of value e of operand register u in step s.
CONSTANT int operand_dim(Format f, int c, int s, int u, int e) {
  int word = bits(f) == 4 ? s / 2 : bits(f) == 8 ? s : 2 * s;  // the step's first word
  int j = word / chunk_words(f);
  int within = word % chunk_words(f) * (32 / bits(f));
  int value = bits(f) == 4 ? 2 * (s % 2) + u + 4 * e : 2 * u + e;
  return (4 * j + c) * chunk_dims(f) + within + value;
}

struct KeyRow {
  u32 words[lane_words(KF)];
  u32 scales[STEPS];  // by chunk: the scales of its one or two blocks, as a pair
};

DEVICE LaneBase key_base(const u8* tile, int g, int c) {
  const int token = 4 * (g & 1) + (g >> 1);  // of 8, so that rows fall into different banks
  return {tile + token * row_bytes(KF) + c * chunk_bytes(KF),
          tile + TILE * row_bytes(KF) + token * scale_bytes(KF) + c * chunk_dims(KF) / block(KF)};
}

DEVICE void load_key(KeyRow& row, LaneBase base, int token) {
#pragma unroll
  for (int j = 0; j < lane_words(KF) * 4 / chunk_bytes(KF); j++) {
    load_words<chunk_words(KF)>(row.words + j * chunk_words(KF),
                                base.values + token * row_bytes(KF) + 4 * j * chunk_bytes(KF));
    if (bits(KF) == 4) {
      const u8* scales = base.scales + token * scale_bytes(KF) + 4 * j * chunk_dims(KF) / block(KF);
      if (chunk_dims(KF) / block(KF) == 2) {
        row.scales[j] = decode_scales<KF, true>(__byte_perm(*(const u16*)scales, 0, 0x4140));
      } else {
        row.scales[j] = decode_scales<KF, true>(*scales * 0x10001u);
      }
    }
  }
}

// A word of 4-bit values -> the operand registers of two steps.
DEVICE void decode_key_word(const KeyRow& row, int word, u32* pairs) {
  decode_e2m1x8(row.words[word], pairs);
  const int j = word / chunk_words(KF), within = word % chunk_words(KF) * 8;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    pairs[i] = chunk_dims(KF) / block(KF) < 2 ? mul_f16x2(pairs[i], row.scales[j])
               : within < block(KF)           ? mul_f16x2_by_low(pairs[i], row.scales[j])
                                              : mul_f16x2_by_high(pairs[i], row.scales[j]);
  }
}

// Operand B of the scores, a lane's part of it: in registers, or in shared memory of the warp.
// Each lane reads what it wrote itself.
struct Queries {
  static constexpr bool IN_REGISTERS = QUERIES_IN_REGISTERS;
  static constexpr int BYTES = IN_REGISTERS ? 0 : COLUMNS * D * 2;
  u32 pairs[IN_REGISTERS ? COLUMN_GROUPS : 1][IN_REGISTERS ? STEPS : 1][2];
  uint2* own;

  DEVICE Queries(u8* shared, int lane) : own((uint2*)shared + lane) {}

  DEVICE void store(int n, int s, u32 x, u32 y) {
    if constexpr (IN_REGISTERS) {
      pairs[n][s][0] = x;
      pairs[n][s][1] = y;
    } else {
      own[(n * STEPS + s) * 32] = make_uint2(x, y);
    }
  }

  DEVICE uint2 load(int n, int s) const {
    if constexpr (IN_REGISTERS) return make_uint2(pairs[n][s][0], pairs[n][s][1]);
    return own[(n * STEPS + s) * 32];
  }
};

DEVICE void mma_scores(float* scores, u32 a0, u32 a1, u32 a2, u32 a3, const Queries& q, int n, int s) {
  const uint2 b = q.load(n, s);
  mma(scores, a0, a1, a2, a3, b.x, b.y);
}

DEVICE void accumulate_scores(float (*scores)[4], LaneBase base, int first_token, const Queries& q) {
  KeyRow a, b;  // rows g and g + 8 of the fragment
  load_key(a, base, first_token);
  load_key(b, base, first_token + 8);
#pragma unroll
  for (int w = 0; w < lane_words(KF); w++) {
    if (bits(KF) == 4) {
      u32 x[4], y[4];
      decode_key_word(a, w, x);
      decode_key_word(b, w, y);
#pragma unroll
      for (int n = 0; n < COLUMN_GROUPS; n++) {
        mma_scores(scores[n], x[0], y[0], x[1], y[1], q, n, 2 * w);
        mma_scores(scores[n], x[2], y[2], x[3], y[3], q, n, 2 * w + 1);
      }
    } else if (bits(KF) == 8) {
      u32 x0 = decode_fp8_low<KF>(a.words[w]), x1 = decode_fp8_high<KF>(a.words[w]);
      u32 y0 = decode_fp8_low<KF>(b.words[w]), y1 = decode_fp8_high<KF>(b.words[w]);
#pragma unroll
      for (int n = 0; n < COLUMN_GROUPS; n++) mma_scores(scores[n], x0, y0, x1, y1, q, n, w);
    } else if (w % 2 == 0) {
#pragma unroll
      for (int n = 0; n < COLUMN_GROUPS; n++) {
        mma_scores(scores[n], a.words[w], b.words[w], a.words[w + 1], b.words[w + 1], q, n, w / 2);
      }
    }
  }
}

// The queries of one column, as operand B. They are loaded in the order of the lane's dims, 16 bytes at a
// time, and then distributed over steps. Columns that do not exist are zeros.
DEVICE void load_queries(Queries& q, int n, const u16* from, bool exists, int c) {
  u32 pairs[D / 8];
#pragma unroll
  for (int j = 0; j < D / 4 / chunk_dims(KF); j++) {
#pragma unroll
    for (int i = 0; i < chunk_dims(KF) / 8; i++) {
      uint4* to = (uint4*)(pairs + j * chunk_dims(KF) / 2 + 4 * i);
      *to = exists ? *(const uint4*)(from + (4 * j + c) * chunk_dims(KF) + 8 * i) : make_uint4(0, 0, 0, 0);
    }
  }
#pragma unroll
  for (int s = 0; s < STEPS; s++) {
    u32 operand[2];
#pragma unroll
    for (int u = 0; u < 2; u++) {
      int dim0 = operand_dim(KF, 0, s, u, 0), dim1 = operand_dim(KF, 0, s, u, 1);
      int i0 = dim0 / (4 * chunk_dims(KF)) * chunk_dims(KF) + dim0 % chunk_dims(KF);
      int i1 = dim1 / (4 * chunk_dims(KF)) * chunk_dims(KF) + dim1 % chunk_dims(KF);
      operand[u] = pack_queries(query_value(pairs[i0 / 2], i0 % 2), query_value(pairs[i1 / 2], i1 % 2));
    }
    q.store(n, s, operand[0], operand[1]);
  }
}

// ---- values: O^T += V^T P^T for 16 tokens -------------------------------------------------------------
// Lane g has dims g * D / 8 .. + D / 8 of tokens first_token + 4 * u + c, u = 0..3. Tile t of O^T has dims 2
// * t (rows 0..7) and 2 * t + 1 (rows 8..15).
constexpr int VALUE_WORDS = row_bytes(VF) / 32;  // of a lane and token

DEVICE LaneBase value_base(const u8* tile, int g, int c) {
  return {tile + c * row_bytes(VF) + g * (row_bytes(VF) / 8),
          tile + TILE * row_bytes(VF) + c * scale_bytes(VF) + g * (D / 8) / block(VF)};
}

// The scales of a token and of the fourth after it.
DEVICE u32 load_value_scales(const u8* scales) {
  return decode_scales<VF, false>(u32(scales[0]) | (u32(scales[4 * scale_bytes(VF)]) << 16));
}

DEVICE void mma_values(float (*o)[D / 16][4], int t, u32 a0, u32 a1, u32 a2, u32 a3, const u32 (*p)[2]) {
#pragma unroll
  for (int n = 0; n < COLUMN_GROUPS; n++) mma(o[n][t], a0, a1, a2, a3, p[n][0], p[n][1]);
}

DEVICE void accumulate_values(float (*o)[D / 16][4], LaneBase base, int first_token, const u32 (*p)[2]) {
  u32 w[4][VALUE_WORDS];
#pragma unroll
  for (int u = 0; u < 4; u++) {
    load_words<VALUE_WORDS>(w[u], base.values + (first_token + 4 * u) * row_bytes(VF));
  }
  u32 scales0 = 0, scales1 = 0;
#pragma unroll
  for (int i = 0; i < VALUE_WORDS; i++) {
    if (bits(VF) == 4) {
      if (i * 8 % block(VF) == 0) {
        const u8* scales = base.scales + first_token * scale_bytes(VF) + i * 8 / block(VF);
        scales0 = load_value_scales(scales);
        scales1 = load_value_scales(scales + 8 * scale_bytes(VF));
      }
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u32 x[4], y[4];
        decode_e2m1x8(__byte_perm(w[0][i], w[1][i], half ? 0x7632 : 0x5410), x);
        decode_e2m1x8(__byte_perm(w[2][i], w[3][i], half ? 0x7632 : 0x5410), y);
#pragma unroll
        for (int j = 0; j < 4; j++) {
          x[j] = mul_f16x2(x[j], scales0);
          y[j] = mul_f16x2(y[j], scales1);
        }
        mma_values(o, 4 * i + 2 * half, x[0], x[1], y[0], y[1], p);
        mma_values(o, 4 * i + 2 * half + 1, x[2], x[3], y[2], y[3], p);
      }
    } else if (bits(VF) == 8) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u32 x = __byte_perm(w[0][i], w[1][i], half ? 0x7362 : 0x5140);
        u32 y = __byte_perm(w[2][i], w[3][i], half ? 0x7362 : 0x5140);
        mma_values(o, 2 * i + half, decode_fp8_low<VF>(x), decode_fp8_high<VF>(x), decode_fp8_low<VF>(y),
                   decode_fp8_high<VF>(y), p);
      }
    } else {
      mma_values(o, i, __byte_perm(w[0][i], w[1][i], 0x5410), __byte_perm(w[0][i], w[1][i], 0x7632),
                 __byte_perm(w[2][i], w[3][i], 0x5410), __byte_perm(w[2][i], w[3][i], 0x7632), p);
    }
  }
}

// ---- the softmax of a tile ----------------------------------------------------------------------------
// Scores become softcap * tanh(score / softcap). scale: what makes exponents of 2 of scores.
DEVICE void apply_softcap(float (*scores)[COLUMN_GROUPS][4], float scale, float softcap) {
#pragma unroll
  for (int i = 0; i < GROUPS; i++) {
#pragma unroll
    for (int n = 0; n < COLUMN_GROUPS; n++) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float& x = scores[i][n][j];
        x = softcap * LOG2E * (1.f - 2.f * rcp(ex2(x * scale * (2.f / softcap)) + 1.f)) / scale;
      }
    }
  }
}

// Scores of tokens that a column may not see become -inf: those from its limit on, and those before its
// window.
DEVICE void apply_mask(float (*scores)[COLUMN_GROUPS][4], const int (*limit)[2], int first_token,
                       int window) {
#pragma unroll
  for (int i = 0; i < GROUPS; i++) {
#pragma unroll
    for (int n = 0; n < COLUMN_GROUPS; n++) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int token = first_token + 16 * i + 8 * (j >> 1), end = limit[n][j & 1];
        if (token >= end || (window && token < end - window)) scores[i][n][j] = minus_infinity();
      }
    }
  }
}

// How far (as an exponent of 2) a score may exceed the running maximum before sums are rescaled: they stay
// far inside float32, and P inside float16.
constexpr float RESCALE_SLACK = 8.f;

// The sum of a column's weights in a tile of 64 tokens, in one order: token t with t ^ 32, then t ^ 16, t ^ 8, t ^ 1,
// t ^ 4 and t ^ 2. Rows of a fragment are tokens 4 * (g & 1) + (g >> 1), and 8 more.
DEVICE float sum_of_tile(const float (*weights)[2]) {
  float sum[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    sum[r] = (weights[0][r] + weights[GROUPS / 2][r]) + (weights[1][r] + weights[GROUPS / 2 + 1][r]);
  }
  float x = sum[0] + sum[1];
  x += __shfl_xor_sync(ALL_LANES, x, 8);
  x += __shfl_xor_sync(ALL_LANES, x, 4);
  x += __shfl_xor_sync(ALL_LANES, x, 16);
  return x;
}

// The running softmax of a warp: O, and of each column the maximum that it is relative to and the sum of
// weights. The sum is of the lane's tokens alone.
struct Accumulator {
  float o[COLUMN_GROUPS][D / 16][4], m[COLUMN_GROUPS][2], l[COLUMN_GROUPS][2];

  DEVICE void clear() {
#pragma unroll
    for (int n = 0; n < COLUMN_GROUPS; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        m[n][e] = LOWEST;
        l[n][e] = 0;
      }
#pragma unroll
      for (int t = 0; t < D / 16; t++) {
#pragma unroll
        for (int i = 0; i < 4; i++) o[n][t][i] = 0;
      }
    }
  }

  // Rescale O of a column to the maximum over all lanes. Returns the factor, by which its sum is to be rescaled.
  DEVICE float rescale(int n, int e, float top) {
#pragma unroll
    for (int x = 4; x < 32; x <<= 1) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, x));
    top = fmaxf(top, m[n][e]);
    const float factor = ex2(m[n][e] - top);
    m[n][e] = top;
#pragma unroll
    for (int t = 0; t < D / 16; t++) {
      o[n][t][e] *= factor;
      o[n][t][e + 2] *= factor;
    }
    return factor;
  }

  // Scores -> P, as the operand of accumulate_values().
  DEVICE void softmax(u32 (*p)[COLUMN_GROUPS][2], float (*scores)[COLUMN_GROUPS][4], float scale) {
    bool exceeds = false;
    float top[COLUMN_GROUPS][2];
#pragma unroll
    for (int n = 0; n < COLUMN_GROUPS; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float a = fmaxf(scores[0][n][e], scores[0][n][e + 2]);
#pragma unroll
        for (int i = 1; i < GROUPS; i++) a = fmaxf(a, fmaxf(scores[i][n][e], scores[i][n][e + 2]));
        top[n][e] = a * scale;
        exceeds |= top[n][e] > m[n][e] + RESCALE_SLACK;
      }
    }
    // Rare, thanks to the slack: three of a hundred tiles pay for the shuffles and for the scaling of O.
    if (__any_sync(ALL_LANES, exceeds)) {
#pragma unroll
      for (int n = 0; n < COLUMN_GROUPS; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) l[n][e] *= rescale(n, e, top[n][e]);
      }
    }
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
#pragma unroll
      for (int n = 0; n < COLUMN_GROUPS; n++) {
        float weight[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          weight[j] = ex2(fmaf(scores[i][n][j], scale, -m[n][j & 1]));
          l[n][j & 1] += weight[j];
        }
        p[i][n][0] = transpose_8x8(pack_operand(weight[0], weight[1]));
        p[i][n][1] = transpose_8x8(pack_operand(weight[2], weight[3]));
      }
    }
  }

  // As softmax(), but sums are rescaled wherever the maximum grows, and weights are summed in one order, so that
  // the result depends on the keys alone. The sum is of all tokens.
  DEVICE void softmax_in_order(u32 (*p)[COLUMN_GROUPS][2], float (*scores)[COLUMN_GROUPS][4], float scale) {
#pragma unroll
    for (int n = 0; n < COLUMN_GROUPS; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float top = LOWEST;
#pragma unroll
        for (int i = 0; i < GROUPS; i++) top = fmaxf(top, fmaxf(scores[i][n][e], scores[i][n][e + 2]) * scale);
        // To rescale by 1 changes nothing.
        const float factor = __any_sync(ALL_LANES, top > m[n][e]) ? rescale(n, e, top) : 1.f;
        float weights[GROUPS][2];
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
#pragma unroll
          for (int r = 0; r < 2; r++) {
            weights[i][r] = ex2(fmaf(scores[i][n][e + 2 * r], scale, -m[n][e]));
            scores[i][n][e + 2 * r] = weights[i][r];
          }
        }
        l[n][e] = fmaf(l[n][e], factor, sum_of_tile(weights));
      }
#pragma unroll
      for (int i = 0; i < GROUPS; i++) {
        p[i][n][0] = transpose_8x8(pack_operand(scores[i][n][0], scores[i][n][1]));
        p[i][n][1] = transpose_8x8(pack_operand(scores[i][n][2], scores[i][n][3]));
      }
    }
  }
};
