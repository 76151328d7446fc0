// Packed matrices in the layout of humming-kernels: what few.cu and unpack.cu read.
//
// Macros:
//   CODES    0: E4M3, 1: E2M1
//   SCALES   of groups; 0: bfloat16, 1: E4M3, 2: E8M0
//   GROUP    inputs of a group: 16, 32 or 128
//   GLOBAL   0: there is none, 1: one float32, 2: a bfloat16 for each output
//
// Layout (humming 0.1.19, transform.py and process.cuh, for 16-bit activations): for 16 inputs after another, for 64
// outputs after another, BITS words of each lane of a warp, in which its values of four matrices of 16 x 16 are those
// of the operand A of mma.m16n8k16. Scales of a group are 64 outputs after another, of which those of g = lane / 4 are
// side by side: of outputs g, g + 8, ... Global scales have an order of their own, within 32 outputs.

constexpr int BITS = CODES == 0 ? 8 : 4;
constexpr int VECTORS = BITS / 4;                 // of 16 bytes that a lane has of 16 inputs of 64 outputs
constexpr int SCALE_WORDS = SCALES == 0 ? 4 : 2;  // of a lane's eight scales
constexpr int HALF_BYTES = VECTORS * 512, HALF_SCALES = 32 * SCALE_WORDS;  // of 64 outputs

// Codes become bfloat16 by masks and shifts, exactly: exponent and mantissa come to the low ends of bfloat16's, so that
// values are times 2^-120 or 2^-126. few.cu undoes that by x, which is times 2^60, and by its sums.
constexpr float UNDO = CODES == 0 ? 0x1p60f : 0x1p66f;  // with x
constexpr float UNDO_CODES = CODES == 0 ? 0x1p120f : 0x1p126f;

// Four pairs of neighbouring inputs: of output g two, 8 inputs apart, then of output g + 8.
DEVICE void decode_codes(u32* pair, u32 first, u32 second) {
#if CODES == 0
  const u32 shifted[4] = {first << 8, first, second << 8, second};
  for (int i = 0; i < 4; i++) pair[i] = (shifted[i] & 0x80008000) | ((shifted[i] & 0x7F007F00) >> 4);
#else
  for (int i = 0; i < 4; i++) {
    const u32 magnitude = i < 2 ? first << (6 - 4 * i) : first >> (4 * i - 6);
    pair[i] = (magnitude & 0x01C001C0) | ((first << (12 - 4 * i)) & 0x80008000);
  }
#endif
}

// The same of sub-matrix m of 16 outputs, from what a lane has of 16 inputs of 64 outputs.
DEVICE void decode_codes_of(u32* pair, const uint4* w, int m) {
  if (BITS == 4) {
    decode_codes(pair, word_of(w[0], m), 0);
  } else {
    decode_codes(pair, word_of(w[m / 2 % VECTORS], 2 * m % 4), word_of(w[m / 2 % VECTORS], 2 * m % 4 + 1));
  }
}

// Scale i of a lane's eight, those of outputs g + 8 i.
DEVICE float decode_scale(const u32* words, int i) {
#if SCALES == 0
  return __uint_as_float(i % 2 ? words[i / 2] & 0xFFFF0000 : words[i / 2] << 16);
#elif SCALES == 1
  const u32 byte = words[i / 4] >> (8 * (i % 4));
  return __uint_as_float((byte & 0x7F) << 20) * 0x1p120f;  // scales are not negative
#else
  const u32 byte = words[i / 4] >> (8 * (i % 4)) & 0xFF;
  return __uint_as_float(byte ? byte << 23 : 1u << 22);
#endif
}

// The global scale of an output.
DEVICE float read_global_scale(const void* scales, int output) {
#if GLOBAL == 1
  return *(const float*)scales;
#elif GLOBAL == 2
  const int r = output % 32, place = r % 8 / 2 * 8 + r / 8 * 2 + r % 2;  // of 32 outputs
  return __uint_as_float((u32)((const u16*)scales)[output - r + place] << 16);
#else
  return 1;
#endif
}
