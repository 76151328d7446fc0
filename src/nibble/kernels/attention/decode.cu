// Decode attention over paged low-precision KV: one query token a request, or a few that are verified; GQA;
// one launch.
//
// Compiled at run time, with these macros:
//   HEAD_DIM                64, 128 or 256
//   K_FORMAT, V_FORMAT      a Format of decode_formats.cuh
//   COLUMNS                 8, 16 or 32: query tokens x query heads that a KV head serves at once
//   TILE                    tokens of a tile, 32 or 64
//   WARPS                   warps of a block
//   Q_BF16                  1: queries and output are bfloat16; 0: float16
//   SOFTCAP                 1: scores are capped
//   LSE                     1: the log-sum-exp is stored too, and values in float32
//   JOIN                    1: attention over other keys is merged into the output
//   QUERIES_IN_REGISTERS    1: a warp's queries are in registers; 0: in shared memory
//   PAGE                    slots of a page: 16, 32, 64 or 128
// Kernel: decode(...), a grid of one block per multiprocessor, 32 * WARPS threads, dynamic shared memory as
// cuda.py says.
//
// Storage is the packing `hnd`, bytes as the formats define them: [page, head, slot, row], scales likewise.
//
// Partition. A tile is TILE tokens of one KV head. All tiles of the batch stand in one line, requests
// outermost, then heads. The line is cut evenly over the blocks, and a block's part over its warps, so that
// mixed lengths load every warp alike. A warp streams its tiles through shared memory of its own (bulk copies
// from SM90 on, cp.async before): keys of the next tile arrive while it accumulates values, values while it
// computes scores. It waits for no other warp until the end. A (request, head) that several warps or blocks
// share is merged from partial results in order, so that the result depends on the batch's shape only, not on
// timing.
//
// Arithmetic. KV stands on the M side of mma.m16n8k16, the group's queries on N, so that no rows are wasted:
//   S^T [token, column] = K Q^T,   O^T [dim, column] = V^T P^T
// A lane's bytes of K and V are its fragments, as the order of dims, and of tokens within a tile, may be
// chosen freely:
//   K row g of a half group is token 4 * (g & 1) + (g >> 1),
//   V column pairs are tokens (c, c + 4), (c + 8, c + 12).
// E2M1 becomes float16 by masks and shifts, exactly, times 2^-14; block scales multiply it as float16 pairs.
// The powers of two are undone in the softmax scale and the output.
//
// Names: g = lane / 4 and c = lane % 4, the coordinates of mma fragments. Measurements:
// docs/design/decode-kernel.md.

#include "bits.cuh"
#include "decode_formats.cuh"
#include "decode_tiles.cuh"
#include "decode_mma.cuh"
#include "decode_merge.cuh"

static_assert(!(LSE && JOIN), "what is merged already is not a part");
constexpr int THREADS = 32 * WARPS;
// Of shared memory: a tile of keys and one of values, and queries where there are too many for registers. A warp leaves
// its partial result where its tiles were.
constexpr int TILE_BYTES = larger(tile_bytes(KF) + tile_bytes(VF), PARTIAL_BYTES);
constexpr int WARP_BYTES = TILE_BYTES + Queries::BYTES;
// Partial results of more blocks than these are merged in two rounds: of each eight blocks, and then of the
// eights.
constexpr int MERGE_BLOCKS = 8;

