// The Markov chain of a drafter: each step's logits, and the largest of them, without a pass over memory between.
#include "int8_tile.h"
#include "kernels.h"
#include "quantize.h"
#include "rows.h"
#include "simd.h"
#include "tile.h"
#include "variant.h"

namespace sparkgap::SPARKGAP_VARIANT {
namespace {

// The largest logits so far of one sequence, 16 lanes of which each looks at every 16th draft id. Blocks come in order.
struct Lanes {
  Floats most;
  Ints block, nan_block;  // of the largest, and of the first NaN
};

SPARKGAP_INLINE void begin(Lanes& lanes, int64_t first_block) {
#pragma GCC unroll 4
  for (int i = 0; i < kParts; i++) {
    lanes.most.part[i] = splat_part(-__builtin_inff());
    lanes.block.part[i] = IntPart{} + int32_t(first_block);
    lanes.nan_block.part[i] = IntPart{} + kNoPlace;
  }
}

SPARKGAP_INLINE void take(Lanes& lanes, Floats logits, int64_t block) {
#pragma GCC unroll 4
  for (int i = 0; i < kParts; i++) {
    const FloatPart x = logits.part[i];
    const IntPart here = IntPart{} + int32_t(block), above = (IntPart)(x > lanes.most.part[i]);
    const IntPart nan = (IntPart)(x != x) & (IntPart)(lanes.nan_block.part[i] == kNoPlace);
    lanes.most.part[i] = above ? x : lanes.most.part[i];
    lanes.block.part[i] = above ? here : lanes.block.part[i];
    lanes.nan_block.part[i] = nan ? here : lanes.nan_block.part[i];
  }
}

SPARKGAP_INLINE PartialPick joined(PartialPick a, PartialPick b) {
  const bool second = b.value > a.value || (b.value == a.value && b.place < a.place);
  return {second ? b.value : a.value, second ? b.place : a.place, smaller(a.nan_place, b.nan_place)};
}

constexpr PartialPick kNothing{-__builtin_inff(), kNoPlace, kNoPlace};

PartialPick found_in(const Lanes& lanes) {
  float most[kLanes];
  int32_t blocks[kLanes], nan_blocks[kLanes];
  std::memcpy(most, &lanes.most, sizeof most);
  std::memcpy(blocks, &lanes.block, sizeof blocks);
  std::memcpy(nan_blocks, &lanes.nan_block, sizeof nan_blocks);
  PartialPick pick = kNothing;
  for (int lane = 0; lane < kLanes; lane++)
    pick = joined(pick, {most[lane], blocks[lane] * kLanes + lane,
                         nan_blocks[lane] == kNoPlace ? kNoPlace : nan_blocks[lane] * kLanes + lane});
  return pick;
}

// What all threads found for one sequence.
SPARKGAP_INLINE PartialPick found_by_all(const PartialPick* found, int threads, int64_t sequences, int64_t sequence) {
  PartialPick pick = kNothing;
  for (int thread = 0; thread < threads; thread++) pick = joined(pick, found[thread * sequences + sequence]);
  return pick;
}

// The target's token; a NaN, as in torch, is larger than every number.
SPARKGAP_INLINE int64_t token_of(const PartialPick& pick, const int64_t* target_ids) {
  const int64_t place = pick.nan_place != kNoPlace ? pick.nan_place : pick.place;
  return target_ids ? target_ids[place] : place;
}

SPARKGAP_INLINE float score_of(const PartialPick& pick) {
  return pick.nan_place != kNoPlace ? __builtin_nanf("") : pick.value;
}

// A thread's own memory.
struct Scratch {
  Lanes* lanes;     // [sequences]
  std::byte* rows;  // [sequences, row_bytes]: W1's rows, as W2 takes them
  float* scales;    // [sequences]
  int64_t row_bytes;

