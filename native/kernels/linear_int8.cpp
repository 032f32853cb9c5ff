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
    int8_t* packed = args.packed + block * groups * 64;
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
        packed[k / 4 * 64 + lane * 4 + k % 4] = int8_t(q);
        total += q;
      }
      if (real) args.scales[channel] = scale, args.offsets[channel] = -128 * total;
    }
  }
}

template <class T>
void quantize(const QuantizeRows& args, Worker worker) {
  for (int64_t row = worker.index; row < args.rows; row += worker.count)
    quantize_to(args.to, row, static_cast<const T*>(args.x.data) + row * args.x.stride, args.features);
}

// Int32 sums of R rows by B blocks of 16 channels, in the form each instruction set accumulates them.
//
// `fetch` is where the weights begin that this thread comes to later: as many bytes as the present ones are brought into
// the second-level cache meanwhile, a line for each that is used. The hardware's own prefetching follows one stream well
// and loses its way when each line is used for many rows.
#if defined(__AVX512VNNI__)

constexpr int kMaxRows = 12, kMaxBlocks = 2;
constexpr int kStreamRows = 2;  // so few rows are one stream of weights, which the hardware prefetches best by itself
constexpr int kStreamSteps = 4;

// Rows 0 ... 5 from a pointer, as addresses that need no register of their own.
struct SixRows {
  const uint8_t* at;
  int64_t stride, three, five;

  SixRows(const uint8_t* rows, int64_t row_stride) : at(rows), stride(row_stride), three(3 * row_stride), five(5 * row_stride) {
    // Otherwise the compiler keeps a pointer for every row, more than there are registers.
    asm("" : "+r"(three), "+r"(five));
  }
  SPARKGAP_INLINE __m512i four_of(int r) const {
    const int64_t offset = r == 3 ? three : r == 5 ? five : r * stride;
    int32_t four;
    std::memcpy(&four, at + offset, 4);
    return _mm512_set1_epi32(four);
  }
};

// Not inlined: what surrounds it would take registers from the accumulators.
template <int R, int B>
__attribute__((noinline)) void sums(const uint8_t* q, int64_t q_stride, const int8_t* packed, int64_t groups,
                                    const int32_t* const* offsets, const int8_t* fetch, Ints (*out)[B]) {
  IntPart acc[R][B];  // of the type the instruction takes: with another, the compiler copies them in every step
#pragma GCC unroll 4
  for (int b = 0; b < B; b++) {
    const IntPart offset = (IntPart)_mm512_loadu_si512(offsets[b]);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) acc[r][b] = offset;
  }
  SixRows low(q, q_stride), high(q + 6 * q_stride, q_stride);
  const int64_t block_bytes = groups * 64;
  for (const int8_t* end = packed + block_bytes; packed != end; packed += 64, fetch += 64 * B, low.at += 4, high.at += 4) {
    __m512i w[B];
#pragma GCC unroll 4
    for (int b = 0; b < B; b++) {
      w[b] = _mm512_loadu_si512(packed + b * block_bytes);
      __builtin_prefetch(fetch + 64 * b, 0, 2);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const __m512i x = r < 6 ? low.four_of(r) : high.four_of(r - 6);
#pragma GCC unroll 4
      for (int b = 0; b < B; b++) acc[r][b] = (IntPart)_mm512_dpbusd_epi32((__m512i)acc[r][b], x, w[b]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int b = 0; b < B; b++) out[r][b].part[0] = acc[r][b];
}

// R rows by one block, with several accumulators each: the weights are one stream.
template <int R>
__attribute__((noinline)) void stream_sums(const uint8_t* q, int64_t q_stride, const int8_t* packed, int64_t groups,
                                           const int32_t* offset, Ints (*out)[1]) {
  IntPart acc[R][kStreamSteps];
#pragma GCC unroll 2
  for (int r = 0; r < R; r++) {
    acc[r][0] = (IntPart)_mm512_loadu_si512(offset);
#pragma GCC unroll 4
    for (int step = 1; step < kStreamSteps; step++) acc[r][step] = IntPart{};
  }
  const auto add = [&](int64_t group, int step) SPARKGAP_INLINE_LAMBDA {
    const __m512i w = _mm512_loadu_si512(packed + group * 64);
#pragma GCC unroll 2
    for (int r = 0; r < R; r++) {
      int32_t four;
      std::memcpy(&four, q + r * q_stride + group * 4, 4);
      acc[r][step] = (IntPart)_mm512_dpbusd_epi32((__m512i)acc[r][step], _mm512_set1_epi32(four), w);
    }
  };
  int64_t group = 0;
  for (; group + kStreamSteps <= groups; group += kStreamSteps) {
#pragma GCC unroll 4
    for (int step = 0; step < kStreamSteps; step++) add(group + step, step);
  }
  for (; group < groups; group++) add(group, 0);
#pragma GCC unroll 2
  for (int r = 0; r < R; r++) out[r][0].part[0] = (acc[r][0] + acc[r][1]) + (acc[r][2] + acc[r][3]);
}

#elif defined(__AVX2__)

constexpr int kMaxRows = 4, kMaxBlocks = 1;
constexpr int kStreamRows = 0;

// Without VNNI: unsigned times signed bytes add up in pairs with saturation, so the activation's sign moves to the
// weight; magnitudes of at most 127 then cannot saturate.
template <int R, int B>
__attribute__((noinline)) void sums(const uint8_t* q, int64_t q_stride, const int8_t* packed, int64_t groups,
                                    const int32_t* const*, const int8_t* fetch, Ints (*out)[B]) {
  __m256i acc[R][B][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int b = 0; b < B; b++) acc[r][b][0] = acc[r][b][1] = _mm256_setzero_si256();
  const __m256i ones = _mm256_set1_epi16(1);
  for (int64_t g = 0; g < groups; g++) {
    __builtin_prefetch(fetch + g * 64 * B, 0, 2);
#pragma GCC unroll 4
    for (int b = 0; b < B; b++) {
      const int8_t* weights = packed + (b * groups + g) * 64;
      const __m256i w0 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights));
      const __m256i w1 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + 32));
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        int32_t four;
        std::memcpy(&four, q + r * q_stride + g * 4, 4);
        const __m256i x = _mm256_set1_epi32(four ^ int32_t(0x80808080));
        const __m256i magnitude = _mm256_abs_epi8(x);
        acc[r][b][0] = _mm256_add_epi32(
            acc[r][b][0], _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(w0, x)), ones));
        acc[r][b][1] = _mm256_add_epi32(
            acc[r][b][1], _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(w1, x)), ones));
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int b = 0; b < B; b++)
      for (int half = 0; half < 2; half++) out[r][b].part[half] = (IntPart)acc[r][b][half];
}

