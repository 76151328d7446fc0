// Attention of many new tokens on SM90, over keys and values that prefill_stage.py has left in a workspace.
//
// A block takes 128 query rows of a head, then the next such item of its share. One thread brings queries, and keys and
// values in tiles of 128, by tensor copies into some stages each. Two warpgroups of 64 rows multiply in turns: a tile's
// weights are computed while the tensor cores sum up the values of the tile before, and work for the other warpgroup.
//
// Macros: STAGES, of keys and values; DIM, values of a head, 64 or 128; HALF, "bf16" or "f16", a string; and 0 or 1:
// CAPPED, whether scores are capped; WINDOWED, whether a query sees `window` keys alone.
#include "wgmma.cuh"

constexpr int KEYS = 128, GROUPS = 2, ROWS = 64 * GROUPS;
constexpr int COLUMN = 64, COLUMNS = DIM / COLUMN;  // values of 128 bytes; such columns of a row
constexpr int SCORES = KEYS / 2, SUMS = DIM / 2;    // of a thread
constexpr int Q_BYTES = ROWS * DIM * 2, TILE_BYTES = KEYS * DIM * 2;
constexpr int BARRIERS = 2 + 4 * STAGES, WARPS = 4 * GROUPS;
constexpr float SLACK = 8;  // how far, in powers of two, scores may lie above what weights are relative to
// The most that a thread's weights of a row and a tile add up to. Four times as much is more than a float16 can be.
constexpr float MAX_WEIGHTS = 1 << 14;

// Rows of a request's queries and what they see.
struct alignas(16) Item {
  int row, rows;  // the first row, and how many there are
  int key, keys;  // the first key in the workspace, and how many there are
  int visible;    // keys that the first row sees; each row sees one more than the row before it
  int padding[3];
};

struct Barriers {
  u32 first;
  DEVICE u32 q_full() const { return first; }
  DEVICE u32 q_empty() const { return first + 8; }
  DEVICE u32 k_full(int stage) const { return first + 8 * (2 + stage); }
  DEVICE u32 k_empty(int stage) const { return first + 8 * (2 + STAGES + stage); }
  DEVICE u32 v_full(int stage) const { return first + 8 * (2 + 2 * STAGES + stage); }
  DEVICE u32 v_empty(int stage) const { return first + 8 * (2 + 3 * STAGES + stage); }
};

DEVICE Item uniform(const Item& item) {
  return {uniform(item.row), uniform(item.rows), uniform(item.key), uniform(item.keys), uniform(item.visible), {}};
}

// The tiles of keys that an item's rows see.
struct Span {
  int start, stop;
  DEVICE Span(const Item& item, int window) {
    int last = max(min(item.keys, item.visible + item.rows - 1), 0);
    stop = (last + KEYS - 1) / KEYS;
    start = WINDOWED ? min(max(item.visible - window, 0) / KEYS, stop) : 0;
  }
};

// The item that a block takes in a turn, times the heads, plus its head; below 0 none.
DEVICE int item_of(const int* shares, int turn) { return shares[turn * gridDim.x + blockIdx.x]; }

// Copy columns of so many rows, from row z of head y on.
DEVICE void copy(u32 to, const TensorMap* map, int rows, int y, int z, u32 barrier) {
#pragma unroll
  for (int j = 0; j < COLUMNS; j++)
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0],[%1,{%2,%3,%4}],[%5];"
        :: "r"(to + j * rows * SWIZZLED), "l"(map), "r"(j * COLUMN), "r"(y), "r"(z), "r"(barrier) : "memory");
}

// ---- the thread that copies ---------------------------------------------------------------------------

DEVICE void produce(
    const TensorMap& q_map, const TensorMap& k_map, const TensorMap& v_map, const Item* items, const int* shares,
    int heads, int group, int window, u32 q, u32 k, u32 v, Barriers barriers) {
  int step = 0;
  for (int turn = 0, i; (i = item_of(shares, turn)) >= 0; turn++) {
    Item item = items[i / heads];
    int head = i % heads, kv_head = head / group;
    Span span(item, window);
    auto copy_queries = [&] {
      barrier_wait(barriers.q_empty(), turn + 1 & 1);
      expect(barriers.q_full(), Q_BYTES);
      copy(q, &q_map, ROWS, head, item.row, barriers.q_full());
    };
    if (span.start == span.stop) copy_queries();
    for (int tile = span.stop - 1; tile >= span.start; tile--, step++) {
      int stage = step % STAGES, parity = step / STAGES + 1 & 1, key = item.key + tile * KEYS;
      barrier_wait(barriers.k_empty(stage), parity);
      expect(barriers.k_full(stage), TILE_BYTES);
      copy(k + stage * TILE_BYTES, &k_map, KEYS, kv_head, key, barriers.k_full(stage));
      // There is room for keys before the queries in front have been read.
      if (tile == span.stop - 1) copy_queries();
      barrier_wait(barriers.v_empty(stage), parity);
      expect(barriers.v_full(stage), TILE_BYTES);
      copy(v + stage * TILE_BYTES, &v_map, KEYS, kv_head, key, barriers.v_full(stage));
    }
  }
}

