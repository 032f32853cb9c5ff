// The float matrix product at the heart of linear layers and attention:
// C[r][16 b + lane] (+)= sum over k of A[r][k] * B[b][k][lane], k in order, one fused multiply-add each.
#pragma once
#include "simd.h"

namespace sparkgap {
namespace {

#if defined(__AVX512F__)
constexpr int kTileRows = 6, kTileBlocks = 4;
constexpr int tile_blocks(int) { return 4; }
#elif defined(__AVX2__)
constexpr int kTileRows = 6, kTileBlocks = 4;
constexpr int tile_blocks(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
#else
constexpr int kTileRows = 2, kTileBlocks = 1;
constexpr int tile_blocks(int) { return 1; }
#endif

// R rows by B blocks, accumulators in registers. `a_stride`, `c_stride` are between rows, `b_stride` between blocks
// of 16 columns. `more` continues from what C holds.
template <int R, int B, class W>
SPARKGAP_INLINE void tile_of(const float* a, int64_t a_stride, const W* b, int64_t b_stride, int64_t depth, float* c,
                             int64_t c_stride, bool more) {
  Floats acc[R][B];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < B; j++) acc[r][j] = more ? load(c + r * c_stride + j * 16) : splat(0.0f);
  for (int64_t k = 0; k < depth; k++) {
    Floats w[B];
#pragma GCC unroll 4
    for (int j = 0; j < B; j++) w[j] = load(b + j * b_stride + k * 16);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      const Floats x = splat(a[r * a_stride + k]);
#pragma GCC unroll 4
      for (int j = 0; j < B; j++) acc[r][j] = fma(x, w[j], acc[r][j]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < B; j++) store(c + r * c_stride + j * 16, acc[r][j]);
}

template <int R, class W>
void tile_row_group(const float* a, int64_t a_stride, const W* b, int64_t b_stride, int64_t blocks, int64_t depth, float* c,
                    int64_t c_stride, bool more) {
  constexpr int B = tile_blocks(R);
  int64_t j = 0;
  for (; j + B <= blocks; j += B) tile_of<R, B>(a, a_stride, b + j * b_stride, b_stride, depth, c + j * 16, c_stride, more);
  for (; j < blocks; j++) tile_of<R, 1>(a, a_stride, b + j * b_stride, b_stride, depth, c + j * 16, c_stride, more);
}

template <int R, class W>
SPARKGAP_INLINE void tile_rows(int64_t rows, const float* a, int64_t a_stride, const W* b, int64_t b_stride, int64_t blocks,
                               int64_t depth, float* c, int64_t c_stride, bool more) {
  for (; rows >= R; rows -= R, a += R * a_stride, c += R * c_stride)
    tile_row_group<R>(a, a_stride, b, b_stride, blocks, depth, c, c_stride, more);
  if constexpr (R > 1)
    if (rows > 0) tile_rows<R - 1>(rows, a, a_stride, b, b_stride, blocks, depth, c, c_stride, more);
}

// Any number of rows and blocks.
template <class W>
void multiply_tiles(int64_t rows, const float* a, int64_t a_stride, const W* b, int64_t b_stride, int64_t blocks, int64_t depth,
                    float* c, int64_t c_stride, bool more) {
  tile_rows<kTileRows>(rows, a, a_stride, b, b_stride, blocks, depth, c, c_stride, more);
}

}  // namespace
}  // namespace sparkgap
