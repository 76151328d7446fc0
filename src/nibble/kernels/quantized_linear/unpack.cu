// Some outputs of a packed matrix in the layout of humming-kernels, dequantised: bfloat16, an output after another.
//
// Compiled at run time, with the macros of packed.cuh.
// Kernel: unpack(...), a grid of outputs / 64 * inputs / 64 blocks of a warp.
//
// A warp dequantises 64 inputs of 64 outputs, and turns them in shared memory, so that it writes whole lines. A weight
// is rounded once, from the product of code and scales in float32.
//
// Names: g = lane / 4 and c = lane % 4, the coordinates of mma fragments.

#include "bits.cuh"
#include "packed.cuh"

constexpr int SIZE = 64, STEPS = SIZE / 16;
constexpr int STRIDE = SIZE / 2 + 4;  // words of an output in shared memory, so that banks differ

DEVICE u32 scaled(u32 pair, float factor) {
  const float low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xFFFF0000);
  return pack_bf16(low * UNDO_CODES * factor, high * UNDO_CODES * factor);
}

// first: of the outputs; outputs: of the whole matrix.
extern "C" __global__ void __launch_bounds__(32)
    unpack(const u8* codes, const u8* scales, const void* global_scale, u16* out, int first, int outputs,
           int inputs) {
  __shared__ __align__(16) u32 turned[SIZE][STRIDE];
  const int lane = threadIdx.x, g = lane >> 2, c = lane & 3;
  const int columns = inputs / SIZE, part = blockIdx.x / columns, input = blockIdx.x % columns * SIZE;
  const int tile = first / SIZE + part, tiles = outputs / SIZE;
  wait_for_inputs();
  float of_output[8];
#pragma unroll
  for (int i = 0; i < 8; i++) of_output[i] = read_global_scale(global_scale, tile * SIZE + g + 8 * i);
#pragma unroll
  for (int s = 0; s < STEPS; s++) {
    const u64 step = input / 16 + s, group = (input + 16 * s) / GROUP;
    const uint4* from = (const uint4*)(codes + (step * tiles + tile) * HALF_BYTES) + lane * VECTORS;
    const u32* scale_words = (const u32*)(scales + (group * tiles + tile) * HALF_SCALES) + g * SCALE_WORDS;
    uint4 w[VECTORS];
    u32 scale[SCALE_WORDS];
#pragma unroll
    for (int v = 0; v < VECTORS; v++) w[v] = from[v];
#pragma unroll
    for (int i = 0; i < SCALE_WORDS; i++) scale[i] = scale_words[i];
#pragma unroll
    for (int m = 0; m < 4; m++) {
      u32 pair[4];
      decode_codes_of(pair, w, m);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int row = 2 * m + i / 2;  // of the lane's eight
        turned[8 * row + g][8 * s + c + i % 2 * 4] = scaled(pair[i], decode_scale(scale, row) * of_output[row]);
      }
    }
  }
  __syncwarp();
  constexpr int PIECES = SIZE * 2 / 16;  // of an output
#pragma unroll
  for (int i = lane; i < SIZE * PIECES; i += 32) {
    const int row = i / PIECES, piece = i % PIECES;
    u16* to = out + (u64)(part * SIZE + row) * inputs + input + piece * 8;
    *(uint4*)to = *(const uint4*)&turned[row][piece * 4];
  }
}
