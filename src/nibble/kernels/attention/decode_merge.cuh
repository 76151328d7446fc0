// Partial results of decode.cu: how a warp leaves one, and how several are merged, in order.
//
// Needs decode_mma.cuh. A partial result is what one warp or block has of a (request, head): unnormalised O,
// then maximum and sum of each column, as exponents of 2. O is stored as the fragments lie, four dims of a
// lane at a time: [column / 8][column % 2][quad][lane][4].
//
// A short context takes as long as its chain of latencies, and fetching instructions is one of them: the code
// is compact.

constexpr int QUADS = D / 32;  // of a lane: four neighbouring dims each
// A warp merges one column at a time, or four where there are many, as each turn is a chain of latencies: four whose
// fragments are neighbours, so that its lanes read 512 bytes in a row.
constexpr int MERGED_COLUMNS = COLUMNS > 8 ? 4 : 1;
constexpr int QUAD_STEP = 4 / MERGED_COLUMNS;  // from one of a lane's quads to the next
constexpr int QUADS_PER_LANE = (QUADS + QUAD_STEP - 1) / QUAD_STEP;
constexpr int QUADS_AT_ONCE = MERGED_COLUMNS > 1 ? 16 : 8;
constexpr int PARTIALS_AT_ONCE = QUADS_AT_ONCE / QUADS_PER_LANE;
constexpr int PARTIAL_O_BYTES = COLUMNS * D * 4;
constexpr int PARTIAL_BYTES = PARTIAL_O_BYTES + 8 * COLUMNS;

DEVICE float4* partial_quad(u8* partial, int n, int e, int i, int lane) {
  return (float4*)partial + ((2 * n + e) * QUADS + i) * 32 + lane;
}

// The first column of turn i, of which a lane merges one.
DEVICE int first_merged(int i) { return MERGED_COLUMNS > 1 ? i / 2 * 8 + i % 2 : i; }

// What a lane merges of a turn: quads of one column from first_quad on, of the lanes g of a fragment.
struct MergeLane {
  int column, g, first_quad;

  DEVICE MergeLane(int first_column, int lane)
      : column(MERGED_COLUMNS > 1 ? first_column + 2 * (lane & 3) : first_column),
        g(MERGED_COLUMNS > 1 ? lane >> 2 : lane & 7),
        first_quad(MERGED_COLUMNS > 1 ? 0 : lane >> 3) {}
};

// Maximum and sum of a column.
DEVICE float2* partial_stats(u8* partial, int column) {
  return (float2*)(partial + PARTIAL_O_BYTES) + column;
}

// `count` partial results in shared or global memory, `stride` bytes apart, except that number `odd` is
// `odd_one`.
struct Partials {
  u8 *first, *odd_one;
  int stride, odd, count;

  DEVICE u8* operator[](int k) const { return k == odd ? odd_one : first + k * stride; }
};

// Volatile loads go past the L1 cache, which does not know what other blocks write.
DEVICE float4 load_uncached(const float4* p) {
  float4 x;
  asm volatile("ld.volatile.v4.f32 {%0,%1,%2,%3},[%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(p) : "memory");
  return x;
}

DEVICE float2 load_uncached(const float2* p) {
  float2 x;
  asm volatile("ld.volatile.v2.f32 {%0,%1},[%2];" : "=f"(x.x), "=f"(x.y) : "l"(p) : "memory");
  return x;
}

#if LSE
using OutputValue = float;
using OutputQuad = float4;
#else
using OutputValue = u16;
using OutputQuad = uint2;
#endif

struct Output {
  OutputValue* out;
  const float *v_scale, *sinks;
  int v_scale_stride, group_size, kv_heads;
#if LSE
  float* lse;  // of each query head, a natural logarithm
#endif
#if JOIN
  const float *other, *other_lse;  // attention over other keys, laid out as the output, and its log-sum-exps
#endif

  // The logit of a column's sink, as an exponent of 2.
  DEVICE float sink(int head, int column) const {
    return sinks[head * group_size + column % group_size] * LOG2E;
  }

  // The factor that normalises a column.
  DEVICE float normalizer(int head, int column, float m, float l) const {
    if (sinks) l += ex2(sink(head, column) - m);
    // Not an IEEE division, which would be many instructions more to fetch.
    return l > 0 ? __fdividef(v_scale[head * v_scale_stride] * decode_factor(VF, false), l) : 0.f;
  }

  DEVICE OutputValue* row(int first_row, int head, int column) const {
    u64 query_head = (u64)(first_row + column / group_size) * kv_heads * group_size + head * group_size;
    return out + (query_head + column % group_size) * D;
  }

  // What a column's O, and what it has from other keys, is to be multiplied by.
  DEVICE float2 factors(int first_row, int head, int column, float m, float l) const {
#if JOIN
    // The other part is one more partial result, whose sum is 1. Of no keys, m is LOWEST and l is 0.
    const float other_m = other_lse[(row(first_row, head, column) - out) / D] * LOG2E, top = fmaxf(m, other_m);
    const float rescale = ex2(m - top), weight = ex2(other_m - top);
    l = l * rescale + weight;
    const float own = normalizer(head, column, top, l) * rescale;
    if (sinks) l += ex2(sink(head, column) - top);
    return make_float2(own, l > 0 ? __fdividef(weight, l) : 0.f);
#else
    return make_float2(normalizer(head, column, m, l), 0.f);
#endif
  }

  // Four dims of a row as they are stored. O: x; f: from factors().
  DEVICE OutputQuad quad(const float4& x, float2 f, int first_row, int head, int column, int dim) const {
#if JOIN
    const float4 y = *(const float4*)(other + (row(first_row, head, column) - out) + dim);
    return make_uint2(pack_output(x.x * f.x + y.x * f.y, x.y * f.x + y.y * f.y),
                      pack_output(x.z * f.x + y.z * f.y, x.w * f.x + y.w * f.y));
#elif LSE
    return make_float4(x.x * f.x, x.y * f.x, x.z * f.x, x.w * f.x);
#else
    return make_uint2(pack_output(x.x * f.x, x.y * f.x), pack_output(x.z * f.x, x.w * f.x));
#endif
  }

#if LSE
  DEVICE void store_lse(int first_row, int head, int column, float m, float l) const {
    float x = l > 0 ? m + lg2(l) : minus_infinity();
    if (sinks) {
      const float y = sink(head, column), top = fmaxf(fmaxf(x, y), LOWEST);
      x = top + lg2(ex2(x - top) + ex2(y - top));
    }
    lse[(row(first_row, head, column) - out) / D] = x / LOG2E;
  }
#endif
};

// Store what a warp has of a (request, head): to the output if that is all of it, else as a partial result.
DEVICE void store_accumulator(Accumulator& acc, u8* partial, bool is_all, Output output, int first_row,
                              int head, int columns, int lane) {
  const int g = lane >> 2, c = lane & 3;
#pragma unroll
  for (int n = 0; n < COLUMN_GROUPS; n++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      float sum = acc.l[n][e];
#pragma unroll
      for (int x = 4; x < 32; x <<= 1) sum += __shfl_xor_sync(ALL_LANES, sum, x);
      const int column = 8 * n + 2 * c + e;
      if (column >= columns) continue;
      if (is_all) {
        const float2 f = output.factors(first_row, head, column, acc.m[n][e], sum);
        OutputValue* out = output.row(first_row, head, column) + g * (D / 8);
#pragma unroll
        for (int t = 0; t < D / 16; t += 2) {
          const float4 o =
              make_float4(acc.o[n][t][e], acc.o[n][t][e + 2], acc.o[n][t + 1][e], acc.o[n][t + 1][e + 2]);
          *(OutputQuad*)(out + 2 * t) = output.quad(o, f, first_row, head, column, g * (D / 8) + 2 * t);
        }
#if LSE
        if (g == 0) output.store_lse(first_row, head, column, acc.m[n][e], sum);
#endif
      } else {
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
          *partial_quad(partial, n, e, i, lane) = make_float4(
              acc.o[n][2 * i][e], acc.o[n][2 * i][e + 2], acc.o[n][2 * i + 1][e], acc.o[n][2 * i + 1][e + 2]);
        }
        if (g == 0) *partial_stats(partial, column) = make_float2(acc.m[n][e], sum);
      }
    }
  }
}

