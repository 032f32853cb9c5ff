// What chains rounds on the device: the bookkeeping between draft, verification and the next draft, as kernel calls.
// Each runs on one thread: they move a few numbers a sequence.
#pragma once
#include <cstdint>

#include "call.h"

namespace sparkgap {

// Where a round begins: from the state that the round before left, or from what the host staged.
struct BeginRound {
  const int32_t* sources;  // [sequences], row of the state; -1 takes the staged values
  const int64_t* staged_anchors;
  const int64_t* staged_positions;
  const int64_t* state_anchors;  // [state_rows]
  const int64_t* state_positions;
  int64_t state_rows, sequences;
  int64_t* anchors;  // [sequences]
  int64_t* positions;
};

// Draft tokens `[sequences, width - 1]`, or their scores, with a stride for each dimension.
template <class T>
struct Drafted {
  const T* data;
  int64_t row_stride, step_stride;

  T at(int64_t row, int64_t step) const { return data[row * row_stride + step * step_stride]; }
};

// Rows to verify: anchor and draft tokens from the live position on, at the slots that the block table says. Rows from
// `max_length` on stand at the last position before it and write nothing, as do the rows of a sequence without blocks.
struct VerifyRows {
  const int64_t* anchors;  // [sequences]
  const int64_t* positions;
  Drafted<int64_t> drafts;
  const int32_t* block_tables;  // [sequences, max_blocks]
  const int32_t* num_blocks;    // [sequences], entries of the table that hold; 0 for a sequence that only pads
  int64_t max_blocks, block_size, max_length, sequences, width;
  int64_t* token_ids;  // [sequences * width]
  int64_t* row_positions;
  int64_t* slots;
};

// Rows of passes that draft one token each, a row of each sequence: at the last position of its context, then one further
// each time. The first row's entry is in the context; those of the others are written. Rows beyond the last position
// stand there and write nothing, as do the rows of a sequence without context, which only pads.
struct StepRows {
  const int64_t* context_lengths;  // [sequences]
  const int32_t* block_tables;     // [sequences, max_blocks]
  int64_t max_blocks, block_size, max_length, sequences, steps;
  int64_t* sources;    // [sequences], slot of the last position of the context; 0 where a row only pads
  int64_t* positions;  // [steps, sequences]
  int64_t* slots;      // [steps, sequences]
};

// How a sequence's round ended, in its row of the results.
enum class RoundStatus : int64_t { kGood = 0, kTargetNotFinite = 1, kDrafterNotFinite = 2 };

// Accepts draft tokens as long as they are the target's picks. The last pick that counts is the new anchor.
struct SettleRound {
  const int64_t* picks;  // [sequences * width]
  const float* scores;   // the logit of each pick
  Drafted<int64_t> drafts;
  Drafted<float> draft_scores;
  // [sequences], 0 where draft tokens are the drafter's: others have no scores. Null: all are. Where there are no scores at
  // all, sequences with 0 have no draft tokens.
  const int32_t* runs;
  const int64_t* positions;      // [sequences], of the anchors
  const int64_t* row_positions;  // [sequences * width]
  const int64_t* slots;
  int64_t context_length;  // positions from here on have no context
  int64_t sequences, width;
  int64_t* context_positions;  // [sequences * width]; null without a drafter
  int64_t* context_slots;      // -1 for rejected rows
  int64_t* next_anchors;       // [sequences]
  int64_t* next_positions;
  int64_t* results;  // [sequences, width + 2]: accepted draft tokens, RoundStatus, picks
};

// Publishes a round's end as the state that the next one begins from.
struct HandOff {
  const int64_t* next_anchors;  // [sequences]
  const int64_t* next_positions;
  int64_t sequences;
  int64_t* state_anchors;
  int64_t* state_positions;
};

void begin_round(const BeginRound&, Worker);
void verify_rows(const VerifyRows&, Worker);
void step_rows(const StepRows&, Worker);
void settle_round(const SettleRound&, Worker);
void hand_off(const HandOff&, Worker);

}  // namespace sparkgap
