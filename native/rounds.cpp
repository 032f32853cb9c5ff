#include "rounds.h"

#include <algorithm>
#include <cmath>

namespace sparkgap {

void begin_round(const BeginRound& args, Worker worker) {
  if (worker.index != 0) return;
  for (int64_t i = 0; i < args.sequences; i++) {
    const int64_t source = args.sources[i];
    if (source < 0 || source >= args.state_rows) {
      if (source != -1) worker.report(kSourceOutOfRange);
      args.anchors[i] = args.staged_anchors[i];
      args.positions[i] = args.staged_positions[i];
    } else {
      args.anchors[i] = args.state_anchors[source];
      args.positions[i] = args.state_positions[source];
    }
  }
}

void verify_rows(const VerifyRows& args, Worker worker) {
  if (worker.index != 0) return;
  for (int64_t i = 0; i < args.sequences; i++) {
    // A position that is out of range is no more so, whatever is added to it, than the nearest one that is.
    const int64_t first = std::clamp(args.positions[i], -args.width, args.max_length), blocks = args.num_blocks[i];
    const bool pads = blocks == 0;
    if (!pads && (first < 0 || first >= args.max_length)) worker.report(kPositionOutOfRange);
    const int64_t last = pads ? 0 : args.max_length - 1;
    for (int64_t row = 0; row < args.width; row++) {
      const int64_t at = i * args.width + row, position = first + row;
      args.token_ids[at] = row == 0 ? args.anchors[i] : args.drafts.at(i, row - 1);
      const bool writes = !pads && position >= 0 && position <= last;
      args.row_positions[at] = position < 0 ? 0 : position > last ? last : position;
      args.slots[at] = -1;
      if (!writes) continue;
      const int64_t block = position / args.block_size;
      if (block >= blocks || block >= args.max_blocks) worker.report(kBlockOutOfRange);
      else args.slots[at] = args.block_tables[i * args.max_blocks + block] * args.block_size + position % args.block_size;
    }
  }
}

void step_rows(const StepRows& args, Worker worker) {
  if (worker.index != 0) return;
  const int64_t limit = std::min(args.max_length, args.max_blocks * args.block_size);
  for (int64_t i = 0; i < args.sequences; i++) {
    const int64_t length = args.context_lengths[i];
    const bool pads = length <= 0;
    if (length < 0 || length > limit) worker.report(kPositionOutOfRange);
    const auto slot = [&](int64_t position) {
      const int64_t block = args.block_tables[i * args.max_blocks + position / args.block_size];
      return block * args.block_size + position % args.block_size;
    };
    const int64_t first = pads ? 0 : std::min(length, limit) - 1;
    args.sources[i] = pads ? 0 : slot(first);
    for (int64_t step = 0; step < args.steps; step++) {
      const int64_t at = step * args.sequences + i;
      const bool beyond = pads || first + step >= limit;
      args.positions[at] = pads ? 0 : std::min(first + step, limit - 1);
      args.slots[at] = beyond || step == 0 ? -1 : slot(first + step);
    }
  }
}

void settle_round(const SettleRound& args, Worker worker) {
  if (worker.index != 0) return;
  const int64_t width = args.width;
  for (int64_t i = 0; i < args.sequences; i++) {
    const int64_t* picks = args.picks + i * width;
    const float* scores = args.scores + i * width;
    const bool is_looked_up = args.runs && args.runs[i] > 0, is_drafted = !is_looked_up && args.draft_scores.data;
    int64_t accepted = 0;
    while ((is_looked_up || is_drafted) && accepted < width - 1 && picks[accepted] == args.drafts.at(i, accepted)) accepted++;
    RoundStatus status = RoundStatus::kGood;
    for (int64_t step = 0; is_drafted && step < width - 1; step++)
      if (!std::isfinite(args.draft_scores.at(i, step))) status = RoundStatus::kDrafterNotFinite;
    // Only rows that were reached count: what follows a rejected draft token was never asked for.
    for (int64_t row = 0; row <= accepted; row++)
      if (!std::isfinite(scores[row])) status = RoundStatus::kTargetNotFinite;
    int64_t* result = args.results + i * (width + 2);
    result[0] = accepted;
    result[1] = int64_t(status);
    for (int64_t row = 0; row < width; row++) {
      result[2 + row] = picks[row];
      if (!args.context_slots) continue;
      const int64_t at = i * width + row;
      const bool seen = row <= accepted && args.row_positions[at] < args.context_length;
      args.context_positions[at] = seen ? args.row_positions[at] : 0;
      args.context_slots[at] = seen ? args.slots[at] : -1;
    }
    args.next_anchors[i] = picks[accepted];
    args.next_positions[i] = args.positions[i] + accepted + 1;
  }
}

void hand_off(const HandOff& args, Worker worker) {
  if (worker.index != 0) return;
  for (int64_t i = 0; i < args.sequences; i++) {
    args.state_anchors[i] = args.next_anchors[i];
    args.state_positions[i] = args.next_positions[i];
  }
}

}  // namespace sparkgap