// Requests of no tokens have outputs of zeros, or what they have from other keys. thread: threadIdx.x, which is read in the kernel, as its
// launch bounds tell the compiler there how large it can be.
DEVICE void clear_empty_requests(const Batch& batch, const Output& output, int batch_size, u32 thread) {
  for (int request = blockIdx.x; request < batch_size; request += gridDim.x) {
    if (batch.seq_lens[request] <= 0) {
      const int heads = batch.kv_heads, group = batch.group_size;
#if LSE || JOIN
      const int first_row = batch.first_row(request), columns = batch.num_queries(request) * group;
      for (int i = thread; i < heads * columns * (D / 4); i += THREADS) {
        const int head = i / (D / 4) / columns, column = i / (D / 4) % columns;
        const float2 f = output.factors(first_row, head, column, LOWEST, 0);
        const int dim = i % (D / 4) * 4;
        *(OutputQuad*)(output.row(first_row, head, column) + dim) =
            output.quad(make_float4(0, 0, 0, 0), f, first_row, head, column, dim);
#if LSE
        if (i % (D / 4) == 0) output.store_lse(first_row, head, column, LOWEST, 0);
#endif
      }
#else
      for (int i = thread; i < batch.num_queries(request) * heads * group * D / 2; i += THREADS) {
        ((u32*)(output.out + (u64)batch.first_row(request) * heads * group * D))[i] = 0;
      }
#endif
    }
  }
}