// Merge partial results, in their order: into the partial result `to`, or, if that is null, into the output. columns: of
// which the lane's may be none.
DEVICE void merge_partials(Partials from, u8* to, Output output, int first_row, int head, MergeLane at, int columns) {
  const int column = at.column, n = column / 8, e = column % 2, fragment = 4 * at.g + column % 8 / 2;
  const bool exists = column < columns;
  float m = LOWEST, l = 0;
  float4 o[QUADS_PER_LANE] = {};
#pragma unroll 1
  for (int k0 = 0; k0 < from.count; k0 += PARTIALS_AT_ONCE) {
    // --- load: all, before the first is used
    float2 stats[PARTIALS_AT_ONCE];
    float4 x[PARTIALS_AT_ONCE][QUADS_PER_LANE];
#pragma unroll
    for (int j = 0; j < PARTIALS_AT_ONCE; j++) {
      u8* partial = from[k0 + j];
      const bool is_read = exists && k0 + j < from.count;
      stats[j] = is_read ? load_uncached(partial_stats(partial, column)) : make_float2(LOWEST, 0);
#pragma unroll
      for (int i = 0; i < QUADS_PER_LANE; i++) {
        const int quad = at.first_quad + QUAD_STEP * i;
        x[j][i] = is_read && quad < QUADS ? load_uncached(partial_quad(partial, n, e, quad, fragment))
                                          : make_float4(0, 0, 0, 0);
      }
    }
    // --- accumulate
#pragma unroll
    for (int j = 0; j < PARTIALS_AT_ONCE; j++) {
      const float top = fmaxf(m, stats[j].x), rescale = ex2(m - top), weight = ex2(stats[j].x - top);
      m = top;
      l = l * rescale + stats[j].y * weight;
#pragma unroll
      for (int i = 0; i < QUADS_PER_LANE; i++) {
        float4 &a = o[i], b = x[j][i];
        a.x = a.x * rescale + b.x * weight;
        a.y = a.y * rescale + b.y * weight;
        a.z = a.z * rescale + b.z * weight;
        a.w = a.w * rescale + b.w * weight;
      }
    }
  }
  if (!exists) return;
  // --- store
  const float2 f = to ? make_float2(1.f, 0.f) : output.factors(first_row, head, column, m, l);
#pragma unroll
  for (int i = 0; i < QUADS_PER_LANE; i++) {
    const int quad = at.first_quad + QUAD_STEP * i;
    if (quad >= QUADS) break;
    if (to) {
      *partial_quad(to, n, e, quad, fragment) = o[i];
    } else {
      const int dim = at.g * (D / 8) + 4 * quad;
      *(OutputQuad*)(output.row(first_row, head, column) + dim) =
          output.quad(o[i], f, first_row, head, column, dim);
    }
  }
  if (at.g || at.first_quad) return;
  if (to) *partial_stats(to, column) = make_float2(m, l);
#if LSE
  if (!to) output.store_lse(first_row, head, column, m, l);
#endif
}
