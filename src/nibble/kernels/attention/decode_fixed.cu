// Decode attention over splits of fixed keys: one query token a request, or a few that are verified.
//
// A row's bits depend on nothing but its query and the keys that it sees, and are those of attention_kernel in
// triton.py over fixed splits, which computes prompts. So what is summed in which order is the same there:
//   - products of keys and queries in steps of 16 dims, from the first to the last, in the order in which a lane
//     has them (key_order() in triton.py),
//   - a softmax over tiles of 64 keys, that is rescaled wherever the maximum grows, with the tile's weights summed
//     by halves (sum_of_tile() here, _sum_of_tile() there),
//   - products of values and weights in steps of 16 keys.
// On Hopper mma.m16n8k16 and wgmma add 16 products and the sum so far alike, whatever the order of the 16 and
// whichever operand is on the left.
//
// Compiled at run time with the macros of decode.cu, but for LSE and JOIN; SPLIT: keys of a split.
// Kernel: decode_fixed(...), a grid of one block per multiprocessor, 32 * WARPS threads. A warp takes a split of a
// (request, KV head) at a time, all of them dealt out in turn, and leaves what combine_fixed_kernel (flash.py)
// merges: unnormalised sums [split, row, head, dim], and maximum, sum of weights and factor [split, row, head, 3].
//
// Names: g = lane / 4 and c = lane % 4, the coordinates of mma fragments.

#include "bits.cuh"
#include "decode_formats.cuh"
#include "decode_tiles.cuh"
#include "decode_mma.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int WARP_BYTES = tile_bytes(KF) + tile_bytes(VF);
constexpr int SPLIT_TILES = SPLIT / TILE;
static_assert(TILE == 64, "of which triton.py has its sums");

// The tiles of a split that the queries of a request see.
struct Unit {
  TileCursor at;  // its first tile, counted from the request's first
  int split, stop;