// ---- the warpgroups that multiply ---------------------------------------------------------------------

// A thread's two rows.
struct State {
  float sums[SUMS];
  float peak[2], total[2];  // peaks are powers of two

  DEVICE State() {
#pragma unroll
    for (int i = 0; i < SUMS; i++) sums[i] = 0;
    peak[0] = peak[1] = LOWEST, total[0] = total[1] = 0;
  }
};

DEVICE void start_scores(float (&scores)[SCORES], u32 q, u32 k) {
  u32 a = matrix_at(q), b = matrix_at(k);
  wgmma_fence();
#pragma unroll
  for (int j = 0; j < DIM / 16; j++) {
    int inner = j % 4 * 32, column = j / 4 * SWIZZLED;  // bytes within a row of a column; and to the column
    wgmma(scores, behind(a, column * ROWS + inner), behind(b, column * KEYS + inner), j > 0);
  }
  wgmma_commit();
}

// Scores of keys that a row does not see become minus infinity. first: the tile's first key; visible: keys that the
// thread's first row sees.
DEVICE void mask(float (&scores)[SCORES], int first, int keys, int visible, int window, int lane) {
#pragma unroll
  for (int i = 0; i < SCORES; i++) {
    int key = first + i / 4 * 8 + lane % 4 * 2 + i % 2, seen = visible + (i & 2 ? 8 : 0);
    bool hidden = key >= min(seen, keys) || (WINDOWED && key < seen - window);
    if (hidden) scores[i] = minus_infinity();
  }
}

DEVICE float max_of_quad(float x) {
  x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
  return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

DEVICE float sum_of_quad(float x) {
  x += __shfl_xor_sync(ALL_LANES, x, 1);
  return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

// Scores become weights, relative to peaks. added: their sums, two of each row.
DEVICE void weigh_by(const float (&peak)[2], float (&scores)[SCORES], float scale, float (&added)[4]) {
#pragma unroll
  for (int i = 0; i < SCORES; i++) added[i % 4] += scores[i] = ex2(scores[i] * scale - peak[i / 2 % 2]);
}

// Scores become weights, relative to the peak of all tiles so far. It stays where it is until a score is much higher, so
// that sums are hardly ever rescaled. rescale: what the rows' sums are to be multiplied by.
DEVICE void weigh(float (&scores)[SCORES], State& state, float scale, float (&rescale)[2]) {
  constexpr int chains = 4;  // of maxima, so that none waits for the one before
  float peaks[2][chains], added[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 2 * chains; i++) peaks[i % 2][i / 2] = LOWEST;
#pragma unroll
  for (int i = 0; i < SCORES; i += 2) {
    float& peak = peaks[i / 2 % 2][i / 4 % chains];
    peak = fmaxf(peak, fmaxf(scores[i], scores[i + 1]));
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float peak = fmaxf(fmaxf(peaks[r][0], peaks[r][1]), fmaxf(peaks[r][2], peaks[r][3])), before = state.peak[r];
    peak = fmaxf(max_of_quad(peak) * scale, LOWEST);
    state.peak[r] = peak - before > SLACK ? peak : before;
    rescale[r] = ex2(before - state.peak[r]);
  }
  weigh_by(state.peak, scores, scale, added);
#pragma unroll
  for (int r = 0; r < 2; r++) state.total[r] = state.total[r] * rescale[r] + added[2 * r] + added[2 * r + 1];
}

// The same without a look for higher peaks, which takes a fifth of the time, and finds one in few tiles. Returns whether
// the peaks will do: if not, scores are lost, and the state is as before. Goes on when all weights are there, as hold()
// does. rows: how many there are from the thread's first on; what lies behind an item's rows does not count.
DEVICE bool weigh_by_peaks(float (&scores)[SCORES], State& state, float scale, int rows, int warpgroup) {
  float added[4] = {0, 0, 0, 0};
  weigh_by(state.peak, scores, scale, added);
  float upper = added[0] + added[1], lower = added[2] + added[3];
  bool is_high = (rows > 0 && !(upper <= MAX_WEIGHTS)) || (rows > 8 && !(lower <= MAX_WEIGHTS));
  if (any_of_warpgroup(is_high, warpgroup)) return false;
  state.total[0] += upper, state.total[1] += lower;
  return true;
}

// Goes on when all weights are there. Without a branch that depends on them the compiler waits for products before it
// computes weights, and not behind.
DEVICE void hold(const State& state) {
  if (__any_sync(ALL_LANES, state.total[0] + state.total[1] < 0)) asm volatile("nanosleep.u32 0;" ::: "memory");
}

DEVICE void rescale_sums(State& state, const float (&rescale)[2]) {
  if (!__any_sync(ALL_LANES, rescale[0] != 1 || rescale[1] != 1)) return;
#pragma unroll
  for (int i = 0; i < SUMS; i++) state.sums[i] *= rescale[i / 2 % 2];
}

DEVICE u32 pack_half(float lo, float hi) { return HALF[0] == 'b' ? pack_bf16(lo, hi) : pack_f16(lo, hi); }

// A tile's weights as the tensor cores take them.
DEVICE void pack(u32 (&weights)[KEYS / 4], const float (&scores)[SCORES]) {
#pragma unroll
  for (int i = 0; i < KEYS / 4; i++) weights[i] = pack_half(scores[2 * i], scores[2 * i + 1]);
}

DEVICE void start_sums(State& state, const u32 (&weights)[KEYS / 4], u32 v) {
  u32 b = matrix_at(v, KEYS * SWIZZLED);
  wgmma_fence();
#pragma unroll
  for (int j = 0; j < KEYS / 16; j++) wgmma_by_rows(state.sums, weights + 4 * j, behind(b, j * 16 * SWIZZLED));
  wgmma_commit();
}

// Among four neighbouring lanes, word i of lane j goes to word j of lane i.
DEVICE void transpose_quad(u32 (&words)[4], int lane) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    bool upper = lane & bit;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i & bit) continue;
      u32 other = __shfl_xor_sync(ALL_LANES, upper ? words[i] : words[i | bit], bit);
      (upper ? words[i] : words[i | bit]) = other;
    }
  }
}