// --- kernel
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    decode(const u16* q_ptr, OutputValue* out_ptr, const u8* k, const u8* k_scales, const u8* v, const u8* v_scales,
           const int* seq_lens, const int* cu_seqlens_q, const int* page_table, const float* k_scale,
           const float* v_scale, const float* sinks, u8* workspace, int* counters, float softmax_scale,
           float softcap, int batch_size, int page_table_stride, int kv_heads, int group_size, int window,
           int k_scale_stride, int v_scale_stride
#if LSE
           , float* lse
#endif
#if JOIN
           , const float* other, const float* other_lse
#endif
           ) {
  extern __shared__ __align__(128) u8 smem[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  u64* barriers = (u64*)(smem + WARPS * WARP_BYTES);
  int* cu_tiles = (int*)(barriers + 2 * WARPS);
  __shared__ int warp_sums[WARPS];
  Batch batch{seq_lens, cu_seqlens_q, page_table, cu_tiles, page_table_stride, kv_heads, group_size, window};
  Output output{out_ptr, v_scale, sinks, v_scale_stride, group_size, kv_heads
#if LSE
                , lse
#endif
#if JOIN
                , other, other_lse
#endif
  };
  u8 *const key_tile = smem + warp * WARP_BYTES, *const value_tile = key_tile + tile_bytes(KF);
  const u32 key_barrier = shared_address(barriers + 2 * warp), value_barrier = key_barrier + 8;
  // The workspace holds a partial result of each warp, for one that it stores before its end, and two of each
  // block.
  u8* const warp_partials = workspace + (u64)blockIdx.x * WARPS * PARTIAL_BYTES;
  u8* const block_partials = workspace + (u64)gridDim.x * WARPS * PARTIAL_BYTES;

  init_barriers(key_barrier, value_barrier, lane);
  wait_for_inputs();

  // --- partition
  sum_up_requests<WARPS>(cu_tiles, warp_sums, batch_size, [&](int request) {
    const int len = seq_lens[request];
    return len > 0 ? (len + TILE - 1) / TILE - batch.first_tile(request) : 0;
  });
  const int num_tiles = cu_tiles[batch_size] * kv_heads;
  const EvenSplit blocks(num_tiles, gridDim.x);
  const int block_begin = blocks.start(blockIdx.x), block_end = blocks.start(blockIdx.x + 1);
  const EvenSplit warps(block_end - block_begin, WARPS);
  const int warp_begin = block_begin + warps.start(warp), warp_end = block_begin + warps.start(warp + 1);

  if (warp_begin < warp_end) {
    TileCursor current, next;  // next: the tile whose copies start next
    current.seek(batch, batch_size, warp_begin);
    next = current;
    const Planes k_planes{k, k_scales}, v_planes{v, v_scales};
    int pages[PIECES], next_position = warp_begin;
    u64 rows[PIECES];
    next.load_pages(batch, pages);
    auto copy_keys = [&] {
      if (next_position < warp_end) {
        next.locate(batch, pages, rows);
        start_copy<KF>(key_tile, key_barrier, k_planes, rows, next.num_tokens(), lane);
      } else {
        start_no_copy();
      }
    };
    auto copy_values = [&] {
      if (next_position < warp_end) {
        start_copy<VF>(value_tile, value_barrier, v_planes, rows, next.num_tokens(), lane);
        if (++next_position < warp_end) {
          next.advance(batch, batch_size);
          next.load_pages(batch, pages);  // now, so that the next copy does not wait for the page table
        }
      } else {
        start_no_copy();
      }
    };
    __syncwarp();  // the barriers are initialised
    copy_keys();
    copy_values();

    const LaneBase keys = key_base(key_tile, g, c), values = value_base(value_tile, g, c);
    Queries q(key_tile + TILE_BYTES, lane);
    u32 parity = 0;
    Accumulator acc;
    // Each turn is a (request, head), or what the warp has of it.
    for (int position = warp_begin; position < warp_end; current.advance_head(batch, batch_size)) {
      const int queries = batch.num_queries(current.request), columns = queries * group_size;
      const int first_row = batch.first_row(current.request);
      const int count = min(current.num_tiles - current.tile, warp_end - position);
      const int first_token = (current.first_tile + current.tile) * TILE;
      const bool has_first = current.tile == 0, has_last = current.tile + count == current.num_tiles;
      // Tokens that the first query sees. Each later one sees one more.
      const int seen_by_first = current.seq_len - queries + 1;
      // Tiles from full_begin to full_end are seen by all columns, and need no mask.
      const int full_begin = window ? max(current.seq_len - window - first_token + TILE - 1, 0) / TILE : 0;
      const int full_end = (seen_by_first - first_token) / TILE;
      const float score_scale =
          softmax_scale * LOG2E * decode_factor(KF, true) * k_scale[current.head * k_scale_stride];

      // --- load queries
      int limit[COLUMN_GROUPS][2];  // tokens that a column may see
#pragma unroll
      for (int n = 0; n < COLUMN_GROUPS; n++) {
        const int column = 8 * n + g;
        const u64 query_head =
            (u64)(first_row + column / group_size) * kv_heads * group_size + current.head * group_size;
        load_queries(q, n, q_ptr + (query_head + column % group_size) * D, column < columns, c);
        for (int e = 0; e < 2; e++) limit[n][e] = seen_by_first + (8 * n + 2 * c + e) / group_size;
      }
      acc.clear();
      position += count;
      for (int t = 0; t < count; t++) {
        // --- scores
        float scores[GROUPS][COLUMN_GROUPS][4] = {};
        wait_copy(key_barrier, parity);
#pragma unroll
        for (int i = 0; i < GROUPS; i++) accumulate_scores(scores[i], keys, 16 * i, q);
        __syncwarp();  // all lanes have read the keys
        copy_keys();

        // --- softmax
        const bool masked = t < full_begin || t >= full_end;
        const int tile_token = first_token + t * TILE;
        if (SOFTCAP) apply_softcap(scores, score_scale, softcap);
        if (masked) apply_mask(scores, limit, tile_token + 4 * (g & 1) + (g >> 1), window);
        u32 p[GROUPS][COLUMN_GROUPS][2];
        acc.softmax(p, scores, score_scale);

        // --- accumulate
        wait_copy(value_barrier, parity);
        if (masked && tile_token + TILE > current.seq_len) {
          clear_unwritten(value_tile, current.seq_len - tile_token, lane);
        }
#pragma unroll
        for (int i = 0; i < GROUPS; i++) accumulate_values(acc.o, values, 16 * i, p[i]);
        __syncwarp();  // all lanes have read the values
        copy_values();
        parity ^= 1;
      }

      // --- store
      // If more tiles follow, the next one is being copied to where the partial result would be stored.
      const bool is_last = position == warp_end;
      u8* partial = is_last ? key_tile : warp_partials + warp * PARTIAL_BYTES;
      store_accumulator(acc, partial, has_first && has_last, output, first_row, current.head, columns, lane);
    }
  }

  clear_empty_requests(batch, output, batch_size, threadIdx.x);

  // --- merge
  // What several warps have of a (request, head) is merged here, each column, or a few, by one warp. What several
  // blocks have is merged by the warp that comes last. Of more than MERGE_BLOCKS blocks, each eight are merged by
  // their last, and then what those have left. Two such (request, head)s at most have partial results of the
  // same eight blocks: one that begins there, and one that does not.
  int* const eight_counters = counters;
  counters += 2 * ((gridDim.x + MERGE_BLOCKS - 1) / MERGE_BLOCKS) * COLUMNS;
  __syncthreads();
  for (int position = block_begin, turn = 0; position < block_end;) {
    TileCursor segment;
    segment.seek(batch, batch_size, position);
    const int start = position - segment.tile, stop = start + segment.num_tiles;  // of the (request, head)
    const int begin = max(start, block_begin), end = min(stop, block_end);        // what the block has of it
    const int first_warp = warps.owner(begin - block_begin), last_warp = warps.owner(end - 1 - block_begin);
    const bool is_all = start >= block_begin && stop <= block_end;
    const int columns = batch.num_queries(segment.request) * group_size;
    const int first_row = batch.first_row(segment.request);
    u8* const own_partial =
        is_all ? nullptr : block_partials + (2 * blockIdx.x + (start >= block_begin)) * PARTIAL_BYTES;
    // If the last warp has more tiles behind these, it has stored its partial result in the workspace.
    const bool last_continues = block_begin + warps.start(last_warp + 1) > end;
    for (int i = 0; first_merged(i) < columns && !(is_all && first_warp == last_warp); i++) {
      if (turn++ % WARPS != warp) continue;
      Partials from{smem + first_warp * WARP_BYTES, warp_partials + last_warp * PARTIAL_BYTES, WARP_BYTES,
                    last_continues ? last_warp - first_warp : -1, last_warp - first_warp + 1};
      u8* to = own_partial;
      // One copy of the code for warps, eights and all: instructions that are fetched for the first time cost
      // more than the loop.
#pragma unroll 1
      for (bool of_eight = true;; of_eight = false) {
        merge_partials(from, to, output, first_row, segment.head, MergeLane(first_merged(i), lane), columns);
        if (!to) break;
        const int first_block = blocks.owner(start), last_block = blocks.owner(stop - 1);
        const int first_eight = first_block / MERGE_BLOCKS, eight = blockIdx.x / MERGE_BLOCKS;
        const bool two_rounds = last_block - first_block >= MERGE_BLOCKS;
        of_eight &= two_rounds;
        const int first = of_eight     ? max(first_block, eight * MERGE_BLOCKS)
                          : two_rounds ? first_eight * MERGE_BLOCKS
                                       : first_block;
        const int members = of_eight ? min(last_block, eight * MERGE_BLOCKS + MERGE_BLOCKS - 1) - first + 1
                            : two_rounds ? last_block / MERGE_BLOCKS - first_eight + 1
                                         : last_block - first_block + 1;
        int* counter = of_eight ? eight_counters + (2 * eight + (eight == first_eight)) * COLUMNS
                                : counters + (segment.request * kv_heads + segment.head) * COLUMNS;
        counter += first_merged(i);
        int is_last = 0;
        __threadfence();  // the partial result is visible before it is counted
        __syncwarp();
        // Columns that a warp merges together are counted together.
        if (lane == 0 && (is_last = atomicAdd(counter, 1) == members - 1)) *counter = 0;
        if (!__shfl_sync(ALL_LANES, is_last, 0)) break;
        __threadfence();  // and those of others are read after they were counted
        u8* const of_first_block = block_partials + (2 * first_block + 1) * PARTIAL_BYTES;
        u8* const of_others = block_partials + 2 * first * PARTIAL_BYTES;
        const bool with_first_block = !of_eight || first == first_block;
        from = {of_others, of_first_block, 2 * (two_rounds && !of_eight ? MERGE_BLOCKS : 1) * PARTIAL_BYTES,
                with_first_block ? 0 : -1, members};
        to = !of_eight ? nullptr : with_first_block ? of_first_block : of_others;
      }
    }
    position = end;
  }
}
