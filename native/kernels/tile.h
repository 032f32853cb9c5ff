// The float matrix product at the heart of linear layers and attention:
// C[r][16 b + lane] (+)= sum over k of A[r][k] * B[b][k][lane], k in order, one fused multiply-add each.
#pragma once
#include <cstddef>

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

// What B's columns lie in, 16 at a time: blocks of columns are `block_stride` elements apart, values of k and k + 1 `step`.
template <class W>
struct Columns {
  static constexpr int kDepth = 1;  // values of k that one step takes

  const W* at;
  int64_t block_stride, step;

  SPARKGAP_INLINE Floats load_block(int64_t block, int64_t k, int) const { return load(at + block * block_stride + k * step); }
  SPARKGAP_INLINE Columns from_block(int64_t block) const { return {at + block * block_stride, block_stride, step}; }
};

// bfloat16 in pairs of two values of k, the lower one in the lower half: `[blocks, depth / 2, 16]`.
struct PairColumns {
  static constexpr int kDepth = 2;

  const uint32_t* at;
  int64_t block_stride;

  SPARKGAP_INLINE Floats load_block(int64_t block, int64_t k, int odd) const {
    Floats r;
    std::memcpy(&r, at + block * block_stride + k * 16, sizeof r);
#pragma GCC unroll 4
    for (int i = 0; i < kParts; i++)
      r.part[i] = (FloatPart)(odd ? (UIntPart)r.part[i] & 0xffff0000u : (UIntPart)r.part[i] << 16);
    return r;
  }
  SPARKGAP_INLINE PairColumns from_block(int64_t block) const { return {at + block * block_stride, block_stride}; }
};

// What a tile fetches meanwhile, a line a step: nothing, or ...
struct NoAhead {
  SPARKGAP_INLINE void begin(int64_t) {}
  SPARKGAP_INLINE void fetch_line() {}
};

// ... memory that is read after this, into the second-level cache.
struct LinesAhead {
  const std::byte* at;
  const std::byte* end;
  int64_t step;

  // For as many lines; where fewer are left, none are fetched any more.
  SPARKGAP_INLINE void begin(int64_t lines) { step = end - at >= lines * 64 ? 64 : 0; }
  SPARKGAP_INLINE void fetch_line() {
    __builtin_prefetch(at, 0, 2);
    at += step;
  }
};

// R rows by B blocks, accumulators in registers. `a_stride`, `c_stride` are between rows; `steps` of `kDepth` each.
// `more` continues from what C holds.
template <int R, int B, class W, class Ahead>
SPARKGAP_INLINE void tile_of(const float* a, int64_t a_stride, W b, int64_t steps, float* c, int64_t c_stride, bool more,
                             Ahead& to_come) {
  Ahead ahead = to_come;
  ahead.begin(steps);
  Floats acc[R][B];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < B; j++) acc[r][j] = more ? load(c + r * c_stride + j * 16) : splat(0.0f);
  for (int64_t k = 0; k < steps; k++) {
    ahead.fetch_line();
#pragma GCC unroll 2
    for (int part = 0; part < W::kDepth; part++) {
      Floats w[B];
#pragma GCC unroll 4
      for (int j = 0; j < B; j++) w[j] = b.load_block(j, k, part);
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        const Floats x = splat(a[r * a_stride + k * W::kDepth + part]);
#pragma GCC unroll 4
        for (int j = 0; j < B; j++) acc[r][j] = fma(x, w[j], acc[r][j]);
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < B; j++) store(c + r * c_stride + j * 16, acc[r][j]);
  to_come = ahead;
}

template <int R, class W, class Ahead>
void tile_row_group(const float* a, int64_t a_stride, W b, int64_t blocks, int64_t steps, float* c, int64_t c_stride,
                    bool more, Ahead& ahead) {
  constexpr int B = tile_blocks(R);
  int64_t j = 0;
  for (; j + B <= blocks; j += B) tile_of<R, B>(a, a_stride, b.from_block(j), steps, c + j * 16, c_stride, more, ahead);
  for (; j < blocks; j++) tile_of<R, 1>(a, a_stride, b.from_block(j), steps, c + j * 16, c_stride, more, ahead);
}

template <int R, class W, class Ahead>
SPARKGAP_INLINE void tile_rows(int64_t rows, const float* a, int64_t a_stride, W b, int64_t blocks, int64_t steps, float* c,
                               int64_t c_stride, bool more, Ahead& ahead) {
  for (; rows >= R; rows -= R, a += R * a_stride, c += R * c_stride)
    tile_row_group<R>(a, a_stride, b, blocks, steps, c, c_stride, more, ahead);
  if constexpr (R > 1)
    if (rows > 0) tile_rows<R - 1>(rows, a, a_stride, b, blocks, steps, c, c_stride, more, ahead);
}

// Any number of rows and blocks.
template <class W>
void multiply_tiles(int64_t rows, const float* a, int64_t a_stride, W b, int64_t blocks, int64_t steps, float* c,
                    int64_t c_stride, bool more) {
  NoAhead nothing;
  tile_rows<kTileRows>(rows, a, a_stride, b, blocks, steps, c, c_stride, more, nothing);
}

template <class W>
void multiply_tiles(int64_t rows, const float* a, int64_t a_stride, W b, int64_t blocks, int64_t steps, float* c,
                    int64_t c_stride, bool more, LinesAhead& ahead) {
  tile_rows<kTileRows>(rows, a, a_stride, b, blocks, steps, c, c_stride, more, ahead);
}

}  // namespace
}  // namespace sparkgap
