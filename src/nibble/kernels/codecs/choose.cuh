// Which experts a token chooses, of logits in bfloat16.

// In the order of values, NaN the largest, both zeros equal.
DEVICE u32 ordered(u32 bits) {
  if ((bits & 0x7FFF) > 0x7F80) return 0xFFFF;
  if (bits == 0x8000) bits = 0;
  return bits & 0x8000 ? ~bits & 0xFFFF : bits | 0x8000;
}

DEVICE float value_of(u32 number) { return __uint_as_float((number & 0x8000 ? number & 0x7FFF : ~number & 0xFFFF) << 16); }

DEVICE float sum_of_lanes(float x) {
#pragma unroll
  for (int d = 16; d; d /= 2) x += __shfl_xor_sync(ALL_LANES, x, d);
  return x;
}

// What a lane has of a token's choices: its own, if it is one of the first top_k lanes.
struct Choice {
  int expert;
  float weight;
};

// A warp chooses the experts of a token, of equal logits those that come first. VALUES: logits of a lane.
// logit_of(e): bfloat16 bits.
template <int VALUES, typename Logits>
DEVICE Choice choose(Logits logit_of, int experts, int top_k, int is_normalized) {
  const int lane = threadIdx.x & 31;
  u32 keys[VALUES];
#pragma unroll
  for (int i = 0; i < VALUES; i++) {
    const int e = lane + 32 * i;
    keys[i] = e < experts ? ordered(logit_of(e)) << 16 | (0xFFFF - e) : 0;
  }
  float sum = 0, top = 0;
  u32 mine = 0;
  for (int k = 0; k < top_k; k++) {
    u32 key = keys[0];
#pragma unroll
    for (int i = 1; i < VALUES; i++) key = max(key, keys[i]);
    key = __reduce_max_sync(ALL_LANES, key);
    if (k == 0) {
      top = value_of(key >> 16);
#pragma unroll
      for (int i = 0; i < VALUES; i++) {
        if (!is_normalized && keys[i]) sum += __expf(value_of(keys[i] >> 16) - top);
      }
    }
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
      if (keys[i] == key) keys[i] = 0;
    }
    if (lane == k) mine = key;
  }
  const float share = lane < top_k ? __expf(value_of(mine >> 16) - top) : 0;
  sum = sum_of_lanes(is_normalized ? share : sum);
  return {int(0xFFFF - (mine & 0xFFFF)), share / sum};
}

// The same; has_shared: behind the experts is one that all tokens have, with the sigmoid of its logit for a weight.
template <int VALUES, typename Logits>
DEVICE Choice choose_all(Logits logit_of, int experts, int top_k, int is_normalized, int has_shared) {
  const Choice choice = choose<VALUES>(logit_of, experts, top_k, is_normalized);
  if (!has_shared || (threadIdx.x & 31) != top_k) return choice;
  return {experts, 1 / (1 + __expf(-__uint_as_float(logit_of(experts) << 16)))};
}
