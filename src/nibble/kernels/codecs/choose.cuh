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

// A lane's keys, in the order of logits, and of equal ones those that come first. logit_of(e): bfloat16 bits.
template <int VALUES, typename Logits>
DEVICE void make_keys(u32 (&keys)[VALUES], Logits logit_of, int experts) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < VALUES; i++) {
    const int e = lane + 32 * i;
    keys[i] = e < experts ? ordered(logit_of(e)) << 16 | (0xFFFF - e) : 0;
  }
}

// The largest keys of a warp: lane k gets the k-th, and lanes from top_k on 0.
template <int VALUES>
DEVICE u32 largest_keys(const u32 (&keys)[VALUES], int top_k) {
  const int lane = threadIdx.x & 31;
  u32 rest[VALUES], mine = 0;
#pragma unroll
  for (int i = 0; i < VALUES; i++) rest[i] = keys[i];
  for (int k = 0; k < top_k; k++) {
    u32 key = rest[0];
#pragma unroll
    for (int i = 1; i < VALUES; i++) key = max(key, rest[i]);
    key = __reduce_max_sync(ALL_LANES, key);
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
      if (rest[i] == key) rest[i] = 0;
    }
    if (lane == k) mine = key;
  }
  return mine;
}

DEVICE int expert_of(u32 key) { return int(0xFFFF - (key & 0xFFFF)); }

// The weight of a lane's key of the largest.
template <int VALUES>
DEVICE float weight_of(u32 mine, const u32 (&keys)[VALUES], int top_k, int is_normalized) {
  const float top = value_of(__shfl_sync(ALL_LANES, mine, 0) >> 16);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < VALUES; i++) {
    if (!is_normalized && keys[i]) sum += __expf(value_of(keys[i] >> 16) - top);
  }
  const float share = int(threadIdx.x & 31) < top_k ? __expf(value_of(mine >> 16) - top) : 0;
  sum = sum_of_lanes(is_normalized ? share : sum);
  return share / sum;
}

// A warp chooses the experts of a token. VALUES: logits of a lane.
template <int VALUES, typename Logits>
DEVICE Choice choose(Logits logit_of, int experts, int top_k, int is_normalized) {
  u32 keys[VALUES];
  make_keys(keys, logit_of, experts);
  const u32 mine = largest_keys(keys, top_k);
  return {expert_of(mine), weight_of(mine, keys, top_k, is_normalized)};
}

DEVICE float shared_weight(u32 logit) { return 1 / (1 + __expf(-__uint_as_float(logit << 16))); }

// The same; has_shared: behind the experts is one that all tokens have, with the sigmoid of its logit for a weight.
template <int VALUES, typename Logits>
DEVICE Choice choose_all(Logits logit_of, int experts, int top_k, int is_normalized, int has_shared) {
  const Choice choice = choose<VALUES>(logit_of, experts, top_k, is_normalized);
  if (!has_shared || (threadIdx.x & 31) != top_k) return choice;
  return {experts, shared_weight(logit_of(experts))};
}
