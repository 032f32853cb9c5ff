// Vectors of 16 lanes, the same on every instruction set: one register of AVX-512, two of AVX2, four elsewhere.
//
// Every operation below is exact or correctly rounded (fused multiply-add included), so kernels written with it give
// the same bits whatever they are compiled for. Kernel sources are compiled once for each instruction set; nothing
// here may have external linkage, and no standard library template may be used, or the linker could pick a copy
// built for instructions that the machine lacks.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sparkgap {
namespace {

// A build with sanitizers calls its helpers: inlined everywhere with the checks, they take minutes to compile a file.
#if defined(SPARKGAP_SANITIZED)
#define SPARKGAP_INLINE inline
#define SPARKGAP_INLINE_LAMBDA
#else
#define SPARKGAP_INLINE inline __attribute__((always_inline))
#define SPARKGAP_INLINE_LAMBDA __attribute__((always_inline))
#endif

constexpr int kLanes = 16;

#if defined(__AVX512F__)
constexpr int kPartLanes = 16;
#elif defined(__AVX2__)
constexpr int kPartLanes = 8;
#else
constexpr int kPartLanes = 4;
#endif
constexpr int kParts = kLanes / kPartLanes;

typedef float FloatPart __attribute__((vector_size(4 * kPartLanes)));
typedef int32_t IntPart __attribute__((vector_size(4 * kPartLanes)));
typedef uint32_t UIntPart __attribute__((vector_size(4 * kPartLanes)));
typedef uint16_t ShortPart __attribute__((vector_size(2 * kPartLanes)));

struct Floats {
  FloatPart part[kParts];
};

struct Ints {
  IntPart part[kParts];
};

template <class T>
SPARKGAP_INLINE T smaller(T a, T b) {
  return b < a ? b : a;
}

template <class T>
SPARKGAP_INLINE T larger(T a, T b) {
  return a < b ? b : a;
}

SPARKGAP_INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

SPARKGAP_INLINE FloatPart splat_part(float x) {
#if defined(__AVX512F__)
  return (FloatPart)_mm512_set1_ps(x);
#elif defined(__AVX2__)
  return (FloatPart)_mm256_set1_ps(x);
#else
  return FloatPart{x, x, x, x};
#endif
}

#if !defined(__FMA__) && !defined(__AVX512F__) && !defined(__aarch64__)
// Correctly rounded multiply-add without the instruction: the product is exact in double; the sum is rounded to odd
// there, which keeps the second rounding, to float, correct (Boldo and Melquiond, "Emulation of FMA and correctly
// rounded sums", 2008).
SPARKGAP_INLINE float fma_by_odd_rounding(float a, float b, float c) {
  const double product = double(a) * double(b), addend = double(c);
  const double sum = product + addend;
  const double virtual_addend = sum - product;
  const double error = (product - (sum - virtual_addend)) + (addend - virtual_addend);
  int64_t bits;
  std::memcpy(&bits, &sum, sizeof bits);
  const int64_t toward_error = ((error > 0) == (sum > 0)) ? 1 : -1;
  const bool inexact_even = error != 0 && error - error == 0 && !(bits & 1);
  bits += inexact_even ? toward_error : 0;
  double odd;
  std::memcpy(&odd, &bits, sizeof odd);
  return float(odd);
}
#endif

SPARKGAP_INLINE float fma(float a, float b, float c) {
#if defined(__FMA__) || defined(__AVX512F__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return fma_by_odd_rounding(a, b, c);
#endif
}

#if !defined(__FMA__) && !defined(__AVX512F__) && !defined(__aarch64__)
__attribute__((noinline)) FloatPart  // so many operations that a call costs little, and inlining much code
#else
SPARKGAP_INLINE FloatPart
#endif
fma_part(FloatPart a, FloatPart b, FloatPart c) {
#if defined(__AVX512F__)
  return (FloatPart)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (FloatPart)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  FloatPart r;
  for (int i = 0; i < kPartLanes; i++) r[i] = fma(a[i], b[i], c[i]);
  return r;
#endif
}

#define SPARKGAP_EACH_PART(expression)         \
  {                                            \
    Floats r;                                  \
    _Pragma("GCC unroll 4") for (int i = 0; i < kParts; i++) r.part[i] = (expression); \
    return r;                                  \
  }

SPARKGAP_INLINE Floats splat(float x) SPARKGAP_EACH_PART(splat_part(x))
SPARKGAP_INLINE Floats fma(Floats a, Floats b, Floats c) SPARKGAP_EACH_PART(fma_part(a.part[i], b.part[i], c.part[i]))
SPARKGAP_INLINE Floats operator+(Floats a, Floats b) SPARKGAP_EACH_PART(a.part[i] + b.part[i])
SPARKGAP_INLINE Floats operator-(Floats a, Floats b) SPARKGAP_EACH_PART(a.part[i] - b.part[i])
SPARKGAP_INLINE Floats operator*(Floats a, Floats b) SPARKGAP_EACH_PART(a.part[i] * b.part[i])
SPARKGAP_INLINE Floats operator/(Floats a, Floats b) SPARKGAP_EACH_PART(a.part[i] / b.part[i])
// The larger and the smaller of each lane; `b` where the two are not ordered.
SPARKGAP_INLINE FloatPart larger_part(FloatPart a, FloatPart b) {
#if defined(__AVX512F__)
  return (FloatPart)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (FloatPart)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}
SPARKGAP_INLINE FloatPart smaller_part(FloatPart a, FloatPart b) {
#if defined(__AVX512F__)
  return (FloatPart)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (FloatPart)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

// A NaN in `a` gives NaN.
SPARKGAP_INLINE Floats at_least(Floats a, float low) SPARKGAP_EACH_PART(larger_part(splat_part(low), a.part[i]))
SPARKGAP_INLINE Floats at_most(Floats a, float high) SPARKGAP_EACH_PART(smaller_part(splat_part(high), a.part[i]))
// `a` where the two are not ordered.
SPARKGAP_INLINE Floats larger(Floats a, Floats b) SPARKGAP_EACH_PART(larger_part(b.part[i], a.part[i]))

SPARKGAP_INLINE Floats load(const float* p) {
  Floats r;
  std::memcpy(&r, p, sizeof r);
  return r;
}

SPARKGAP_INLINE void store(float* p, Floats x) { std::memcpy(p, &x, sizeof x); }

struct BFloat16 {
  uint16_t bits;
};

SPARKGAP_INLINE Floats load(const BFloat16* p) {
  Floats r;
#pragma GCC unroll 4
  for (int i = 0; i < kParts; i++) {
    ShortPart half;
    std::memcpy(&half, p + i * kPartLanes, sizeof half);
    r.part[i] = (FloatPart)(__builtin_convertvector(half, UIntPart) << 16);
  }
  return r;
}

// Rounds to nearest even; NaN stays NaN.
SPARKGAP_INLINE void store(BFloat16* p, Floats x) {
#pragma GCC unroll 4
  for (int i = 0; i < kParts; i++) {
    const UIntPart bits = (UIntPart)x.part[i];
    UIntPart rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    rounded = (x.part[i] == x.part[i]) ? rounded : ((bits >> 16) | 0x40);
    const ShortPart half = __builtin_convertvector(rounded, ShortPart);
    std::memcpy(p + i * kPartLanes, &half, sizeof half);
  }
}

// The first `n` (0 ... 16) elements; the rest are zero.
template <class T>
SPARKGAP_INLINE Floats load_some(const T* p, int64_t n) {
  if (n >= kLanes) return load(p);
  T buffer[kLanes] = {};
  std::memcpy(buffer, p, size_t(n) * sizeof(T));
  return load(buffer);
}

template <class T>
SPARKGAP_INLINE void store_some(T* p, Floats x, int64_t n) {
  if (n >= kLanes) return store(p, x);
  T buffer[kLanes];
  store(buffer, x);
  std::memcpy(p, buffer, size_t(n) * sizeof(T));
}

SPARKGAP_INLINE float to_float(float x) { return x; }
SPARKGAP_INLINE float to_float(BFloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float r;
  std::memcpy(&r, &bits, sizeof r);
  return r;
}

// Folds the lanes in this order, whatever the registers are: halves, quarters, pairs.
#if defined(__AVX2__)
template <class Fold>
SPARKGAP_INLINE float fold(Floats x, Fold four) {
#if defined(__AVX512F__)
  const __m512 all = (__m512)x.part[0];
  const __m256 low = _mm512_castps512_ps256(all);
  const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(all), 1));
#else
  const __m256 low = (__m256)x.part[0], high = (__m256)x.part[1];
#endif
  const __m128 first = four(_mm256_castps256_ps128(low), _mm256_castps256_ps128(high));
  const __m128 second = four(_mm256_extractf128_ps(low, 1), _mm256_extractf128_ps(high, 1));
  const __m128 quarter = four(first, second);
  const __m128 pair = four(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(four(pair, _mm_movehdup_ps(pair)));
}

SPARKGAP_INLINE float sum(Floats x) {
  return fold(x, [](__m128 a, __m128 b) { return _mm_add_ps(a, b); });
}

SPARKGAP_INLINE float largest(Floats x) {
  return fold(x, [](__m128 a, __m128 b) { return _mm_max_ps(b, a); });
}
#else
SPARKGAP_INLINE float sum(Floats x) {
  float a[kLanes];
  store(a, x);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) a[i] += a[i + half];
  return a[0];
}

