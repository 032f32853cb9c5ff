// The operations that chain rounds.
#include <stdexcept>

#include "executor.h"
#include "lookup.h"
#include "rounds.h"
#include "sampling.h"
#include "scheduling.h"

namespace sparkgap {

namespace {

int64_t* int64_out(const Tensor& tensor, const char* operand, int64_t n) {
  return const_cast<int64_t*>(as_int64(tensor, operand, n));
}

const int32_t* int32_vector(const Tensor& tensor, const char* operand, int64_t n) {
  as_int32(tensor, operand);
  require(tensor.dims == 1 && tensor.size(0) == n, operand, "int32, one entry a sequence", tensor);
  return static_cast<const int32_t*>(tensor.data);
}

template <class T>
Drafted<T> drafted(const std::optional<Tensor>& tensor, Tensor::Type type, const char* operand, int64_t sequences,
                   int64_t width) {
  if (width == 1) return {};
  if (!tensor) throw std::invalid_argument(std::string(operand) + " must be given for more than one row a sequence");
  require(tensor->type == type && tensor->dims == 2 && tensor->size(0) == sequences && tensor->size(1) == width - 1, operand,
          "int64 (scores: float32) [sequences, rows of each - 1]", *tensor);
  return {static_cast<const T*>(tensor->data), tensor->stride(0), tensor->stride(1)};
}

int64_t rows_each(const Tensor& rows, const char* operand, int64_t sequences) {
  require(rows.dims == 1 && sequences > 0 && rows.size(0) > 0 && rows.size(0) % sequences == 0, operand,
          "int64 [sequences * rows of each]", rows);
  return rows.size(0) / sequences;
}

// Those that are chosen among what was looked up and what was proposed.
int64_t* drafts_out(const Tensor& drafts, int64_t sequences) {
  require(drafts.type == Tensor::Type::kInt64 && drafts.dims == 2 && drafts.contiguous_from(0) &&
              drafts.size(0) == sequences && drafts.size(1) > 0,
          "drafts", "contiguous int64 [sequences, draft tokens]", drafts);
  return static_cast<int64_t*>(drafts.data);
}

Texts texts_of(const Tensor& texts, const Tensor& text_rows, int64_t sequences) {
  as_int32(texts, "texts");
  require(texts.dims == 2, "texts", "int32 [rows, capacity]", texts);
  return {static_cast<int32_t*>(texts.data), int32_vector(text_rows, "text_rows", sequences), texts.size(0), texts.size(1)};
}

}  // namespace

void Executor::draw_tokens(const Tensor& logits, const Tensor& temperatures, const Tensor& log_min_p, const Tensor& top_k,
                           const Tensor& top_p, const Tensor& seeds, const Tensor& positions, const Tensor& token_ids,
                           const Tensor& scores) {
  require(logits.type == Tensor::Type::kFloat32, "logits", "float32 [rows, vocab]", logits);
  const Matrix matrix = as_matrix(logits, "logits");
  require(logits.size(1) > 0, "logits", "of at least one token", logits);
  require(positions.dims == 1, "positions", "int64 [sequences]", positions);
  const int64_t rows = logits.size(0), n = positions.size(0), width = rows_each(token_ids, "token_ids", n);
  const auto numbers = [n](const Tensor& tensor, Tensor::Type type, const char* operand, const char* must_be) {
    require(tensor.type == type && tensor.dims == 1 && tensor.contiguous_from(0) && tensor.size(0) == n, operand, must_be, tensor);
    return tensor.data;
  };
  as_floats(scores, "scores");
  require(scores.dims == 1 && scores.size(0) == rows, "scores", "float32, one entry a row", scores);
  using Type = Tensor::Type;
  const Call call = make_call<DrawTokens>(
      sparkgap::draw_tokens,
      {static_cast<const float*>(matrix.data), matrix.stride, rows, logits.size(1), width,
       static_cast<const float*>(numbers(temperatures, Type::kFloat32, "temperatures", "float32 [sequences]")),
       static_cast<const float*>(numbers(log_min_p, Type::kFloat32, "log_min_p", "float32 [sequences]")),
       as_int64(top_k, "top_k", n),
       static_cast<const double*>(numbers(top_p, Type::kFloat64, "top_p", "float64 [sequences]")), as_int64(seeds, "seeds", n),
       as_int64(positions, "positions", n), int64_out(token_ids, "token_ids", rows), static_cast<float*>(scores.data),
       kernels_.largest_logit, kernels_.weigh_logits},
      draw_scratch_bytes(logits.size(1)));
  submit({&call, 1},
         {&logits, &temperatures, &log_min_p, &top_k, &top_p, &seeds, &positions, &token_ids, &scores});
}

void Executor::begin_round(const Tensor& sources, const Tensor& staged_anchors, const Tensor& staged_positions,
                           const Tensor& state_anchors, const Tensor& state_positions, const Tensor& anchors,
                           const Tensor& positions) {
  require(anchors.dims == 1, "anchors", "int64 [sequences]", anchors);
  require(state_anchors.dims == 1, "state_anchors", "int64 [rows]", state_anchors);
  const int64_t n = anchors.size(0), rows = state_anchors.size(0);
  const Call call = make_call<BeginRound>(
      sparkgap::begin_round,
      {int32_vector(sources, "sources", n), as_int64(staged_anchors, "staged_anchors", n),
       as_int64(staged_positions, "staged_positions", n), as_int64(state_anchors, "state_anchors", rows),
       as_int64(state_positions, "state_positions", rows), rows, n, int64_out(anchors, "anchors", n),
       int64_out(positions, "positions", n)});
  submit({&call, 1}, {&sources, &staged_anchors, &staged_positions, &state_anchors, &state_positions, &anchors, &positions});
}

void Executor::verify_rows(const Tensor& anchors, const Tensor& positions, const std::optional<Tensor>& draft_ids,
                           const Tensor& block_tables, const Tensor& num_blocks, int64_t block_size, int64_t max_length,
                           const Tensor& token_ids, const Tensor& row_positions, const Tensor& slots) {
  require(anchors.dims == 1, "anchors", "int64 [sequences]", anchors);
  const int64_t n = anchors.size(0), width = rows_each(token_ids, "token_ids", n), rows = n * width;
  as_int32(block_tables, "block_tables");
  require(block_tables.dims == 2 && block_tables.size(0) == n, "block_tables", "int32 [sequences, max_blocks]", block_tables);
  if (block_size < 1 || max_length < 1) throw std::invalid_argument("block_size and max_length must be at least 1");
  const Call call = make_call<VerifyRows>(
      sparkgap::verify_rows,
      {as_int64(anchors, "anchors", n), as_int64(positions, "positions", n),
       drafted<int64_t>(draft_ids, Tensor::Type::kInt64, "draft_ids", n, width),
       static_cast<const int32_t*>(block_tables.data), int32_vector(num_blocks, "num_blocks", n), block_tables.size(1),
       block_size, max_length, n, width, int64_out(token_ids, "token_ids", rows),
       int64_out(row_positions, "row_positions", rows), int64_out(slots, "slots", rows)});
  const Tensor* tensors[] = {&anchors,   &positions,     &block_tables, &num_blocks,
                             &token_ids, &row_positions, &slots,        draft_ids ? &*draft_ids : &anchors};
  submit({&call, 1}, tensors);
}

void Executor::step_rows(const Tensor& context_lengths, const Tensor& block_tables, int64_t block_size, int64_t max_length,
                         const Tensor& sources, const Tensor& positions, const Tensor& slots) {
  require(context_lengths.dims == 1, "context_lengths", "int64 [sequences]", context_lengths);
  const int64_t n = context_lengths.size(0);
  as_int32(block_tables, "block_tables");
  require(block_tables.dims == 2 && block_tables.size(0) == n && block_tables.size(1) > 0, "block_tables",
          "int32 [sequences, max_blocks]", block_tables);
  if (block_size < 1 || max_length < 1) throw std::invalid_argument("block_size and max_length must be at least 1");
  const auto filled = [&](const Tensor& tensor, const char* operand) {
    require(tensor.type == Tensor::Type::kInt64 && tensor.dims == 2 && tensor.contiguous_from(0) && tensor.size(1) == n &&
                tensor.size(0) == positions.size(0),
            operand, "contiguous int64 [steps, sequences]", tensor);
    return static_cast<int64_t*>(tensor.data);
  };
  int64_t *places = filled(positions, "positions"), *slot_rows = filled(slots, "slots");
  const Call call = make_call<StepRows>(
      sparkgap::step_rows,
      {as_int64(context_lengths, "context_lengths", n), static_cast<const int32_t*>(block_tables.data), block_tables.size(1),
       block_size, max_length, n, positions.size(0), int64_out(sources, "sources", n), places, slot_rows});
  submit({&call, 1}, {&context_lengths, &block_tables, &sources, &positions, &slots});
}

void Executor::settle_round(const Tensor& picks, const Tensor& scores, const std::optional<Tensor>& draft_ids,
                            const std::optional<Tensor>& draft_scores, const std::optional<Tensor>& runs,
                            const Tensor& positions, const Tensor& row_positions, const Tensor& slots,
                            int64_t context_length, const std::optional<Tensor>& context_positions,
                            const std::optional<Tensor>& context_slots, const Tensor& next_anchors,
                            const Tensor& next_positions, const Tensor& results) {
  require(positions.dims == 1, "positions", "int64 [sequences]", positions);
  const int64_t n = positions.size(0), width = rows_each(picks, "picks", n), rows = n * width;
  as_floats(scores, "scores");
  require(scores.dims == 1 && scores.size(0) == rows, "scores", "float32, one entry a row", scores);
  require(results.type == Tensor::Type::kInt64 && results.dims == 2 && results.contiguous_from(0) && results.size(0) == n &&
              results.size(1) == width + 2,
          "results", "contiguous int64 [sequences, rows of each + 2]", results);
  if (context_positions.has_value() != context_slots.has_value())
    throw std::invalid_argument("context_positions and context_slots go together");
  const Call call = make_call<SettleRound>(
      sparkgap::settle_round,
      {as_int64(picks, "picks", rows), static_cast<const float*>(scores.data),
       drafted<int64_t>(draft_ids, Tensor::Type::kInt64, "draft_ids", n, width),
       runs && !draft_scores ? Drafted<float>{}
                             : drafted<float>(draft_scores, Tensor::Type::kFloat32, "draft_scores", n, width),
       runs ? int32_vector(*runs, "runs", n) : nullptr, as_int64(positions, "positions", n),
       as_int64(row_positions, "row_positions", rows), as_int64(slots, "slots", rows), context_length, n, width,
       context_positions ? int64_out(*context_positions, "context_positions", rows) : nullptr,
       context_slots ? int64_out(*context_slots, "context_slots", rows) : nullptr,
       int64_out(next_anchors, "next_anchors", n), int64_out(next_positions, "next_positions", n),
       static_cast<int64_t*>(results.data)});
  const Tensor* tensors[] = {&picks,          &scores,
                             &positions,      &row_positions,
                             &slots,          &next_anchors,
                             &next_positions, &results,
                             draft_ids ? &*draft_ids : &picks,
                             draft_scores ? &*draft_scores : &picks,
                             runs ? &*runs : &picks,
                             context_positions ? &*context_positions : &picks,
                             context_slots ? &*context_slots : &picks};
  submit({&call, 1}, tensors);
}

void Executor::look_up(const Tensor& texts, const Tensor& text_rows, const Tensor& positions, int64_t shortest,
                       int64_t longest, const Tensor& drafts, const Tensor& runs, const Tensor& wants_draft) {
  require(positions.dims == 1, "positions", "int64 [sequences]", positions);
  const int64_t n = positions.size(0);
  if (shortest < 1 || longest < shortest) throw std::invalid_argument("lengths must be 1 <= shortest <= longest");
  const Call call = make_call<LookUp>(
      sparkgap::look_up,
      {texts_of(texts, text_rows, n), as_int64(positions, "positions", n), shortest, longest, n, drafts.size(1),
       drafts_out(drafts, n), const_cast<int32_t*>(int32_vector(runs, "runs", n)), int64_out(wants_draft, "wants_draft", 1)});
  submit({&call, 1}, {&texts, &text_rows, &positions, &drafts, &runs, &wants_draft});
}

void Executor::fill_drafts(const Tensor& proposed, const Tensor& runs, const Tensor& drafts) {
  require(runs.dims == 1, "runs", "int32 [sequences]", runs);
  const int64_t n = runs.size(0);
  int64_t* const out = drafts_out(drafts, n);
  const int64_t count = drafts.size(1);
  const Call call = make_call<FillDrafts>(
      sparkgap::fill_drafts, {drafted<int64_t>(proposed, Tensor::Type::kInt64, "proposed", n, count + 1),
                              int32_vector(runs, "runs", n), n, count, out});
  submit({&call, 1}, {&proposed, &runs, &drafts});
}

void Executor::choose_length(const Tensor& confidences, const std::optional<Tensor>& runs, const Tensor& num_blocks,
                             const Tensor& positions, const Tensor& lengths, const Tensor& costs, const Tensor& growth,
                             const Tensor& draft_cost, const std::optional<Tensor>& wants_draft, const Tensor& chosen) {
  require(confidences.dims == 2 && confidences.size(1) > 0, "confidences", "float32 [sequences, draft tokens]", confidences);
  const int64_t n = confidences.size(0), count = confidences.size(1);
  require(lengths.dims == 1 && lengths.size(0) > 0, "lengths", "int64 [choices]", lengths);
  const int64_t choices = lengths.size(0), *numbers = as_int64(lengths, "lengths", choices);
  for (int64_t i = 0; i < choices; i++)
    require(numbers[i] >= (i ? numbers[i - 1] : 0) && numbers[i] <= count, "lengths",
            "numbers of draft tokens that there are, rising", lengths);
  const auto numbers_of = [](const Tensor& tensor, const char* operand, int64_t count) {
    require(tensor.type == Tensor::Type::kFloat64 && tensor.dims == 1 && tensor.contiguous_from(0) && tensor.size(0) == count,
            operand, "contiguous float64, one entry a choice (draft_cost: 1)", tensor);
    return static_cast<const double*>(tensor.data);
  };
  const Call call = make_call<ChooseLength>(
      sparkgap::choose_length,
      {drafted<float>(confidences, Tensor::Type::kFloat32, "confidences", n, count + 1),
       runs ? int32_vector(*runs, "runs", n) : nullptr, int32_vector(num_blocks, "num_blocks", n),
       as_int64(positions, "positions", n), numbers, numbers_of(costs, "costs", choices),
       numbers_of(growth, "growth", choices), numbers_of(draft_cost, "draft_cost", 1),
       wants_draft ? as_int64(*wants_draft, "wants_draft", 1) : nullptr, n, choices, int64_out(chosen, "chosen", 1)});
  submit({&call, 1}, {&confidences, runs ? &*runs : &num_blocks, &num_blocks, &positions, &lengths, &costs, &growth, &draft_cost,
                      wants_draft ? &*wants_draft : &chosen, &chosen});
}

void Executor::remember(const Tensor& texts, const Tensor& text_rows, const Tensor& positions, const Tensor& results) {
  require(positions.dims == 1, "positions", "int64 [sequences]", positions);
  const int64_t n = positions.size(0);
  require(results.type == Tensor::Type::kInt64 && results.dims == 2 && results.contiguous_from(0) && results.size(0) == n &&
              results.size(1) > 2,
          "results", "contiguous int64 [sequences, rows of each + 2]", results);
  const Call call = make_call<Remember>(sparkgap::remember,
                                        {texts_of(texts, text_rows, n), as_int64(positions, "positions", n),
                                         static_cast<const int64_t*>(results.data), n, results.size(1) - 2});
  submit({&call, 1}, {&texts, &text_rows, &positions, &results});
}

void Executor::hand_off(const Tensor& next_anchors, const Tensor& next_positions, const Tensor& state_anchors,
                        const Tensor& state_positions) {
  require(next_anchors.dims == 1, "next_anchors", "int64 [sequences]", next_anchors);
  const int64_t n = next_anchors.size(0), rows = state_anchors.dims == 1 ? state_anchors.size(0) : 0;
  require(rows >= n, "state_anchors", "int64, at least one entry a sequence", state_anchors);
  const Call call = make_call<HandOff>(
      sparkgap::hand_off,
      {as_int64(next_anchors, "next_anchors", n), as_int64(next_positions, "next_positions", n), n,
       int64_out(state_anchors, "state_anchors", rows), int64_out(state_positions, "state_positions", rows)});
  submit({&call, 1}, {&next_anchors, &next_positions, &state_anchors, &state_positions});
}

}  // namespace sparkgap
