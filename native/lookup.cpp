#include "lookup.h"

#include <algorithm>

namespace sparkgap {

namespace {

// Place of the last token of the earlier run that is repeated; -1 without one.
int64_t find_repeated(const int32_t* text, int64_t last, int64_t shortest, int64_t longest) {
  int64_t found = -1, found_length = shortest - 1;
  for (int64_t end = last - 1; end >= shortest - 1 && found_length < longest; end--) {
    const int64_t most = std::min(longest, end + 1);
    int64_t length = 0;
    while (length < most && text[end - length] == text[last - length]) length++;
    if (length > found_length) found = end, found_length = length;
  }
  return found;
}

// Tokens up to `last` that are those up to `end`.
int64_t length_of_run(const int32_t* text, int64_t last, int64_t end) {
  int64_t length = 0;
  while (length <= end && length < LookUp::kLongestRun && text[end - length] == text[last - length]) length++;
  return length;
}

}  // namespace

int32_t* Texts::of(int64_t sequence, Worker worker) const {
  const int64_t row = rows[sequence];
  if (row >= 0 && row < num_rows) return tokens + row * capacity;
  if (row != -1) worker.report(kSourceOutOfRange);
  return nullptr;
}

void look_up(const LookUp& args, Worker worker) {
  if (worker.index != 0) return;
  bool has_found = false, has_missed = false;
  for (int64_t i = 0; i < args.sequences; i++) {
    int64_t* drafts = args.drafts + i * args.count;
    const int32_t* text = args.texts.of(i, worker);
    const int64_t last = args.positions[i];
    const bool known = text && last >= 0 && last < args.texts.capacity;
    const int64_t end = known ? find_repeated(text, last, args.shortest, args.longest) : -1;
    args.runs[i] = end < 0 ? 0 : int32_t(length_of_run(text, last, end));
    (end < 0 ? has_missed : has_found) |= text != nullptr;
    for (int64_t step = 0; end >= 0 && step < args.count; step++) {
      const int64_t place = end + 1 + step;
      drafts[step] = place <= last ? text[place] : drafts[place - last - 1];
    }
  }
  args.wants_draft[0] = has_missed || !has_found;
}

void fill_drafts(const FillDrafts& args, Worker worker) {
  if (worker.index != 0) return;
  for (int64_t i = 0; i < args.sequences; i++)
    for (int64_t step = 0; args.runs[i] == 0 && step < args.count; step++)
      args.drafts[i * args.count + step] = args.proposed.at(i, step);
}

void remember(const Remember& args, Worker worker) {
  if (worker.index != 0) return;
  for (int64_t i = 0; i < args.sequences; i++) {
    int32_t* text = args.texts.of(i, worker);
    if (!text) continue;
    const int64_t* result = args.results + i * (args.width + 2);
    if (result[0] < 0 || result[0] >= args.width) {
      worker.report(kSourceOutOfRange);
      continue;
    }
    for (int64_t k = 0; k <= result[0]; k++) {
      const int64_t place = args.positions[i] + 1 + k;
      if (place >= 0 && place < args.texts.capacity) text[place] = int32_t(result[2 + k]);
    }
  }
}

}  // namespace sparkgap