SPARKGAP_INLINE float largest(Floats x) {
  float a[kLanes];
  store(a, x);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) a[i] = larger(a[i], a[i + half]);
  return a[0];
}
#endif

// A float's bits without the sign: integers in the order of the magnitudes, above which NaNs stand.
SPARKGAP_INLINE Ints magnitude_bits(Floats x) {
  Ints r;
#pragma GCC unroll 4
  for (int i = 0; i < kParts; i++) r.part[i] = (IntPart)x.part[i] & 0x7fffffff;
  return r;
}

SPARKGAP_INLINE Ints larger(Ints a, Ints b) {
  Ints r;
#pragma GCC unroll 4
  for (int i = 0; i < kParts; i++) {
#if defined(__AVX512F__)
    r.part[i] = (IntPart)_mm512_max_epi32((__m512i)a.part[i], (__m512i)b.part[i]);
#elif defined(__AVX2__)
    r.part[i] = (IntPart)_mm256_max_epi32((__m256i)a.part[i], (__m256i)b.part[i]);
#else
    r.part[i] = a.part[i] < b.part[i] ? b.part[i] : a.part[i];
#endif
  }
  return r;
}

SPARKGAP_INLINE int32_t largest(Ints x) {
  int32_t lanes[kLanes];
  std::memcpy(lanes, &x, sizeof lanes);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) lanes[i] = larger(lanes[i], lanes[i + half]);
  return lanes[0];
}

