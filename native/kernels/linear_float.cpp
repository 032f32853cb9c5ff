#include "kernels.h"
#include "simd.h"
#include "tile.h"
#include "variant.h"

namespace sparkgap::SPARKGAP_VARIANT {
namespace {

SPARKGAP_INLINE void narrow(float x, float* out) { *out = x; }
SPARKGAP_INLINE void narrow(float x, BFloat16* out) {
  BFloat16 lanes[kLanes];
  store(lanes, splat(x));
  *out = lanes[0];
}

template <class From, class To>
void pack_blocks(const PackFloat& args, Worker worker) {
  const int64_t blocks = (args.out_features + 15) / 16;
  for (int64_t block = worker.index; block < blocks; block += worker.count) {
    To* packed = static_cast<To*>(args.packed) + block * args.in_features * 16;
    for (int64_t lane = 0; lane < 16; lane++) {
      const int64_t channel = block * 16 + lane;
      const From* row = static_cast<const From*>(args.weight.data) + channel * args.weight.stride;
      for (int64_t k = 0; k < args.in_features; k++)
        narrow(channel < args.out_features ? to_float(row[k]) : 0.0f, packed + k * 16 + lane);
    }
  }
}

// Rows and channels are cut so that a part of the weights stays in the cache while all rows pass over it.
constexpr int64_t kPartBlocks = 4;
constexpr int64_t kPartRows = 48;

// How many rows from `row` on, `most` at most, are all to be computed, or as a negative number all to be left out.
SPARKGAP_INLINE int64_t live_rows(const LinearFloat& args, int64_t row, int64_t most) {
  if (!args.slots) return most;
  const bool live = args.slots[row] >= 0;
  int64_t rows = 1;
  while (rows < most && (args.slots[row + rows] >= 0) == live) rows++;
  return live ? rows : -rows;
}

template <class W, class Out>
void multiply(const LinearFloat& args, Worker worker) {
  const int64_t blocks = (args.out_features + 15) / 16;
  const int64_t begin = blocks * worker.index / worker.count, end = blocks * (worker.index + 1) / worker.count;
  const W* packed = static_cast<const W*>(args.packed);
  alignas(64) float sums[kPartRows * kPartBlocks * 16];
  for (int64_t block = begin; block < end; block += kPartBlocks) {
    const int64_t part = smaller(kPartBlocks, end - block);
    for (int64_t row = 0, rows; row < args.rows; row += rows) {
      rows = live_rows(args, row, smaller(kPartRows, args.rows - row));
      if (rows < 0) {
        rows = -rows;
        continue;
      }
      multiply_tiles(rows, args.x + row * args.x_stride, args.x_stride, 
                     Columns<W>{packed + block * args.in_features * 16, args.in_features * 16, 16}, part, args.in_features, sums, kPartBlocks * 16, false);
      for (int64_t r = 0; r < rows; r++)
        for (int64_t b = 0; b < part; b++) {
          const int64_t channel = (block + b) * 16, left = args.out_features - channel;
          Floats y = load(sums + (r * kPartBlocks + b) * 16);
          if (args.bias) y = y + load_some(args.bias + channel, left);
          store_some(static_cast<Out*>(args.out.data) + (row + r) * args.out.stride + channel, y, left);
        }
    }
  }
}

template <class From, class To>
void convert(const ConvertRows& args, Worker worker) {
  for (int64_t row = worker.index; row < args.rows; row += worker.count) {
    const From* x = static_cast<const From*>(args.x.data) + row * args.x.stride;
    To* out = static_cast<To*>(args.out.data) + row * args.out.stride;
    for (int64_t k = 0; k < args.features; k += kLanes)
      store_some(out + k, load_some(x + k, args.features - k), args.features - k);
  }
}

}  // namespace

void pack_float(const PackFloat& args, Worker worker) {
  if (args.weight.dtype == DType::kFloat32) {
    if (args.packed_dtype == DType::kFloat32) pack_blocks<float, float>(args, worker);
    else pack_blocks<float, BFloat16>(args, worker);
  } else {
    if (args.packed_dtype == DType::kFloat32) pack_blocks<BFloat16, float>(args, worker);
    else pack_blocks<BFloat16, BFloat16>(args, worker);
  }
}

void convert_rows(const ConvertRows& args, Worker worker) {
  if (args.x.dtype == DType::kFloat32) {
    if (args.out.dtype == DType::kFloat32) convert<float, float>(args, worker);
    else convert<float, BFloat16>(args, worker);
  } else {
    if (args.out.dtype == DType::kFloat32) convert<BFloat16, float>(args, worker);
    else convert<BFloat16, BFloat16>(args, worker);
  }
}

void linear_float(const LinearFloat& args, Worker worker) {
  if (args.packed_dtype == DType::kFloat32) {
    if (args.out.dtype == DType::kFloat32) multiply<float, float>(args, worker);
    else multiply<float, BFloat16>(args, worker);
  } else {
    if (args.out.dtype == DType::kFloat32) multiply<BFloat16, float>(args, worker);
    else multiply<BFloat16, BFloat16>(args, worker);
  }
}

}  // namespace sparkgap::SPARKGAP_VARIANT
