#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace sparkgap {

namespace {

constexpr int64_t kSumBlock = 256;
constexpr int64_t kSums = 8;

// Sum in a fixed order, of several sums side by side.
double sum_of(const float* values, int64_t n) {
  double sums[kSums] = {};
  int64_t k = 0;
  for (; k + kSums <= n; k += kSums)
    for (int64_t i = 0; i < kSums; i++) sums[i] += values[k + i];
  for (; k < n; k++) sums[k % kSums] += values[k];
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

double blocked_sum(const float* values, int64_t n) {
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kSumBlock) total += sum_of(values + begin, std::min(kSumBlock, n - begin));
  return total;
}

// Keeps the weights of the `count` largest logits and of what equals the last of them. (Weights would not do: at a high
// temperature different logits have equal ones.)
void keep_top_k(const float* logits, float* weights, int64_t n, int64_t count, float* copy) {
  std::copy(logits, logits + n, copy);
  std::nth_element(copy, copy + (count - 1), copy + n, std::greater<>());
  const float least = copy[count - 1];
  for (int64_t k = 0; k < n; k++) weights[k] = logits[k] < least ? 0.0f : weights[k];
}

// Keeps the smallest set of largest weights whose sum reaches `share` of all; of equals at its edge, the first.
void keep_top_p(float* weights, int64_t n, double share, float* copy) {
  const double bound = share * blocked_sum(weights, n);
  const int64_t live = std::copy_if(weights, weights + n, copy, [](float w) { return w > 0; }) - copy;
  if (live == 0) return;
  // The largest `low` weights sum to `before`, which is below the bound; the largest `high` reach it.
  int64_t low = 0, high = live;
  double before = 0;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    std::nth_element(copy + low, copy + middle, copy + high, std::greater<>());
    const double mass = sum_of(copy + low, middle - low);
    if (before + mass >= bound) high = middle;
    else before += mass, low = middle;
  }
  const float edge = copy[low];
  const int64_t above = std::count_if(weights, weights + n, [edge](float w) { return w > edge; });
  int64_t at_edge = low + 1 - above;
  for (int64_t k = 0; k < n; k++) {
    if (weights[k] > edge) continue;
    if (weights[k] == edge && at_edge-- > 0) continue;
    weights[k] = 0.0f;
  }
}

// The first place up to which the weights sum to more than `share` of all.
int64_t inverse_cdf(const float* weights, int64_t n, double share) {
  const double total = blocked_sum(weights, n);
  // share * total may round up to total, which no sum exceeds.
  const double bound = std::min(share * total, std::nextafter(total, 0.0));
  double before = 0;
  for (int64_t begin = 0; begin < n; begin += kSumBlock) {
    const int64_t end = std::min(begin + kSumBlock, n);
    const double after = before + sum_of(weights + begin, end - begin);
    if (after > bound) {
      int64_t last = begin;
      for (int64_t k = begin; k < end; k++) {
        if (weights[k] == 0) continue;
        before += weights[k];
        last = k;
        if (before > bound) return k;
      }
      return last;  // sums in another order may differ by a rounding
    }
    before = after;
  }
  return n - 1;
}

}  // namespace

double uniform_number(uint64_t seed, uint64_t position) {
  // Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Word 2 is the purpose: 0, the target.
  uint32_t c0 = uint32_t(position), c1 = uint32_t(position >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; round++) {
    const uint64_t first = uint64_t(c0) * 0xD2511F53u, second = uint64_t(c2) * 0xCD9E8D57u;
    const uint32_t n0 = uint32_t(second >> 32) ^ c1 ^ k0, n2 = uint32_t(first >> 32) ^ c3 ^ k1;
    c0 = n0, c1 = uint32_t(second), c2 = n2, c3 = uint32_t(first);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return double((uint64_t(c0) << 21) | (c1 >> 11)) * 0x1p-53;
}

size_t draw_scratch_bytes(int64_t vocab_size) { return size_t(vocab_size) * 2 * sizeof(float); }

void draw_tokens(const DrawTokens& args, Worker worker) {
  const int64_t n = args.vocab_size;
  float* weights = reinterpret_cast<float*>(worker.scratch);
  float* copy = weights + n;
  const int64_t begin = args.rows * worker.index / worker.count, end = args.rows * (worker.index + 1) / worker.count;
  for (int64_t row = begin; row < end; row++) {
    const float* logits = args.logits + row * args.stride;
    const int64_t sequence = row / args.width;
    const LargestLogit largest = args.largest_logit(logits, n);
    args.token_ids[row] = largest.place;
    args.scores[row] = largest.value;
    const float temperature = args.temperatures[sequence];
    if (!(temperature > 0) || !std::isfinite(largest.value)) continue;
    args.weigh_logits(logits, n, largest.value, temperature, args.log_min_p[sequence], weights);
    if (const int64_t k = args.top_k[sequence]; k > 0 && k < n) keep_top_k(logits, weights, n, k, copy);
    if (const double p = args.top_p[sequence]; p < 1) keep_top_p(weights, n, p, copy);
    const int64_t position = args.positions[sequence] + 1 + row % args.width;
    args.token_ids[row] = inverse_cdf(weights, n, uniform_number(uint64_t(args.seeds[sequence]), uint64_t(position)));
  }
}

}  // namespace sparkgap