  static int64_t bytes_of_row(int64_t rank) { return round_up(4 * rank, 64); }
  static size_t bytes(int64_t sequences, int64_t rank) {
    return size_t(sequences * (int64_t(sizeof(Lanes)) + bytes_of_row(rank) + 4));
  }
  Scratch(std::byte* memory, int64_t sequences, int64_t rank)
      : lanes(reinterpret_cast<Lanes*>(memory)),
        rows(memory + sequences * int64_t(sizeof(Lanes))),
        scales(reinterpret_cast<float*>(rows + sequences * bytes_of_row(rank))),
        row_bytes(bytes_of_row(rank)) {}
};

// Logits of one sequence at the block's draft ids: base, and the bias; -inf beyond the vocabulary.
SPARKGAP_INLINE void take_biased(const MarkovStep& args, Lanes& lanes, int64_t sequence, int64_t block, Floats bias) {
  const int64_t first = block * kLanes, left = args.draft_vocab - first;
  const float* base = static_cast<const float*>(args.base.data) + sequence * args.base.row_stride + first;
  if (left >= kLanes) return take(lanes, load(base) + bias, block);
  float logits[kLanes];
  store(logits, load_some(base, left) + bias);
  for (int64_t lane = left; lane < kLanes; lane++) logits[lane] = -__builtin_inff();
  take(lanes, load(logits), block);
}

template <int R, int B>
SPARKGAP_INLINE void take_sums(const MarkovStep& args, const Scratch& scratch, int64_t sequence, int64_t block,
                               const Ints (*sums)[B]) {
#pragma GCC unroll 4
  for (int b = 0; b < B; b++) {
    const int64_t first = (block + b) * kLanes, left = args.draft_vocab - first;
    const Floats scales = load_some(args.channel_scales + first, left);
    const Floats bias = args.bias ? load_some(args.bias + first, left) : splat(0.0f);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      Floats y = to_floats(sums[r][b]) * (splat(scratch.scales[sequence + r]) * scales);
      if (args.bias) y = y + bias;
      take_biased(args, scratch.lanes[sequence + r], sequence + r, block + b, y);
    }
  }
}

template <int R, int B>
void int8_tile(const MarkovStep& args, const Scratch& scratch, int64_t sequence, int64_t block) {
  const int64_t blocks = (args.draft_vocab + kLanes - 1) / kLanes, groups = (args.rank + 3) / 4;
  alignas(64) int32_t padded[B][16];
  const int32_t* offsets[B];
#pragma GCC unroll 4
  for (int b = 0; b < B; b++) offsets[b] = offsets_of(args.offsets, args.draft_vocab, block + b, padded[b]);
  Ints out[R][B];
  sums<R, B>(reinterpret_cast<const uint8_t*>(scratch.rows) + sequence * scratch.row_bytes, scratch.row_bytes,
             {static_cast<const int8_t*>(args.packed), blocks, groups, block}, groups, offsets, 0, out);
  take_sums<R, B>(args, scratch, sequence, block, out);
}

template <int R, int B>
SPARKGAP_INLINE void int8_column(const MarkovStep& args, const Scratch& scratch, int64_t sequence, int64_t block) {
  for (; args.sequences - sequence >= R; sequence += R) int8_tile<R, B>(args, scratch, sequence, block);
  if constexpr (R > 1)
    if (sequence < args.sequences) int8_column<R - 1, B>(args, scratch, sequence, block);
}

void int8_blocks(const MarkovStep& args, const Scratch& scratch, int64_t block, int64_t end) {
  for (; end - block >= kMaxBlocks; block += kMaxBlocks) int8_column<kMaxRows, kMaxBlocks>(args, scratch, 0, block);
  for (; block < end; block++) int8_column<kMaxRows, 1>(args, scratch, 0, block);
}

constexpr int64_t kPartBlocks = 4;
constexpr int64_t kPartRows = 12;

template <class W>
void float_blocks(const MarkovStep& args, const Scratch& scratch, int64_t block, int64_t end) {
  alignas(64) float sums[kPartRows * kPartBlocks * kLanes];
  for (; block < end; block += kPartBlocks) {
    const int64_t part = smaller(kPartBlocks, end - block);
    const Columns<W> columns{static_cast<const W*>(args.packed) + block * args.rank * kLanes, args.rank * kLanes, kLanes};
    for (int64_t sequence = 0; sequence < args.sequences; sequence += kPartRows) {
      const int64_t rows = smaller(kPartRows, args.sequences - sequence);
      multiply_tiles(rows, reinterpret_cast<const float*>(scratch.rows + sequence * scratch.row_bytes), scratch.row_bytes / 4,
                     columns, part, args.rank, sums, kPartBlocks * kLanes, false);
      for (int64_t r = 0; r < rows; r++)
        for (int64_t b = 0; b < part; b++) {
          const int64_t first = (block + b) * kLanes;
          Floats y = load(sums + (r * kPartBlocks + b) * kLanes);
          if (args.bias) y = y + load_some(args.bias + first, args.draft_vocab - first);
          take_biased(args, scratch.lanes[sequence + r], sequence + r, block + b, y);
        }
    }
  }
}

// W1's row of a token, as W2 takes it.
template <class T>
void look_up(const MarkovStep& args, const Scratch& scratch, int64_t sequence, int64_t token) {
  const T* row = static_cast<const T*>(args.table.data) + token * args.table.stride;
  if (args.channel_scales)
    quantize_to({reinterpret_cast<uint8_t*>(scratch.rows), scratch.row_bytes, scratch.scales, args.fixed_scale}, sequence, row,
                args.rank);
  else copy(row, reinterpret_cast<float*>(scratch.rows + sequence * scratch.row_bytes), args.rank);
}

template <class T>
void estimate(const MarkovEnd& args, int64_t step, int64_t sequence, Worker worker) {
  const T* hidden = static_cast<const T*>(args.hidden.data) + sequence * args.hidden.row_stride + step * args.hidden.head_stride;
  const float* weight = args.weights + step * args.weight_stride;
  Floats total = dot_on(splat(0.0f), hidden, weight, args.features);
  if (args.table.data) {
    const int64_t token = step ? args.token_ids[(step - 1) * args.sequences + sequence] : args.anchors[sequence];
    if (token < 0 || token >= args.vocab_size) return worker.report(kTokenOutOfRange);
    with_type(args.table.dtype, [&](auto t) {
      total = dot_on(total, static_cast<const decltype(t)*>(args.table.data) + token * args.table.stride, weight + args.features,
                     args.rank);
    });
  }
  args.confidences[step * args.sequences + sequence] = confidence_of(total, args.biases[step * args.bias_stride]);
}

}  // namespace

