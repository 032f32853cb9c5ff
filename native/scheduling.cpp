#include "scheduling.h"

#include <cmath>

namespace sparkgap {

namespace {

// Expected accepted tokens of the first `count` drafts of a sequence.
double expected_tokens(const ChooseLength& args, int64_t sequence, int64_t count) {
  const int64_t run = args.runs ? args.runs[sequence] : 0;
  double survival = 1, total = 0;
  for (int64_t step = 0; step < count; step++) {
    survival *= run > 0 ? continues_run(run + step) : double(args.confidences.at(sequence, step));
    total += survival;
  }
  return total;
}

bool are_finite(const ChooseLength& args) {
  for (int64_t i = 0; i < args.sequences; i++) {
    if (!args.num_blocks[i] || (args.runs && args.runs[i] > 0)) continue;
    for (int64_t step = 0; step < args.lengths[args.choices - 1]; step++)
      if (!std::isfinite(args.confidences.at(i, step))) return false;
  }
  return true;
}

}  // namespace

// A rule of succession. Of answers of the default model, runs of 2, 3, 4, 5, 6 and 8 tokens went on in 56, 68, 71, 79, 82
// and 79 of 100 cases.
double continues_run(int64_t run) { return (double(run) + 1.0 / 3) / (double(run) + 2); }

void choose_length(const ChooseLength& args, Worker worker) {
  if (worker.index != 0) return;
  int64_t best = args.choices - 1;
  double best_rate = 0;
  // Of a drafter that gives no numbers all tokens are verified, so that settling sees it.
  const bool is_known = are_finite(args);
  const double draft_cost = !args.wants_draft || args.wants_draft[0] ? args.draft_cost[0] : 0;
  for (int64_t choice = 0; is_known && choice < args.choices; choice++) {
    double tokens = 0, positions = 0;
    for (int64_t i = 0; i < args.sequences; i++) {
      if (!args.num_blocks[i]) continue;
      tokens += 1 + expected_tokens(args, i, args.lengths[choice]);
      positions += double(args.positions[i]);
    }
    const double cost = draft_cost + args.costs[choice] + positions * args.growth[choice];
    if (const double rate = tokens / cost; rate > best_rate) best = choice, best_rate = rate;
  }
  args.chosen[0] = best;
}

}  // namespace sparkgap
