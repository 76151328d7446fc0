// How decode.cu cuts a batch into tiles, finds them in pages, and copies them to shared memory.
//
// Needs decode_formats.cuh. A tile is copied in pieces, each of which lies in one page.

constexpr int PIECE = PAGE < TILE ? PAGE : TILE;  // tokens
constexpr int PIECES = TILE / PIECE;

// ---- the line of tiles --------------------------------------------------------------------------------
// `total` tiles, cut into n parts that are as even as can be.
struct EvenSplit {
  int quotient, remainder;

  DEVICE EvenSplit(int total, int n) : quotient(total / n), remainder(total % n) {}

  DEVICE int start(int part) const { return part * quotient + min(part, remainder); }

  // The part that has tile x.
  DEVICE int owner(int x) const {
    int in_larger_parts = remainder * (quotient + 1);
    return x < in_larger_parts ? x / (quotient + 1) : remainder + (x - in_larger_parts) / quotient;
  }
};

struct Batch {
  const int *seq_lens, *cu_seqlens_q, *page_table;
  const int* cu_tiles;  // tiles of one head in the requests before each, in shared memory
  int page_table_stride, kv_heads, group_size, window;

  // Without cu_seqlens_q each request has one query.
  DEVICE int first_row(int request) const { return cu_seqlens_q ? cu_seqlens_q[request] : request; }

  DEVICE int num_queries(int request) const {
    return cu_seqlens_q ? cu_seqlens_q[request + 1] - cu_seqlens_q[request] : 1;
  }

  // The first tile that a sliding window leaves.
  DEVICE int first_tile(int request) const {
    return window ? max(seq_lens[request] - num_queries(request) - window + 1, 0) / TILE : 0;
  }
};

// Write cu[i] = count(0) + ... + count(i - 1) to shared memory, for all requests and one more: a scan, a block's
// threads at a time. warp_sums: shared memory, one for each warp.
template <int WARPS_, class Count>
DEVICE void sum_up_requests(int* cu, int* warp_sums, int batch_size, Count count) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  for (int base = 0, before = 0; base < batch_size; base += 32 * WARPS_) {
    const int request = base + threadIdx.x;
    int x = request < batch_size ? count(request) : 0;
#pragma unroll
    for (int i = 1; i < 32; i <<= 1) {
      int y = __shfl_up_sync(ALL_LANES, x, i);
      if (lane >= i) x += y;
    }
    if (lane == 31) warp_sums[warp] = x;
    __syncthreads();
    int total = 0;
    for (int i = 0; i < WARPS_; i++) {
      if (i < warp) x += warp_sums[i];
      total += warp_sums[i];
    }
    if (request < batch_size) cu[request + 1] = before + x;
    before += total;
    __syncthreads();  // before warp_sums is written again
  }
  if (threadIdx.x == 0) cu[0] = 0;
  __syncthreads();
}

// A position in the line of tiles: requests outermost, then KV heads.
struct TileCursor {
  int request, head, tile;                  // tile: of those of the (request, head)
  int num_tiles, first_tile, seq_len;       // of the request

  DEVICE void load_request(const Batch& batch) {
    num_tiles = batch.cu_tiles[request + 1] - batch.cu_tiles[request];
    first_tile = batch.first_tile(request);
    seq_len = batch.seq_lens[request];
  }

  DEVICE void seek(const Batch& batch, int batch_size, int position) {
    int low = 0, high = batch_size - 1;
    while (low < high) {
      int middle = (low + high + 1) >> 1;
      if (batch.cu_tiles[middle] * batch.kv_heads <= position) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    request = low;
    load_request(batch);
    int rest = position - batch.cu_tiles[request] * batch.kv_heads;
    head = rest / num_tiles;
    tile = rest - head * num_tiles;
  }

  DEVICE void advance(const Batch& batch, int batch_size) {
    if (++tile >= num_tiles) advance_head(batch, batch_size);
  }

  // Go on to the first tile of the next (request, head).
  DEVICE void advance_head(const Batch& batch, int batch_size) {
    tile = 0;
    if (++head < batch.kv_heads) return;
    head = 0;
    do {
      request++;
    } while (request < batch_size && batch.cu_tiles[request + 1] == batch.cu_tiles[request]);
    if (request < batch_size) load_request(batch);
  }

  // Tokens of the tile, rounded up to a multiple of 16.
  DEVICE int num_tokens() const { return min(TILE, (seq_len - (first_tile + tile) * TILE + 15) & ~15); }

  // The page of each piece of the tile. A piece without tokens gets page 0, as the table has no entry for it.
  DEVICE void load_pages(const Batch& batch, int* pages) const {
    const int* row = batch.page_table + (u64)request * batch.page_table_stride;
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      int slot = (first_tile + tile) * TILE + i * PIECE;
      pages[i] = i == 0 || slot < seq_len ? row[slot / PAGE] : 0;
    }
  }