// Nearest integers (ties to even) of values in -2^22 ... 2^22.
SPARKGAP_INLINE Floats round_to_even(Floats x) {
  const Floats magic = splat(12582912.0f);
  return (x + magic) - magic;
}

// The low bytes of 16 integers.
SPARKGAP_INLINE void store_low_bytes(uint8_t* p, Ints x) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)x.part[0]));
#elif defined(__AVX2__)
  const __m256i mask = _mm256_set1_epi32(0xff);
  const __m256i shorts = _mm256_permute4x64_epi64(
      _mm256_packus_epi32(_mm256_and_si256((__m256i)x.part[0], mask), _mm256_and_si256((__m256i)x.part[1], mask)), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packus_epi16(_mm256_castsi256_si128(shorts), _mm256_extracti128_si256(shorts, 1)));
#else
  int32_t lanes[kLanes];
  std::memcpy(lanes, &x, sizeof lanes);
  for (int i = 0; i < kLanes; i++) p[i] = uint8_t(lanes[i]);
#endif
}

// e^x, 0 below -87.3 (where results would be subnormal), capped at e^88. The polynomial is that of Cephes' expf.
#if defined(__AVX512F__)
// The same bits with fewer instructions: what a lower limit would change is zeroed at the end in any case.
SPARKGAP_INLINE Floats exp(Floats x) {
  const __m512 in = (__m512)x.part[0], limited = _mm512_min_ps(_mm512_set1_ps(88.0f), in);
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(limited, _mm512_set1_ps(1.44269504f)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(-1.42860677e-6f),
                                   _mm512_fmadd_ps(n, _mm512_set1_ps(-0.693145752f), limited));
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(1.9875691500e-4f), r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  const __mmask16 kept = _mm512_cmp_ps_mask(in, _mm512_set1_ps(-87.3f), _CMP_NLT_UQ);
  return {{(FloatPart)_mm512_maskz_scalef_ps(kept, p, n)}};
}
#else
SPARKGAP_INLINE Floats exp(Floats x) {
  const Floats limited = at_most(at_least(x, -88.0f), 88.0f);
  const Floats n = round_to_even(limited * splat(1.44269504f));
  const Floats r = fma(n, splat(-1.42860677e-6f), fma(n, splat(-0.693145752f), limited));
  Floats p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r + splat(1.0f));
  Floats result;
#pragma GCC unroll 4
  for (int i = 0; i < kParts; i++) {
    const IntPart exponent = __builtin_convertvector(n.part[i], IntPart);
    const FloatPart scale = (FloatPart)((exponent + 127) << 23);
    result.part[i] = x.part[i] < splat_part(-87.3f) ? splat_part(0.0f) : p.part[i] * scale;
  }
  return result;
}
#endif

}  // namespace
}  // namespace sparkgap