void markov_step(const MarkovStep& args, Worker worker) {
  const Scratch scratch(worker.scratch, args.sequences, args.rank);
  const Share mine = share_pairs((args.draft_vocab + kLanes - 1) / kLanes, worker);
  for (int64_t sequence = 0; sequence < args.sequences; sequence++) {
    int64_t token;
    if (args.anchors) token = args.anchors[sequence];
    else {
      const PartialPick pick = found_by_all(args.before, args.threads, args.sequences, sequence);
      token = token_of(pick, args.target_ids);
      if (worker.index == 0) args.token_ids[sequence] = token, args.scores[sequence] = score_of(pick);
    }
    if (token < 0 || token >= args.vocab_size) {
      worker.report(kTokenOutOfRange);
      token = 0;
    }
    with_type(args.table.dtype, [&](auto t) { look_up<decltype(t)>(args, scratch, sequence, token); });
    begin(scratch.lanes[sequence], mine.begin);
  }
  if (args.channel_scales) int8_blocks(args, scratch, mine.begin, mine.end);
  else if (args.packed_dtype == DType::kFloat32) float_blocks<float>(args, scratch, mine.begin, mine.end);
  else float_blocks<BFloat16>(args, scratch, mine.begin, mine.end);
  for (int64_t sequence = 0; sequence < args.sequences; sequence++)
    args.found[worker.index * args.sequences + sequence] = mine.begin < mine.end ? found_in(scratch.lanes[sequence]) : kNothing;
  // Threads that sit this step out found nothing; they may be back in the next.
  if (worker.index == 0)
    for (int64_t place = worker.count * args.sequences; place < args.threads * args.sequences; place++)
      args.found[place] = kNothing;
}

void markov_end(const MarkovEnd& args, Worker worker) {
  const int64_t last = (args.steps - 1) * args.sequences;
  if (worker.index == 0)
    for (int64_t sequence = 0; sequence < args.sequences; sequence++) {
      const PartialPick pick = found_by_all(args.before, args.threads, args.sequences, sequence);
      args.token_ids[last + sequence] = token_of(pick, args.target_ids), args.scores[last + sequence] = score_of(pick);
    }
  if (!args.weights) return;
  const Share mine = share(args.steps * args.sequences, worker);
  for (int64_t item = mine.begin; item < mine.end; item++)
    with_type(args.hidden.dtype,
              [&](auto t) { estimate<decltype(t)>(args, item / args.sequences, item % args.sequences, worker); });
}

size_t markov_scratch_bytes(int64_t sequences, int64_t rank) { return Scratch::bytes(sequences, rank); }

}  // namespace sparkgap::SPARKGAP_VARIANT