  // Where each piece of the tile begins, as a row of all [page, head, slot].
  DEVICE void locate(const Batch& batch, const int* pages, u64* rows) const {
    int slot = PAGE > TILE ? (first_tile + tile) * TILE % PAGE : 0;
#pragma unroll
    for (int i = 0; i < PIECES; i++) rows[i] = (u64)u32(pages[i] * batch.kv_heads + head) * PAGE + slot;
  }
};

// ---- copies to shared memory --------------------------------------------------------------------------
struct Planes {
  const u8 *values, *scales;
};

#if __CUDA_ARCH__ >= 900
DEVICE void copy_bulk(u32 to, const void* from, int bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];"
               :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
#else
DEVICE void copy_16_bytes(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16;" :: "r"(to), "l"(from) : "memory");
}
#endif

// Start to copy the first `num_tokens` tokens of a tile, a multiple of 16. rows: as TileCursor::locate gives
// them.
template <Format F>
DEVICE void start_copy(u8* to, u32 barrier, Planes from, const u64* rows, int num_tokens, int lane) {
#if __CUDA_ARCH__ >= 900
  // A bulk copy wants uniform registers. Only of an elected lane does the compiler know that it is alone;
  // under `lane == 0` it would write a loop over lanes.
  u32 elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p,0xffffffff;\nselp.u32 %0,1,0,p;\n}" : "=r"(elected));
  if (elected) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;"
                 :: "r"(barrier), "r"(num_tokens * (row_bytes(F) + scale_bytes(F))) : "memory");
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      const int count = PIECES == 1 ? num_tokens : smaller(num_tokens - i * PIECE, PIECE);
      if (PIECES > 1 && count <= 0) break;
      copy_bulk(shared_address(to) + i * PIECE * row_bytes(F), from.values + rows[i] * row_bytes(F),
                count * row_bytes(F), barrier);
      if (scale_bytes(F)) {
        copy_bulk(shared_address(to) + TILE * row_bytes(F) + i * PIECE * scale_bytes(F),
                  from.scales + rows[i] * scale_bytes(F), count * scale_bytes(F), barrier);
      }
    }
  }
#else
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    const int count = smaller(num_tokens - i * PIECE, PIECE);
    for (int j = 16 * lane; j < count * row_bytes(F); j += 512) {
      copy_16_bytes(shared_address(to) + i * PIECE * row_bytes(F) + j,
                    from.values + rows[i] * row_bytes(F) + j);
    }
    for (int j = 16 * lane; j < count * scale_bytes(F); j += 512) {
      copy_16_bytes(shared_address(to) + TILE * row_bytes(F) + i * PIECE * scale_bytes(F) + j,
                    from.scales + rows[i] * scale_bytes(F) + j);
    }
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Commit a copy of nothing, so that wait_copy() may count copies after the last tile too.
DEVICE void start_no_copy() {
#if __CUDA_ARCH__ < 900
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

DEVICE void wait_copy(u32 barrier, u32 parity) {
#if __CUDA_ARCH__ >= 900
  barrier_wait(barrier, parity);
#else
  asm volatile("cp.async.wait_group 1;" ::: "memory");  // keys and values alternate: all but the latest
  __syncwarp();
#endif
}

// Make ready a warp's barriers of copied keys and values, which it must not use before a __syncwarp().
DEVICE void init_barriers(u32 key_barrier, u32 value_barrier, int lane) {
#if __CUDA_ARCH__ >= 900
  if (lane == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0],1;\nmbarrier.init.shared::cta.b64 [%1],1;"
                 :: "r"(key_barrier), "r"(value_barrier) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
#endif
}

// Slots that were never written may hold NaN, and 0 * NaN is NaN: zero the values of a tile behind its
// `num_tokens`.
DEVICE void clear_unwritten(u8* values, int num_tokens, int lane) {
  for (int i = num_tokens * row_bytes(VF) + 4 * lane; i < TILE * row_bytes(VF); i += 128)
    *(u32*)(values + i) = 0;
  for (int i = num_tokens * scale_bytes(VF) + lane; i < TILE * scale_bytes(VF); i += 32) {
    values[TILE * row_bytes(VF) + i] = 0;
  }
#if __CUDA_ARCH__ >= 900
  // The next bulk copy to this place must not overtake these stores.
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  __syncwarp();
}
