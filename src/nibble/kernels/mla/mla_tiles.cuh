// How mla.cu finds the tiles of a batch in pages, and copies them to shared memory.
//
// Needs the constants of mla.cu. A tile is 64 tokens; each warp of a warpgroup copies 16 of them, which lie
// in one page.

// ---- the line of tiles --------------------------------------------------------------------------------
struct Batch {
  const int *seq_lens, *cu_seqlens_q, *page_table;
  const int* cu_tiles;  // tiles before each request, in shared memory
  int size, page_table_stride, page_bits;
};

DEVICE int request_of(const Batch& batch, int tile) {
  int low = 0, high = batch.size - 1;
  while (low < high) {
    int middle = (low + high + 1) / 2;
    if (batch.cu_tiles[middle] <= tile) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// The tiles of a warpgroup: of the block's segment of one request after the other, every WARPGROUPS-th. The
// page of the next tile is looked up one turn before it is needed.
struct TileCursor {
  int request, tile, segment_end, block_end;
  int token, num_tokens;  // what the warp copies: its first token, and how many there are
  u64 page;

  DEVICE void locate(const Batch& batch, int warp) {
    token = (tile - batch.cu_tiles[request]) * TILE + 16 * warp;
    num_tokens = batch.seq_lens[request] - token;
    page = num_tokens > 0
               ? batch.page_table[(u64)request * batch.page_table_stride + (token >> batch.page_bits)]
               : 0;
  }

  DEVICE void start(const Batch& batch, int block_begin, int end, int warpgroup, int warp) {
    block_end = end;
    tile = block_begin + warpgroup;
    request = request_of(batch, block_begin);
    segment_end = min(end, batch.cu_tiles[request + 1]);
    settle(batch, warpgroup, warp);
  }

  // Go on to the next segment that has a tile for this warpgroup.
  DEVICE void settle(const Batch& batch, int warpgroup, int warp) {
    while (tile >= segment_end && segment_end < block_end) {
      tile = segment_end + warpgroup;
      while (batch.cu_tiles[request + 1] <= segment_end) request++;
      segment_end = min(block_end, batch.cu_tiles[request + 1]);
    }
    if (tile < segment_end) locate(batch, warp);
  }

  DEVICE void advance(const Batch& batch, int warpgroup, int warp) {
    tile += WARPGROUPS;
    settle(batch, warpgroup, warp);
  }

  DEVICE bool has_tile() const { return tile < segment_end; }
};

// ---- copies to shared memory --------------------------------------------------------------------------
struct Plane {
  const u8* data;
  u64 page_stride;  // in bytes
  u32 slot_stride;
};

struct Latents {
  Plane values, scales, rope;
};

DEVICE void copy_16_bytes(u32 to, const u8* from) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16;" :: "r"(to), "l"(from) : "memory");
}

DEVICE void copy_16_bytes_or_zeros(u32 to, const u8* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;"
               :: "r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
}

// Copy 16 rows of one plane, each in CHUNKS of 16 bytes, to rows of PITCH bytes. Of tokens that have the bit
// SWAP set, the halves of rows are swapped. ALL: all rows exist.
template <int CHUNKS, int PITCH, int SWAP, bool ALL>
DEVICE void copy_rows(u32 to, const Plane& from, u64 page, int slot, int num_tokens, int lane) {
  const int first = lane / CHUNKS, chunk = lane % CHUNKS;
  if (32 / CHUNKS > 16 && first >= 16) return;
  const u8* p = from.data + (page * from.page_stride + (u32)(slot + first) * from.slot_stride + 16 * chunk);
  to += first * PITCH;
#pragma unroll
  for (int row = 0; row < 16; row += 32 / CHUNKS) {
    const u32 place = to + row * PITCH + 16 * (chunk ^ (row + first & SWAP));
    if (ALL) {
      copy_16_bytes(place, p);
    } else {
      copy_16_bytes_or_zeros(place, first + row < num_tokens ? p : from.data, first + row < num_tokens);
    }
    p += 32 / CHUNKS * from.slot_stride;
  }
}

template <bool ALL>
DEVICE void copy_planes(u32 to, u32 to_rope, const Latents& from, u64 page, int slot, int num_tokens,
                        int lane) {
  copy_rows<VALUE_BYTES / 16, ROW_PITCH, 0, ALL>(to, from.values, page, slot, num_tokens, lane);
  copy_rows<SCALE_BYTES / 16, ROW_PITCH, 0, ALL>(to + VALUE_BYTES, from.scales, page, slot, num_tokens, lane);
  // Rotary values of tokens that are read together lie in different halves of their rows, and so in different
  // banks.
  copy_rows<ROPE * 2 / 16, ROPE * 2, 4, ALL>(to_rope, from.rope, page, slot, num_tokens, lane);
}

// Start to copy 16 tokens of a tile, which lie in one page. Those behind the first `num_tokens` become zeros,
// as slots that were never written may hold NaN.
DEVICE void start_copy(u32 to, u32 to_rope, const Latents& from, u64 page, int slot, int num_tokens,
                       int lane) {
  if (num_tokens >= 16) {
    copy_planes<true>(to, to_rope, from, page, slot, num_tokens, lane);
  } else {
    copy_planes<false>(to, to_rope, from, page, slot, num_tokens, lane);
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}