  DEVICE bool find(const Batch& batch, int batch_size, int unit) {
    if (unit >= batch.cu_tiles[batch_size] * batch.kv_heads) return false;
    at.seek(batch, batch_size, unit);  // whose tiles are splits
    const int first_tile = at.first_tile;
    split = first_tile / SPLIT_TILES + at.tile;
    at.first_tile = 0;
    at.tile = max(first_tile, split * SPLIT_TILES);
    stop = min((at.seq_len + TILE - 1) / TILE, (split + 1) * SPLIT_TILES);
    return true;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    decode_fixed(const u16* q_ptr, float* parts, float* stats, const u8* k, const u8* k_scales, const u8* v,
                 const u8* v_scales, const int* seq_lens, const int* cu_seqlens_q, const int* page_table,
                 const float* k_scale, const float* v_scale, float softmax_scale, int rows, int batch_size,
                 int page_table_stride, int kv_heads, int group_size, int window, int k_scale_stride,
                 int v_scale_stride) {
  extern __shared__ __align__(128) u8 smem[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  u64* barriers = (u64*)(smem + WARPS * WARP_BYTES);
  int* cu_splits = (int*)(barriers + 2 * WARPS);
  __shared__ int warp_sums[WARPS];
  const Batch batch{seq_lens, cu_seqlens_q, page_table, cu_splits, page_table_stride, kv_heads, group_size, window};
  u8 *const key_tile = smem + warp * WARP_BYTES, *const value_tile = key_tile + tile_bytes(KF);
  const u32 key_barrier = shared_address(barriers + 2 * warp), value_barrier = key_barrier + 8;
  init_barriers(key_barrier, value_barrier, lane);
  sum_up_requests<WARPS>(cu_splits, warp_sums, batch_size, [&](int request) {
    const int tiles = (seq_lens[request] + TILE - 1) / TILE, first = batch.first_tile(request);
    return tiles > first ? (tiles + SPLIT_TILES - 1) / SPLIT_TILES - first / SPLIT_TILES : 0;
  });

  Unit unit, next;  // next: of the tile whose copies start next
  int number = warp * gridDim.x + blockIdx.x, next_number = number;
  const int stride = gridDim.x * WARPS;
  bool has_unit = unit.find(batch, batch_size, number), has_next = has_unit;
  if (!has_unit) return;
  next = unit;
  const Planes k_planes{k, k_scales}, v_planes{v, v_scales};
  int pages[PIECES];
  u64 places[PIECES];
  next.at.load_pages(batch, pages);
  auto copy_keys = [&] {
    if (has_next) {
      next.at.locate(batch, pages, places);
      start_copy<KF>(key_tile, key_barrier, k_planes, places, next.at.num_tokens(), lane);
    } else {
      start_no_copy();
    }
  };
  auto copy_values = [&] {
    if (has_next) {
      start_copy<VF>(value_tile, value_barrier, v_planes, places, next.at.num_tokens(), lane);
      if (++next.at.tile >= next.stop) has_next = next.find(batch, batch_size, next_number += stride);
      if (has_next) next.at.load_pages(batch, pages);
    } else {
      start_no_copy();
    }
  };
  __syncwarp();  // the barriers are initialised
  copy_keys();
  copy_values();

  const LaneBase keys = key_base(key_tile, g, c), values = value_base(value_tile, g, c);
  Queries q(nullptr, lane);  // in registers
  u32 parity = 0;
  Accumulator acc;
  for (; has_unit; has_unit = unit.find(batch, batch_size, number += stride)) {
    // --- load queries
    const int request = unit.at.request, head = unit.at.head, seq_len = unit.at.seq_len;
    const int queries = batch.num_queries(request), columns = queries * group_size;
    const u64 first_head = (u64)batch.first_row(request) * kv_heads * group_size + head * group_size;
    // Tokens that the first query sees. Each later one sees one more.
    const int seen_by_first = seq_len - queries + 1;
    const float score_scale = softmax_scale * (k_scale[head * k_scale_stride] * decode_factor(KF, true)) * LOG2E;
    int limit[COLUMN_GROUPS][2];
#pragma unroll
    for (int n = 0; n < COLUMN_GROUPS; n++) {
      const int column = 8 * n + g;
      const u64 query_head = first_head + column / group_size * kv_heads * group_size + column % group_size;
      load_queries(q, n, q_ptr + query_head * D, column < columns, c);
      for (int e = 0; e < 2; e++) limit[n][e] = seen_by_first + (8 * n + 2 * c + e) / group_size;
    }
    acc.clear();
    for (int tile = unit.at.tile; tile < unit.stop; tile++) {
      // --- scores
      const int first_token = tile * TILE;
      float scores[GROUPS][COLUMN_GROUPS][4] = {};
      wait_copy(key_barrier, parity);
#pragma unroll
      for (int i = 0; i < GROUPS; i++) accumulate_scores(scores[i], keys, 16 * i, q);
      __syncwarp();  // all lanes have read the keys
      copy_keys();

      // --- softmax
      const bool masked = first_token + TILE > seen_by_first || (window && first_token < seq_len - window);
      if (masked) apply_mask(scores, limit, first_token + 4 * (g & 1) + (g >> 1), window);
      u32 p[GROUPS][COLUMN_GROUPS][2];
      acc.softmax_in_order(p, scores, score_scale);

      // --- accumulate
      wait_copy(value_barrier, parity);
      if (first_token + TILE > seq_len) clear_unwritten(value_tile, seq_len - first_token, lane);
#pragma unroll
      for (int i = 0; i < GROUPS; i++) accumulate_values(acc.o, values, 16 * i, p[i]);
      __syncwarp();  // all lanes have read the values
      copy_values();
      parity ^= 1;
    }

    // --- store
    const float factor = v_scale[head * v_scale_stride] * decode_factor(VF, false);
    const u64 first_part = (u64)unit.split * rows * kv_heads * group_size + first_head;
#pragma unroll
    for (int n = 0; n < COLUMN_GROUPS; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int column = 8 * n + 2 * c + e;
        if (column >= columns) continue;
        const u64 part = first_part + column / group_size * kv_heads * group_size + column % group_size;
        float* to = parts + part * D + g * (D / 8);
#pragma unroll
        for (int t = 0; t < D / 16; t += 2) {
          *(float4*)(to + 2 * t) =
              make_float4(acc.o[n][t][e], acc.o[n][t][e + 2], acc.o[n][t + 1][e], acc.o[n][t + 1][e + 2]);
        }
        if (g == 0) {
          stats[3 * part] = acc.m[n][e];
          stats[3 * part + 1] = acc.l[n][e];
          stats[3 * part + 2] = factor;
        }
      }
    }
  }
}
