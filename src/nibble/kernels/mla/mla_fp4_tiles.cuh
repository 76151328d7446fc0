// How mla_fp4.cu finds the tiles of a batch in pages, copies them as they are stored to shared memory, and
// reads them there.
//
// Needs the constants of mla_fp4.cu.

// ---- the line of tiles --------------------------------------------------------------------------------
struct Batch {
  const int *seq_lens, *cu_seqlens_q, *page_table;
  // 64 times the tiles before each request, plus one less than what the request before it has in its last
  // tile.
  const int* packed_cu_tiles;
  int size, page_table_stride, page_bits;

  DEVICE int tiles_before(int request) const { return packed_cu_tiles[request] >> 6; }

  DEVICE int seq_len(int request) const {
    const int tiles = tiles_before(request + 1) - tiles_before(request);
    return tiles ? (tiles - 1) * TILE + (packed_cu_tiles[request + 1] & 63) + 1 : 0;
  }
};

// A block's tiles of one request after the other.
struct Segment {
  const Batch& batch;
  int request, begin, end, block_end;

  DEVICE Segment(const Batch& batch, int request, int block_begin, int block_end)
      : batch(batch), request(request), begin(block_begin), end(block_begin), block_end(block_end) {}

  DEVICE bool advance() {
    begin = end;
    if (begin >= block_end) return false;
    while (batch.tiles_before(request + 1) <= begin) request++;
    end = min(block_end, batch.tiles_before(request + 1));
    return true;
  }
};

// Where a warp's 16 tokens of a tile begin. Behind a request's end it is page 0; behind the last tile, slot
// -1.
struct PageSlot {
  int page, slot;
};

// A block's tiles, one after the other. It is kept in registers, as look-ups in shared memory are slower.
struct TileCursor {
  const Batch& batch;
  int tile, block_end, request, before, end, seq_len;
  const int* pages;

  DEVICE TileCursor(const Batch& batch, int request, int tile, int block_end)
      : batch(batch), tile(tile), block_end(block_end) {
    load_request(request);
  }

  DEVICE void load_request(int index) {
    request = index;
    before = batch.tiles_before(request);
    end = batch.tiles_before(request + 1);
    seq_len = batch.seq_len(request);
    pages = batch.page_table + (u64)request * batch.page_table_stride;
  }

  DEVICE PageSlot advance(int warp) {
    if (tile >= block_end) return {0, -1};
    while (tile >= end) load_request(request + 1);
    const int token = (tile - before) * TILE + 16 * warp;
    tile++;
    return {token < seq_len ? pages[token >> batch.page_bits] : 0, token & ((1 << batch.page_bits) - 1)};
  }
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

DEVICE const u8* row_of(const Plane& plane, const PageSlot& at) {
  return plane.data + ((u64)(u32)at.page * plane.page_stride + (u32)at.slot * plane.slot_stride);
}

// Planes are stored with 16 bytes of a row at an index that is mixed with bits of the row, so that the loads
// of eight lanes fall into different banks. Records are stored as they are.
DEVICE u32 swizzle(u32 index, u32 row) { return index ^ index >> 3 & 1 ^ 2 * (row & 1); }

// Copy 16 bytes a lane, 512 * AT bytes further on both sides.
template <int AT>
DEVICE void copy_16_bytes(u32 to, const u8* from) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0+%2],[%1+%2],16;"
               :: "r"(to), "l"(from), "n"(512 * AT) : "memory");
}

// Start to copy a warp's 16 tokens of a tile as they are stored. `raw_full` is arrived at when they have
// landed.
DEVICE void start_copy(u32 to, const Latents& from, const PageSlot& at, int lane, u32 raw_full) {
  const bool is_record = from.values.slot_stride == ROW_BYTES;
  const u8* const values = row_of(from.values, at) + 16 * lane;
  const u8* const scales = is_record ? values + 16 * VALUE_BYTES : row_of(from.scales, at) + 16 * lane;
  const u8* const rope = is_record ? values + 16 * (VALUE_BYTES + SCALE_BYTES)
                                   : row_of(from.rope, at) + 16 * lane;
  // 16 lanes copy a row of values, 8 lanes one of rotary values.
  const u32 to_values = to + 16 * (is_record ? lane : swizzle(lane % 16, lane / 16) + lane / 16 * 16);
  const u32 to_scales = to + 16 * VALUE_BYTES + 16 * lane;
  const u32 to_rope =
      to + 16 * (VALUE_BYTES + SCALE_BYTES) + 16 * (is_record ? lane : lane ^ lane / 2 & 4);
  copy_16_bytes<0>(to_values, values);
  copy_16_bytes<1>(to_values, values);
  copy_16_bytes<2>(to_values, values);
  copy_16_bytes<3>(to_values, values);
  copy_16_bytes<4>(to_values, values);
  copy_16_bytes<5>(to_values, values);
  copy_16_bytes<6>(to_values, values);
  copy_16_bytes<7>(to_values, values);
  copy_16_bytes<0>(to_scales, scales);
  copy_16_bytes<0>(to_rope, rope);
  copy_16_bytes<1>(to_rope, rope);
  copy_16_bytes<2>(to_rope, rope);
  copy_16_bytes<3>(to_rope, rope);
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(raw_full) : "memory");
}

// ---- loads from shared memory -------------------------------------------------------------------------
// What a lane has of a stored tile: rows g and g + 8.
struct StoredRow {
  uint4 values[4];
  uint2 scales;
};

struct StoredRope {
  uint4 x[2], y[2];  // of rows g and g + 8
};

// Shared addresses of a lane's row g, and how much further row g + 8 is.
struct LaneBase {
  u32 values[4], scales, rope[2];
  u32 values_step, scales_step, rope_step;
};

DEVICE LaneBase lane_base(u32 raw, bool is_record, int g, int c) {
  LaneBase base;
  const u32 pitch = is_record ? ROW_BYTES : VALUE_BYTES, scales = is_record ? ROW_BYTES : SCALE_BYTES;
  const u32 rope = is_record ? ROW_BYTES : ROPE_BYTES;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    base.values[j] = raw + g * pitch + 16 * (is_record ? 4 * c + j : swizzle(4 * c + j, g));
  }
  base.scales = raw + (is_record ? VALUE_BYTES : 16 * VALUE_BYTES) + g * scales + 8 * c;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    base.rope[half] = raw + (is_record ? VALUE_BYTES + SCALE_BYTES : 16 * (VALUE_BYTES + SCALE_BYTES)) +
                      g * rope + 64 * (is_record ? half : half ^ g & 1) + 16 * c;
  }
  base.values_step = 8 * pitch;
  base.scales_step = 8 * scales;
  base.rope_step = 8 * rope;
  return base;
}

DEVICE uint4 load_16_bytes(u32 from) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from) : "memory");
  return x;
}

DEVICE uint2 load_8_bytes(u32 from) {
  uint2 x;
  asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(x.x), "=r"(x.y) : "r"(from) : "memory");
  return x;
}

DEVICE void load_rows(StoredRow& first, StoredRow& second, StoredRope& rope, const LaneBase& base) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    rope.x[half] = load_16_bytes(base.rope[half]);
    rope.y[half] = load_16_bytes(base.rope[half] + base.rope_step);
  }
  first.scales = load_8_bytes(base.scales);
  second.scales = load_8_bytes(base.scales + base.scales_step);
#pragma unroll
  for (int j = 0; j < 4; j++) {
    first.values[j] = load_16_bytes(base.values[j]);
    second.values[j] = load_16_bytes(base.values[j] + base.values_step);
  }
}
