// What drawing a token computes of a whole row of logits.
#include "kernels.h"
#include "rows.h"
#include "simd.h"
#include "variant.h"

namespace sparkgap::SPARKGAP_VARIANT {

LargestLogit largest_logit(const float* logits, int64_t n) {
  // Part by part, so that the place is then looked for in one part only.
  constexpr int64_t kPart = 64 * kLanes;
  float best = -__builtin_inff();
  int64_t part = 0;
  bool nan = false;
  for (int64_t begin = 0; begin < n && !nan; begin += kPart) {
    const int64_t end = smaller(n, begin + kPart), whole = begin + (end - begin) / kLanes * kLanes;
    Floats most = splat(-__builtin_inff()), unordered = splat(0.0f);
    for (int64_t k = begin; k < whole; k += kLanes) {
      const Floats x = load(logits + k);
      most = larger(most, x);
#pragma GCC unroll 4
      for (int i = 0; i < kParts; i++) unordered.part[i] = x.part[i] == x.part[i] ? unordered.part[i] : splat_part(1.0f);
    }
    float here = largest(most);
    nan = largest(unordered) > 0;
    for (int64_t k = whole; k < end; k++) {
      here = larger(here, logits[k]);
      nan = nan || logits[k] != logits[k];
    }
    if (nan || here > best) best = here, part = begin;
  }
  // The first place of the largest value; a NaN, as in torch, is larger than every number.
  int64_t place = part;
  while (place < n - 1 && !(nan ? logits[place] != logits[place] : logits[place] == best)) place++;
  return {place, nan ? __builtin_nanf("") : best};
}

void weigh_logits(const float* logits, int64_t n, float largest, float temperature, float lowest, float* weights) {
  for (int64_t k = 0; k < n; k += kLanes) {
    const Floats scaled = (load_some(logits + k, n - k) - splat(largest)) / splat(temperature);
    Floats weight = exp(scaled);
#pragma GCC unroll 4
    for (int i = 0; i < kParts; i++)
      weight.part[i] = scaled.part[i] < splat_part(lowest) ? splat_part(0.0f) : weight.part[i];
    store_some(weights + k, weight, n - k);
  }
}

}  // namespace sparkgap::SPARKGAP_VARIANT