// Store the means of the thread's rows, 16 bytes at a time, and their log-sum-exps.
DEVICE void store(
    const State& state, const float* sinks, u16* out, float* lse, const Item& item, int row, int head, int heads,
    int lse_stride, int lane) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float peak = state.peak[r], total = sum_of_quad(state.total[r]), factor = 1;
    if (sinks) {
      float sink = sinks[head] * LOG2E, top = fmaxf(peak, sink);
      factor = ex2(peak - top), total = total * factor + ex2(sink - top), peak = top;
    }
    factor = total > 0 ? factor / total : total == total ? 0 : total;  // NaN stays NaN
    int at = row + 8 * r;
    bool live = at < item.rows;
    u16* to = out + (size_t(item.row + at) * heads + head) * DIM;
#pragma unroll
    for (int j = 0; j < DIM / 32; j++) {
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int place = 16 * j + 4 * i + 2 * r;
        words[i] = pack_half(state.sums[place] * factor, state.sums[place + 1] * factor);
      }
      transpose_quad(words, lane);
      if (live) *(uint4*)(to + 32 * j + lane % 4 * 8) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    if (lse && live && lane % 4 == 0)
      lse[size_t(head) * lse_stride + item.row + at] = total == 0 ? minus_infinity() : (peak + lg2(total)) / LOG2E;
  }
}

