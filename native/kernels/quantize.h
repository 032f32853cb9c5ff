// A row of activations as bytes.
#pragma once
#include "kernels.h"
#include "rows.h"
#include "simd.h"

namespace sparkgap {
namespace {

// round(x * inverse) + 128, in 1 ... 255; 128 for a NaN.
SPARKGAP_INLINE void store_quantized(uint8_t* out, Floats x, Floats inverse) {
  // Added to 1.5 * 2^23, a small value is rounded to an integer, whose low byte the sum's bits end with.
  const Floats shifted = at_most(at_least(x * inverse, -127.0f), 127.0f) + splat(12582912.0f);
  Ints bytes;
#pragma GCC unroll 4
  for (int i = 0; i < kParts; i++) bytes.part[i] = (IntPart)shifted.part[i] + 128;
  store_low_bytes(out, bytes);
}

template <class T>
SPARKGAP_INLINE void store_quantized_row(const T* x, int64_t features, uint8_t* out, int64_t out_bytes, Floats inverse) {
  each_vector(features, [&](int64_t k, int64_t left) SPARKGAP_INLINE_LAMBDA {
    store_quantized(out + k, load_some(x + k, left), inverse);
  });
  for (int64_t k = round_up(features, kLanes); k < out_bytes; k += kLanes) std::memset(out + k, 128, kLanes);
}

// With a scale of the row's own.
template <class T>
SPARKGAP_INLINE void quantize_row(const T* x, int64_t features, uint8_t* out, int64_t out_bytes, float* scale_out) {
  // Magnitudes compare as integers, so that a NaN is the largest and reaches the scale.
  Ints most = {};
  each_vector(features, [&](int64_t k, int64_t left) SPARKGAP_INLINE_LAMBDA {
    most = larger(most, magnitude_bits(load_some(x + k, left)));
  });
  const int32_t bits = largest(most);
  float magnitude;
  std::memcpy(&magnitude, &bits, sizeof bits);
  *scale_out = magnitude / 127.0f;
  store_quantized_row(x, features, out, out_bytes, splat(magnitude > 0 ? 127.0f / magnitude : 0.0f));
}

// With a scale that was given.
template <class T>
SPARKGAP_INLINE void quantize_row_by(float scale, const T* x, int64_t features, uint8_t* out, int64_t out_bytes,
                                     float* scale_out) {
  Ints most = {};
  each_vector(features, [&](int64_t k, int64_t left) SPARKGAP_INLINE_LAMBDA {
    most = larger(most, magnitude_bits(load_some(x + k, left)));
  });
  store_quantized_row(x, features, out, out_bytes, splat(1.0f / scale));
  *scale_out = largest(most) >= 0x7f800000 ? __builtin_nanf("") : scale;
}

template <class T>
SPARKGAP_INLINE void quantize_to(const QuantizedRows& to, int64_t row, const T* x, int64_t features) {
  uint8_t* out = to.values + row * to.stride;
  if (to.fixed_scale > 0) quantize_row_by(to.fixed_scale, x, features, out, to.stride, to.scales + row);
  else quantize_row(x, features, out, to.stride, to.scales + row);
}

}  // namespace
}  // namespace sparkgap