#else

constexpr int kMaxRows = 4, kMaxBlocks = 1;
constexpr int kStreamRows = 0;

template <int R, int B>
__attribute__((noinline)) void sums(const uint8_t* q, int64_t q_stride, const int8_t* packed, int64_t groups,
                                    const int32_t* const*, const int8_t*, Ints (*out)[B]) {
  static_assert(B == 1);
  int32_t acc[R][16] = {};
  for (int64_t g = 0; g < groups; g++) {
    const int8_t* w = packed + g * 64;
    for (int r = 0; r < R; r++) {
      int16_t x[4];
      for (int j = 0; j < 4; j++) x[j] = int16_t(q[r * q_stride + g * 4 + j] - 128);
      for (int c = 0; c < 16; c++)
        acc[r][c] += w[c * 4] * x[0] + w[c * 4 + 1] * x[1] + w[c * 4 + 2] * x[2] + w[c * 4 + 3] * x[3];
    }
  }
  for (int r = 0; r < R; r++) std::memcpy(&out[r][0], acc[r], sizeof acc[r]);
}

#endif

SPARKGAP_INLINE Floats to_floats(Ints x) SPARKGAP_EACH_PART(__builtin_convertvector(x.part[i], FloatPart))

// Channels' offsets; a block that is not full has zeros in the places of channels that are not there.
SPARKGAP_INLINE const int32_t* offsets_of(const LinearInt8& args, int64_t block, int32_t* padded) {
  const int64_t channel = block * 16, left = args.out_features - channel;
  if (left >= 16) return args.offsets + channel;
  std::memset(padded, 0, 64);
  std::memcpy(padded, args.offsets + channel, size_t(left) * 4);
  return padded;
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
void tile(const LinearInt8& args, int64_t row, int64_t block, const int8_t* fetch) {
  const int64_t groups = (args.in_features + 3) / 4;
  alignas(64) int32_t padded[B][16];
  const int32_t* offsets[B];
#pragma GCC unroll 4
  for (int b = 0; b < B; b++) offsets[b] = offsets_of(args, block + b, padded[b]);
  Ints acc[R][B];
  sums<R, B>(args.quantized + row * args.quantized_stride, args.quantized_stride, args.packed + block * groups * 64, groups,
             offsets, fetch, acc);
  write_outputs<R, B>(args, row, block, acc);
}

// Tiles of R rows while so many are left, then smaller ones. The first fetches ahead, for all of them.
template <int R, int B>
SPARKGAP_INLINE void column(const LinearInt8& args, int64_t row, int64_t block, const int8_t* fetch) {
  const int8_t* weights = args.packed + block * ((args.in_features + 3) / 4) * 64;
  for (; args.rows - row >= R; row += R) tile<R, B>(args, row, block, row == 0 ? fetch : weights);
  if constexpr (R > 1)
    if (row < args.rows) column<R - 1, B>(args, row, block, fetch);
}

#if defined(__AVX512VNNI__)
template <int R>
void stream(const LinearInt8& args, int64_t block, int64_t end) {
  const int64_t groups = (args.in_features + 3) / 4;
  for (; block < end; block++) {
    alignas(64) int32_t padded[16];
    Ints acc[R][1];
    stream_sums<R>(args.quantized, args.quantized_stride, args.packed + block * groups * 64, groups,
                   offsets_of(args, block, padded), acc);
    write_outputs<R, 1>(args, 0, block, acc);
  }
}
#else
template <int R>
void stream(const LinearInt8&, int64_t, int64_t) {}
#endif

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
  const int64_t blocks = (args.out_features + 15) / 16, block_bytes = (args.in_features + 3) / 4 * 64;
  int64_t block = blocks * worker.index / worker.count;
  const int64_t end = blocks * (worker.index + 1) / worker.count;
  if (args.rows <= kStreamRows) return args.rows == 1 ? stream<1>(args, block, end) : stream<2>(args, block, end);
  const int64_t tile_bytes = kMaxBlocks * block_bytes, ahead = (kFetchBytes + tile_bytes - 1) / tile_bytes * kMaxBlocks;
  // Past the end of this thread's part there is nothing to fetch: what is at hand costs nothing.
  const auto fetch = [&](int64_t b) { return args.packed + (b + ahead + kMaxBlocks <= end ? b + ahead : b) * block_bytes; };
  for (; end - block >= kMaxBlocks; block += kMaxBlocks) column<kMaxRows, kMaxBlocks>(args, 0, block, fetch(block));
  for (; block < end; block++) column<kMaxRows, 1>(args, 0, block, args.packed + block * block_bytes);
}

}  // namespace sparkgap::SPARKGAP_VARIANT
