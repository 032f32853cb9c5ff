// Drafts that are looked up in a sequence's own text, on the device: each sequence has a row of tokens, by position.
#pragma once
#include <cstdint>

#include "call.h"
#include "rounds.h"

namespace sparkgap {

// The rows of tokens. A sequence whose row is -1 only pads.
struct Texts {
  int32_t* tokens;      // [rows, capacity]
  const int32_t* rows;  // [sequences]
  int64_t num_rows, capacity;

  // The row of a sequence; null where it pads, and a fault where there is no such row.
  int32_t* of(int64_t sequence, Worker worker) const;
};

// What followed the last tokens, up to the anchor, at their latest earlier place: of `longest` tokens if they stood there,
// else of one less, down to `shortest`. Where none did, the draft tokens are left as they are. A text that ends too early
// goes on as if it repeated itself from there.
struct LookUp {
  static constexpr int64_t kLongestRun = 64;

  Texts texts;
  const int64_t* positions;  // [sequences], of the anchors
  int64_t shortest, longest, sequences, count;
  int64_t* drafts;       // [sequences, count]
  int32_t* runs;         // [sequences], last tokens that stood there, counted up to kLongestRun; 0 where nothing did
  int64_t* wants_draft;  // [1], 0 where every sequence has found something, those that only pad apart; else 1
};

// Takes the proposed draft tokens of the sequences for which nothing was found.
struct FillDrafts {
  Drafted<int64_t> proposed;
  const int32_t* runs;  // [sequences]
  int64_t sequences, count;
  int64_t* drafts;  // [sequences, count]
};

// Writes a round's tokens behind the anchors; what lies beyond the capacity is left out. More accepted tokens than a round
// has are a fault.
struct Remember {
  Texts texts;
  const int64_t* positions;  // [sequences], of the anchors
  const int64_t* results;    // [sequences, width + 2], see SettleRound
  int64_t sequences, width;
};

void look_up(const LookUp&, Worker);
void fill_drafts(const FillDrafts&, Worker);
void remember(const Remember&, Worker);

}  // namespace sparkgap
