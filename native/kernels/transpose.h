// 16 rows of 16 floats to 16 columns.
#pragma once
#include "simd.h"

namespace sparkgap {
namespace {

#if defined(__AVX512F__)

SPARKGAP_INLINE void transpose(const Floats (&rows)[16], float* out) {
  __m512 a[16], b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    const __m512 x = (__m512)rows[2 * i].part[0], y = (__m512)rows[2 * i + 1].part[0];
    a[2 * i] = _mm512_unpacklo_ps(x, y);
    a[2 * i + 1] = _mm512_unpackhi_ps(x, y);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      const __m512d x = _mm512_castps_pd(a[4 * i + j]), y = _mm512_castps_pd(a[4 * i + 2 + j]);
      b[4 * i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
      b[4 * i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
    }
  }
  // b[4 i + c] now holds, in each 128-bit quarter q, column 4 q + c of rows 4 i ... 4 i + 3.
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    const __m512 low01 = _mm512_shuffle_f32x4(b[c], b[4 + c], 0x88), high01 = _mm512_shuffle_f32x4(b[c], b[4 + c], 0xdd);
    const __m512 low23 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0x88);
    const __m512 high23 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0xdd);
    _mm512_storeu_ps(out + c * 16, _mm512_shuffle_f32x4(low01, low23, 0x88));
    _mm512_storeu_ps(out + (8 + c) * 16, _mm512_shuffle_f32x4(low01, low23, 0xdd));
    _mm512_storeu_ps(out + (4 + c) * 16, _mm512_shuffle_f32x4(high01, high23, 0x88));
    _mm512_storeu_ps(out + (12 + c) * 16, _mm512_shuffle_f32x4(high01, high23, 0xdd));
  }
}

#elif defined(__AVX2__)

SPARKGAP_INLINE void transpose_eighth(const __m256 (&x)[8], float* out) {
  __m256 a[8], b[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    a[2 * i] = _mm256_unpacklo_ps(x[2 * i], x[2 * i + 1]);
    a[2 * i + 1] = _mm256_unpackhi_ps(x[2 * i], x[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++)
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      b[4 * i + 2 * j] = _mm256_shuffle_ps(a[4 * i + j], a[4 * i + 2 + j], 0x44);
      b[4 * i + 2 * j + 1] = _mm256_shuffle_ps(a[4 * i + j], a[4 * i + 2 + j], 0xee);
    }
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    _mm256_storeu_ps(out + c * 16, _mm256_permute2f128_ps(b[c], b[4 + c], 0x20));
    _mm256_storeu_ps(out + (4 + c) * 16, _mm256_permute2f128_ps(b[c], b[4 + c], 0x31));
  }
}

SPARKGAP_INLINE void transpose(const Floats (&rows)[16], float* out) {
#pragma GCC unroll 2
  for (int right = 0; right < 2; right++)
#pragma GCC unroll 2
    for (int lower = 0; lower < 2; lower++) {
      __m256 eighth[8];
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) eighth[i] = (__m256)rows[8 * lower + i].part[right];
      transpose_eighth(eighth, out + right * 8 * 16 + lower * 8);
    }
}

#else

SPARKGAP_INLINE void transpose(const Floats (&rows)[16], float* out) {
  for (int row = 0; row < 16; row++) {
    float lanes[kLanes];
    store(lanes, rows[row]);
    for (int column = 0; column < 16; column++) out[column * 16 + row] = lanes[column];
  }
}

#endif

}  // namespace
}  // namespace sparkgap
