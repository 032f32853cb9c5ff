// Drawing tokens from logits by counter-based random numbers.
#pragma once
#include <cstdint>

#include "call.h"
#include "kernels/kernels.h"

namespace sparkgap {

// One token of each row: of the distribution after temperature, min_p, top_k and top_p, by the random number of the
// sequence's seed and the position that the token will occupy. Row `r` belongs to sequence `r / width`.
struct DrawTokens {
  const float* logits;
  int64_t stride, rows, vocab_size, width;
  const float* temperatures;  // [sequences]; 0 takes the largest logit
  const float* log_min_p;     // least scaled logit that stays, the largest being 0; -inf keeps all
  const int64_t* top_k;       // 0 keeps all
  const double* top_p;        // 1 keeps all
  const int64_t* seeds;
  const int64_t* positions;  // of each sequence's first row; its token will be at the next
  int64_t* token_ids;        // [rows]
  float* scores;             // [rows], the largest logit; NaN if any is
  LargestLogit (*largest_logit)(const float*, int64_t);
  void (*weigh_logits)(const float*, int64_t, float, float, float, float*);
};

size_t draw_scratch_bytes(int64_t vocab_size);
void draw_tokens(const DrawTokens&, Worker);

// Uniform number in [0, 1) for sampling from the target, a multiple of 2^-53 (Philox 4x32-10).
double uniform_number(uint64_t seed, uint64_t position);

}  // namespace sparkgap