DEVICE void consume(
    const Item* items, const int* shares, int heads, int window, float scale, float cap, const float* sinks, u16* out,
    float* lse, int lse_stride, u32 q, u32 k, u32 v, Barriers barriers) {
  int lane = threadIdx.x % 32, warpgroup = uniform(threadIdx.x / 128) - 1, first = warpgroup * 64, step = 0;
  q += first * SWIZZLED;
  if (warpgroup == 1) end_turn(warpgroup);
  for (int turn = 0, i; (i = uniform(item_of(shares, turn))) >= 0; turn++) {
    const Item item = uniform(items[i / heads]);
    Span span(item, window);
    // Tiles from here on, and with a window those before another, hold keys that some of the rows do not see.
    int masked = max(min(item.keys, item.visible + first), 0) / KEYS;
    int windowed = WINDOWED ? (max(item.visible + first + 63 - window, 0) + KEYS - 1) / KEYS : 0;
    int row = first + threadIdx.x / 32 % 4 * 16 + lane / 4;
    State state;
    float scores[SCORES], rescale[2];
    u32 weights[KEYS / 4];

    auto limit = [&](int tile) {
#if CAPPED  // tanh
#pragma unroll
      for (int j = 0; j < SCORES; j++) scores[j] = cap - 2 * cap * rcp(1 + ex2(scores[j] * (2 * LOG2E / cap)));
#endif
      if (tile >= masked || tile < windowed)
        mask(scores, tile * KEYS, item.keys, item.visible + row, window, lane);
    };
    auto release = [&](u32 barrier) {
      if (lane == 0) barrier_arrive(barrier);
    };

    barrier_wait(barriers.q_full(), turn & 1);
    if (span.start < span.stop) {
      barrier_wait(barriers.k_full(step % STAGES), step / STAGES & 1);
      await_turn(warpgroup);
      start_scores(scores, q, k + step % STAGES * TILE_BYTES);
      end_turn(warpgroup);
      wgmma_wait<0>();
      keep(scores);
      release(barriers.k_empty(step % STAGES));
      limit(span.stop - 1);
      weigh(scores, state, scale, rescale);
      pack(weights, scores);
      for (int tile = span.stop - 2; tile >= span.start; tile--, step++) {
        // The next tile's scores, and this one's sums.
        int stage = step % STAGES, next = (step + 1) % STAGES;
        barrier_wait(barriers.k_full(next), (step + 1) / STAGES & 1);
        barrier_wait(barriers.v_full(stage), step / STAGES & 1);
        await_turn(warpgroup);
        start_scores(scores, q, k + next * TILE_BYTES);
        start_sums(state, weights, v + stage * TILE_BYTES);
        end_turn(warpgroup);
        wgmma_wait<1>();
        keep(scores);
        // Rows that see no key of masked tiles have no peak before the first of the others.
        bool rises = tile + 1 >= masked;
        if (!rises) {
          limit(tile);
          rises = !weigh_by_peaks(scores, state, scale, item.rows - row, warpgroup);
          if (rises) {
            start_scores(scores, q, k + next * TILE_BYTES);
            wgmma_wait<0>();
            keep(scores);
          }
        }
        release(barriers.k_empty(next));
        if (tile == span.start) release(barriers.q_empty());
        if (rises) {
          limit(tile);
          weigh(scores, state, scale, rescale);
          hold(state);
        }
        wgmma_wait<0>();
        keep(state.sums);
        release(barriers.v_empty(stage));
        if (rises) rescale_sums(state, rescale);
        pack(weights, scores);
      }
      int stage = step % STAGES;
      barrier_wait(barriers.v_full(stage), step / STAGES & 1);
      await_turn(warpgroup);
      start_sums(state, weights, v + stage * TILE_BYTES);
      end_turn(warpgroup);
      wgmma_wait<0>();
      keep(state.sums);
      release(barriers.v_empty(stage));
      step++;
    }
    if (span.stop - span.start < 2) release(barriers.q_empty());
    store(state, sinks, out, lse, item, row, i % heads, heads, lse_stride, lane);
  }
}

// ---- the kernel ---------------------------------------------------------------------------------------

// Arguments: maps of the queries [T, H, D], keys [L, G, D] and values [L, G, D]; items; what each block takes in each turn
// (item_of); sinks [H] or null; the output [T, H, D]; log-sum-exps [H, T] or null, and their stride. scale: of scores,
// times LOG2E; cap: what scores are capped at before they are scaled. A head of keys and values serves `group` heads of
// queries.
extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1) prefill_attention(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map, const Item* items, const int* shares, const float* sinks, u16* out,
    float* lse, float scale, float cap, int heads, int group, int lse_stride, int window) {
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ u64 places[BARRIERS];
  u32 q = (shared_address(shared) + EIGHT_ROWS - 1) / EIGHT_ROWS * EIGHT_ROWS;
  u32 k = q + Q_BYTES, v = k + STAGES * TILE_BYTES;
  Barriers barriers{shared_address(places)};
  if (threadIdx.x == 0) {
    for (int i = 0; i < BARRIERS; i++) {
      // Those that are full are filled by one thread, those that are empty by each warp.
      bool full = i < 2 ? i == 0 : (i - 2) / STAGES % 2 == 0;
      barrier_init(barriers.first + 8 * i, full ? 1 : WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 0)
      produce(q_map, k_map, v_map, items, shares, heads, group, window, q, k, v, barriers);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    consume(items, shares, heads, window, scale, cap, sinks, out, lse, lse_stride, q, k, v, barriers);
  }
}
