// The int8 matrix product at the heart of linear layers and the Markov head: int32 sums of rows of bytes by packed weights.
#pragma once
#include "kernels.h"
#include "rows.h"
#include "simd.h"

namespace sparkgap {
namespace {

// Where a block of 16 channels lies. Blocks lie in pairs, `[in / 4, 2, 16, 4]`, so that a tile of two blocks is one stream
// of weights; a last one without a partner lies alone.
struct PackedBlock {
  const int8_t* at;
  int64_t step;  // bytes between groups of four inputs

  PackedBlock(const int8_t* packed, int64_t blocks, int64_t groups, int64_t block) {
    const bool paired = (block | 1) < blocks;
    at = packed + (paired ? block / 2 * 2 * groups + block % 2 : block * groups) * 64;
    step = paired ? 128 : 64;
  }
};

// A thread's share of so many blocks, in whole pairs.
SPARKGAP_INLINE Share share_pairs(int64_t blocks, Worker worker) {
  const Share pairs = share((blocks + 1) / 2, worker);
  return {2 * pairs.begin, smaller(blocks, 2 * pairs.end)};
}

// Int32 sums of R rows by B blocks, in the form each instruction set accumulates them.
//
// `ahead` bytes after the present weights are those that this thread comes to later: they are brought into the
// second-level cache meanwhile, a line for each that is used. The hardware's own prefetching follows one stream best, but
// loses its way among the results of many rows.
#if defined(__AVX512VNNI__)

constexpr int kMaxRows = 12, kMaxBlocks = 2;
constexpr int kStreamRows = 4;  // the hardware prefetches best by itself for so few rows

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
__attribute__((noinline)) void sums(const uint8_t* q, int64_t q_stride, PackedBlock packed, int64_t groups,
                                    const int32_t* const* offsets, int64_t ahead, Ints (*out)[B]) {
  IntPart acc[R][B];  // of the type the instruction takes: with another, the compiler copies them in every step
#pragma GCC unroll 4
  for (int b = 0; b < B; b++) {
    const IntPart offset = (IntPart)_mm512_loadu_si512(offsets[b]);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) acc[r][b] = offset;
  }
  SixRows low(q, q_stride), high(q + 6 * q_stride, q_stride);
  const int8_t* at = packed.at;
  for (const int8_t* end = at + groups * packed.step; at != end; at += packed.step, low.at += 4, high.at += 4) {
    __m512i w[B];
#pragma GCC unroll 4
    for (int b = 0; b < B; b++) {
      w[b] = _mm512_loadu_si512(at + b * 64);
      if constexpr (R > kStreamRows) __builtin_prefetch(at + b * 64 + ahead, 0, 2);
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

#elif defined(__AVX2__)

constexpr int kMaxRows = 4, kMaxBlocks = 1;

// Without VNNI: unsigned times signed bytes add up in pairs with saturation, so the activation's sign moves to the
// weight; magnitudes of at most 127 then cannot saturate.
template <int R, int B>
__attribute__((noinline)) void sums(const uint8_t* q, int64_t q_stride, PackedBlock packed, int64_t groups,
                                    const int32_t* const*, int64_t ahead, Ints (*out)[B]) {
  static_assert(B == 1);
  __m256i acc[R][B][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int b = 0; b < B; b++) acc[r][b][0] = acc[r][b][1] = _mm256_setzero_si256();
  const __m256i ones = _mm256_set1_epi16(1);
  for (int64_t g = 0; g < groups; g++) {
    __builtin_prefetch(packed.at + g * packed.step + ahead, 0, 2);
#pragma GCC unroll 4
    for (int b = 0; b < B; b++) {
      const int8_t* weights = packed.at + g * packed.step;
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

template <int R, int B>
__attribute__((noinline)) void sums(const uint8_t* q, int64_t q_stride, PackedBlock packed, int64_t groups,
                                    const int32_t* const*, int64_t, Ints (*out)[B]) {
  static_assert(B == 1);
  int32_t acc[R][16] = {};
  for (int64_t g = 0; g < groups; g++) {
    const int8_t* w = packed.at + g * packed.step;
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
SPARKGAP_INLINE const int32_t* offsets_of(const int32_t* offsets, int64_t out_features, int64_t block, int32_t* padded) {
  const int64_t channel = block * 16, left = out_features - channel;
  if (left >= 16) return offsets + channel;
  std::memset(padded, 0, 64);
  std::memcpy(padded, offsets + channel, size_t(left) * 4);
  return padded;
}

}  // namespace
}  // namespace sparkgap
