#include "int8_tile.h"
#include "kernels.h"
#include "quantize.h"
#include "simd.h"
#include "variant.h"

namespace sparkgap::SPARKGAP_VARIANT {
namespace {

SPARKGAP_INLINE uint32_t magnitude_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits & 0x7fffffff;
}

template <class T>
void pack_blocks(const PackInt8& args, Worker worker) {
  const int64_t blocks = (args.out_features + 15) / 16, groups = (args.in_features + 3) / 4;
  for (int64_t block = worker.index; block < blocks; block += worker.count) {
    const PackedBlock place(args.packed, blocks, groups, block);
    int8_t* packed = const_cast<int8_t*>(place.at);
    for (int64_t lane = 0; lane < 16; lane++) {
      const int64_t channel = block * 16 + lane;
      const bool real = channel < args.out_features;
      const T* row = static_cast<const T*>(args.weight.data) + (real ? channel : 0) * args.weight.stride;
      uint32_t most = 0;  // as bits, so that a NaN is the largest and reaches the scale
      for (int64_t k = 0; real && k < args.in_features; k++) most = larger(most, magnitude_bits(to_float(row[k])));
      float magnitude;
      std::memcpy(&magnitude, &most, sizeof most);
      const float scale = magnitude / 127.0f;
      int32_t total = 0;
      for (int64_t k = 0; k < groups * 4; k++) {
        int32_t q = 0;
        if (real && k < args.in_features && scale > 0) q = int32_t(__builtin_rintf(to_float(row[k]) / scale));
        q = larger(-127, smaller(127, q));
        packed[k / 4 * place.step + lane * 4 + k % 4] = int8_t(q);
        total += q;
      }
      if (real) args.scales[channel] = scale, args.offsets[channel] = -128 * total;
    }
  }
}

template <class T>
void quantize(const QuantizeRows& args, Worker worker) {
  float* scaled = reinterpret_cast<float*>(worker.scratch);
  for (int64_t row = worker.index; row < args.rows; row += worker.count) {
    const T* x = static_cast<const T*>(args.x.data) + row * args.x.stride;
    if (args.slots && args.slots[row] < 0) {
      args.to.scales[row] = 0;
    } else if (!args.multipliers) {
      quantize_to(args.to, row, x, args.features);
    } else {
      each_vector(args.features, [&](int64_t k, int64_t left) SPARKGAP_INLINE_LAMBDA {
        store_some(scaled + k, load_some(x + k, left) * load_some(args.multipliers + k, left), left);
      });
      quantize_to(args.to, row, scaled, args.features);
    }
  }
}

template <int R, int B>
SPARKGAP_INLINE void write_outputs(const LinearInt8& args, int64_t row, int64_t block, const Ints (*acc)[B]) {
#pragma GCC unroll 4
  for (int b = 0; b < B; b++) {
    const int64_t channel = (block + b) * 16, left = args.out_features - channel;
    const Floats scales = load_some(args.channel_scales + channel, left);
    const Floats bias = args.bias ? load_some(args.bias + channel, left) : splat(0.0f);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      Floats y = to_floats(acc[r][b]) * (splat(args.row_scales[row + r]) * scales);
      if (args.bias) y = y + bias;
      const int64_t at = (row + r) * args.out.stride + channel;
      if (args.out.dtype == DType::kFloat32) store_some(static_cast<float*>(args.out.data) + at, y, left);
      else store_some(static_cast<BFloat16*>(args.out.data) + at, y, left);
    }
  }
}

template <int R, int B>
void tile(const LinearInt8& args, int64_t row, int64_t block, int64_t ahead) {
  const int64_t blocks = (args.out_features + 15) / 16, groups = (args.in_features + 3) / 4;
  alignas(64) int32_t padded[B][16];
  const int32_t* offsets[B];
#pragma GCC unroll 4
  for (int b = 0; b < B; b++) offsets[b] = offsets_of(args.offsets, args.out_features, block + b, padded[b]);
  Ints acc[R][B];
  sums<R, B>(args.quantized + row * args.quantized_stride, args.quantized_stride, {args.packed, blocks, groups, block}, groups,
             offsets, ahead, acc);
  write_outputs<R, B>(args, row, block, acc);
}

// Tiles of R rows while so many are left, then smaller ones. The first fetches ahead, for all of them.
template <int R, int B>
SPARKGAP_INLINE void column(const LinearInt8& args, int64_t row, int64_t block, int64_t ahead) {
  for (; args.rows - row >= R; row += R) tile<R, B>(args, row, block, row == 0 ? ahead : 0);
  if constexpr (R > 1)
    if (row < args.rows) column<R - 1, B>(args, row, block, ahead);
}

// So far ahead that memory answers in time, and so near that what was fetched is still there when it is used.
constexpr int64_t kFetchBytes = 48 << 10;

}  // namespace

void pack_int8(const PackInt8& args, Worker worker) {
  if (args.weight.dtype == DType::kFloat32) pack_blocks<float>(args, worker);
  else pack_blocks<BFloat16>(args, worker);
}

void quantize_rows(const QuantizeRows& args, Worker worker) {
  if (args.x.dtype == DType::kFloat32) quantize<float>(args, worker);
  else quantize<BFloat16>(args, worker);
}

void linear_int8(const LinearInt8& args, Worker worker) {
  auto [block, end] = share_pairs((args.out_features + 15) / 16, worker);
  const int64_t block_bytes = (args.in_features + 3) / 4 * 64, pair_bytes = 2 * block_bytes;
  const int64_t pairs = (kFetchBytes + pair_bytes - 1) / pair_bytes;
  // Past the end of this thread's part there is nothing to fetch: what is at hand costs nothing.
  const auto ahead = [&](int64_t b) { return b / 2 + pairs < end / 2 ? pairs * pair_bytes : 0; };
  for (; end - block >= kMaxBlocks; block += kMaxBlocks) column<kMaxRows, kMaxBlocks>(args, 0, block, ahead(block));
  for (; block < end; block++) column<kMaxRows, 1>(args, 0, block, 0);
}

}  // namespace sparkgap::SPARKGAP_VARIANT
