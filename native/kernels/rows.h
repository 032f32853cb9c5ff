// How threads share rows, and what is computed of one row in several kernels.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace sparkgap {
namespace {

// This thread's share of `n` items: consecutive ones.
struct Share {
  int64_t begin, end;
};

SPARKGAP_INLINE Share share(int64_t n, Worker worker) {
  return {n * worker.index / worker.count, n * (worker.index + 1) / worker.count};
}

// f(k, left) for k = 0, 16, ... below n, where the first 16 of what is `left` count; a constant where that is all 16.
template <class F>
SPARKGAP_INLINE void each_vector(int64_t n, F f) {
  int64_t k = 0;
  for (; k + kLanes <= n; k += kLanes) f(k, int64_t(kLanes));
  if (k < n) f(k, n - k);
}

template <class F>
SPARKGAP_INLINE void with_type(DType dtype, F f) {
  if (dtype == DType::kFloat32) f(float());
  else f(BFloat16());
}

template <class T>
SPARKGAP_INLINE T* head_of(const HeadRows& rows, int64_t row, int64_t head) {
  return static_cast<T*>(rows.data) + row * rows.row_stride + head * rows.head_stride;
}

// A value as the dtype would keep it.
SPARKGAP_INLINE Floats rounded(Floats x, float) { return x; }
SPARKGAP_INLINE Floats rounded(Floats x, BFloat16) {
  BFloat16 lanes[kLanes];
  store(lanes, x);
  return load(lanes);
}

// out = s / sqrt(mean(s^2) + eps) * weight for s = x, or x + residual, which goes to `total`.
template <class X, class W>
SPARKGAP_INLINE void norm_row(const X* x, const X* residual, X* total, const W* weight, int64_t features, float eps, X* out) {
  Floats squares = splat(0.0f);
  if (residual) {
    each_vector(features, [&](int64_t k, int64_t left) SPARKGAP_INLINE_LAMBDA {
      const Floats s = rounded(load_some(x + k, left) + load_some(residual + k, left), X());
      store_some(total + k, s, left);
      squares = fma(s, s, squares);
    });
    x = total;
  } else {
    each_vector(features, [&](int64_t k, int64_t left) SPARKGAP_INLINE_LAMBDA {
      const Floats v = load_some(x + k, left);
      squares = fma(v, v, squares);
    });
  }
  const Floats factor = splat(1.0f / __builtin_sqrtf(sum(squares) / float(features) + eps));
  each_vector(features, [&](int64_t k, int64_t left) SPARKGAP_INLINE_LAMBDA {
    store_some(out + k, load_some(x + k, left) * factor * load_some(weight + k, left), left);
  });
}

// silu(gate) * up.
SPARKGAP_INLINE Floats gated(Floats gate, Floats up) {
  return gate / (splat(1.0f) + exp(splat(0.0f) - gate)) * up;
}

// Rotates feature i with feature i + half; features beyond pass unchanged. `X` is what a result is rounded to first.
template <class X, class To>
SPARKGAP_INLINE void rotate_head(const X* x, const float* cos, const float* sin, int64_t half, int64_t features, To* out) {
  each_vector(half, [&](int64_t k, int64_t left) SPARKGAP_INLINE_LAMBDA {
    const Floats a = load_some(x + k, left), b = load_some(x + half + k, left);
    const Floats c = load_some(cos + k, left), s = load_some(sin + k, left);
    store_some(out + k, rounded(a * c - b * s, X()), left);
    store_some(out + half + k, rounded(b * c + a * s, X()), left);
  });
  each_vector(features - 2 * half, [&](int64_t k, int64_t left) SPARKGAP_INLINE_LAMBDA {
    store_some(out + 2 * half + k, load_some(x + 2 * half + k, left), left);
  });
}

template <class From, class To>
SPARKGAP_INLINE void copy(const From* from, To* to, int64_t n) {
  each_vector(n, [&](int64_t k, int64_t left) SPARKGAP_INLINE_LAMBDA { store_some(to + k, load_some(from + k, left), left); });
}

SPARKGAP_INLINE Floats sigmoid(Floats x) { return splat(1.0f) / (splat(1.0f) + exp(splat(0.0f) - x)); }

template <class X>
SPARKGAP_INLINE Floats dot_on(Floats total, const X* x, const float* weight, int64_t n) {
  for (int64_t k = 0; k < n; k += kLanes) total = fma(load_some(x + k, n - k), load_some(weight + k, n - k), total);
  return total;
}

// sigmoid of the lanes' sum and a bias.
SPARKGAP_INLINE float confidence_of(Floats total, float bias) {
  float lanes[kLanes];
  store(lanes, sigmoid(splat(sum(total) + bias)));
  return lanes[0];
}

}  // namespace
}  // namespace sparkgap
