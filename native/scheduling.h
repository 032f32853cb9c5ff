// How many draft tokens of each sequence a round verifies: as many as pay.
#pragma once
#include <cstdint>

#include "call.h"
#include "rounds.h"

namespace sparkgap {

// Chooses among numbers of draft tokens, the same for all sequences, the one with the most expected tokens for its cost
// (arXiv 2607.05147, Algorithm 1, for passes whose number of rows a sequence is one of a few). A draft token is expected
// to be accepted by the product of its confidence and those of the ones before it, and one that was looked up by the
// length of the run that it continues (`continues_run`). Of equals, the fewer tokens are taken; where a confidence is no
// number, the most.
struct ChooseLength {
  Drafted<float> confidences;  // [sequences, N], of drafts that were not looked up
  const int32_t* runs;         // [sequences], last tokens that stood before, 0 where nothing was looked up; may be null
  const int32_t* num_blocks;   // [sequences], 0 for a sequence that only pads
  const int64_t* positions;    // [sequences], of the anchors
  const int64_t* lengths;      // [choices], draft tokens, rising
  const double* costs;         // [choices], of a round with so many at position 0, without the draft
  const double* growth;        // [choices], by which each position of each sequence adds to them
  const double* draft_cost;    // [1]
  const int64_t* wants_draft;  // [1], 0 in a round without draft; null: there is one
  int64_t sequences, choices;
  int64_t* chosen;  // [1], index of the choice
};

// The probability that a text whose last `run` tokens stood before goes on as it did there.
double continues_run(int64_t run);

void choose_length(const ChooseLength&, Worker);

}  // namespace sparkgap
