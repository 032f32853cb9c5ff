// What a drafter adds to its network: the rows of a block, and the sequential heads' steps.
#include "kernels.h"
#include "rows.h"
#include "simd.h"
#include "variant.h"

namespace sparkgap::SPARKGAP_VARIANT {
namespace {

// (1 - e) / (1 + e) for e = exp(-2 |x|), with x's sign; a NaN stays one.
SPARKGAP_INLINE Floats tanh(Floats x) {
  const Floats negative = splat(0.0f) - x, magnitude = larger(x, negative);
  const Floats e = exp(magnitude * splat(-2.0f));
  const Floats size = (splat(1.0f) - e) / (splat(1.0f) + e);
  Floats r;
#pragma GCC unroll 4
  for (int i = 0; i < kParts; i++) r.part[i] = x.part[i] < splat_part(0.0f) ? splat_part(0.0f) - size.part[i] : size.part[i];
  return r;
}

template <class X>
SPARKGAP_INLINE X* row_of(const Matrix& matrix, int64_t row) {
  return static_cast<X*>(matrix.data) + row * matrix.stride;
}

template <class X>
void apply_gate(const HeadGate& args, Worker worker) {
  const int64_t rank = args.rank;
  const Share mine = share(args.rows, worker);
  for (int64_t row = mine.begin; row < mine.end; row++) {
    const X* projected = row_of<X>(args.projected, row);
    X* latent = row_of<X>(args.latent, row);
    for (int64_t k = 0; k < rank; k += kLanes) {
      const int64_t left = rank - k;
      const Floats gate = sigmoid(load_some(projected + k, left));
      if (!args.recurrent) {
        store_some(latent + k, gate * load_some(row_of<X>(args.embedded, row) + k, left), left);
        continue;
      }
      const Floats candidate = tanh(load_some(projected + rank + k, left));
      const Floats state = load_some(row_of<X>(args.state, row) + k, left);
      store_some(row_of<X>(args.next_state, row) + k, gate * state + (splat(1.0f) - gate) * candidate, left);
      store_some(latent + k, tanh(load_some(projected + 2 * rank + k, left)), left);
    }
  }
}

template <class X>
void estimate(const Confidence& args, Worker worker) {
  const Share mine = share(args.rows, worker);
  for (int64_t row = mine.begin; row < mine.end; row++) {
    Floats total = dot_on(splat(0.0f), row_of<X>(args.hidden, row), args.weight, args.features);
    if (args.embedded.data)
      total = dot_on(total, row_of<X>(args.embedded, row), args.weight + args.features, args.rank);
    args.out[row] = confidence_of(total, args.bias[0]);
  }
}

// Logits of one row at k ... k + 15: base, and the bias where there is one.
SPARKGAP_INLINE Floats biased(const float* base, const float* bias, int64_t k, int64_t left) {
  const Floats logits = load_some(base + k, left);
  return bias ? logits + load_some(bias + k, left) : logits;
}

}  // namespace

void fill_draft_blocks(const DraftBlocks& args, Worker worker) {
  const Share mine = share(args.sequences, worker);
  for (int64_t sequence = mine.begin; sequence < mine.end; sequence++)
    for (int64_t row = 0; row < args.block_rows; row++) {
      const int64_t at = sequence * args.block_rows + row;
      args.token_ids[at] = row == 0 ? args.anchors[sequence] : args.mask_token_id;
      args.positions[at] = args.context_lengths[sequence] + row;
    }
}

void zero_rows(const ZeroRows& args, Worker worker) {
  const size_t width = args.out.dtype == DType::kFloat32 ? sizeof(float) : sizeof(BFloat16);
  const Share mine = share(args.rows, worker);
  for (int64_t row = mine.begin; row < mine.end; row++)
    std::memset(static_cast<std::byte*>(args.out.data) + row * args.out.stride * int64_t(width), 0, size_t(args.features) * width);
}

void head_gate(const HeadGate& args, Worker worker) {
  if (args.projected.dtype == DType::kFloat32) apply_gate<float>(args, worker);
  else apply_gate<BFloat16>(args, worker);
}

void confidence(const Confidence& args, Worker worker) {
  if (args.hidden.dtype == DType::kFloat32) estimate<float>(args, worker);
  else estimate<BFloat16>(args, worker);
}

void add_logits(const AddLogits& args, Worker worker) {
  const int64_t vectors = (args.features + kLanes - 1) / kLanes;
  const Share mine = share(args.rows * vectors, worker);
  for (int64_t item = mine.begin; item < mine.end; item++) {
    const int64_t row = item / vectors, k = item % vectors * kLanes, left = args.features - k;
    store_some(row_of<float>(args.out, row) + k, biased(row_of<float>(args.base, row), row_of<float>(args.bias, row), k, left), left);
  }
}

void draft_pick(const DraftPick& args, Worker worker) {
  const Share mine = share(args.rows, worker);
  for (int64_t row = mine.begin; row < mine.end; row++) {
    const float* base = row_of<float>(args.base, row);
    const float* bias = args.bias.data ? row_of<float>(args.bias, row) : nullptr;
    const int64_t whole = args.features / kLanes * kLanes;
    Floats most = splat(-__builtin_inff()), unordered = splat(0.0f);
    for (int64_t k = 0; k < whole; k += kLanes) {
      const Floats logits = biased(base, bias, k, kLanes);
      most = larger(most, logits);
#pragma GCC unroll 4
      for (int i = 0; i < kParts; i++)
        unordered.part[i] = logits.part[i] == logits.part[i] ? unordered.part[i] : splat_part(1.0f);
    }
    float best = largest(most);
    bool nan = largest(unordered) > 0;
    const auto logit = [&](int64_t k) { return bias ? base[k] + bias[k] : base[k]; };
    for (int64_t k = whole; k < args.features; k++) {
      const float value = logit(k);
      best = larger(best, value);
      nan = nan || value != value;
    }
    // The first place of the largest value; a NaN, as in torch, is larger than every number.
    int64_t place = 0;
    while (place < args.features - 1) {
      const float value = logit(place);
      if (nan ? value != value : value == best) break;
      place++;
    }
    args.token_ids[row] = args.target_ids ? args.target_ids[place] : place;
    args.scores[row] = nan ? __builtin_nanf("") : best;
  }
}

}  // namespace sparkgap::SPARKGAP_VARIANT
