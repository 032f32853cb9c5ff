// The operations that only drafters use, and memory for captures.
#include <memory>
#include <stdexcept>
#include <vector>

#include "executor.h"
#include "operands.h"

namespace nb = nanobind;

namespace sparkgap {

namespace {

// Float32 or bfloat16 [rows, features].
Matrix matrix_of(const Tensor& tensor, const char* operand, int64_t rows, int64_t features) {
  const Matrix matrix = as_matrix(tensor, operand);
  require(tensor.size(0) == rows && tensor.size(1) == features, operand,
          ("[" + std::to_string(rows) + ", " + std::to_string(features) + "]").c_str(), tensor);
  return matrix;
}

Matrix float_matrix_of(const Tensor& tensor, const char* operand, int64_t rows, int64_t features) {
  require(tensor.type == Tensor::Type::kFloat32, operand, "float32", tensor);
  return matrix_of(tensor, operand, rows, features);
}

float* float_vector(const Tensor& tensor, const char* operand, int64_t size) {
  as_floats(tensor, operand);
  require(tensor.dims == 1 && tensor.size(0) == size, operand, ("[" + std::to_string(size) + "]").c_str(), tensor);
  return static_cast<float*>(tensor.data);
}

void require_same_type(const Tensor& tensor, const Tensor& like, const char* operand) {
  require(tensor.type == like.type, operand, "of the other operands' dtype", tensor);
}

}  // namespace

void Executor::draft_blocks(const Tensor& anchors, const Tensor& context_lengths, int64_t block_rows, int64_t mask_token_id,
                            const Tensor& token_ids, const Tensor& positions) {
  require(anchors.dims == 1, "anchors", "int64 [sequences]", anchors);
  if (block_rows < 1) throw std::invalid_argument("block_rows must be at least 1, got " + std::to_string(block_rows));
  const int64_t sequences = anchors.size(0), rows = sequences * block_rows;
  as_int64(token_ids, "token_ids", rows), as_int64(positions, "positions", rows);
  const Call call = make_call(
      kernels_.fill_draft_blocks,
      DraftBlocks{as_int64(anchors, "anchors", sequences), as_int64(context_lengths, "context_lengths", sequences), sequences,
                  block_rows, mask_token_id, static_cast<int64_t*>(token_ids.data), static_cast<int64_t*>(positions.data)});
  submit({&call, 1}, {&anchors, &context_lengths, &token_ids, &positions});
}

void Executor::zero(const Tensor& out) {
  const Matrix result = as_matrix(out, "out");
  const Call call = make_call(kernels_.zero_rows, ZeroRows{result, out.size(0), out.size(1)});
  submit({&call, 1}, {&out});
}

void Executor::gated_head(const Tensor& projected, const Tensor& embedded, const Tensor& latent) {
  const Matrix in = as_matrix(projected, "projected");
  const int64_t rows = projected.size(0), rank = projected.size(1);
  require_same_type(embedded, projected, "embedded"), require_same_type(latent, projected, "latent");
  const Call call = make_call(kernels_.head_gate, HeadGate{false, in, matrix_of(embedded, "embedded", rows, rank), {}, {},
                                                           matrix_of(latent, "latent", rows, rank), rows, rank});
  submit({&call, 1}, {&projected, &embedded, &latent});
}

void Executor::recurrent_head(const Tensor& projected, const Tensor& state, const Tensor& latent, const Tensor& next_state) {
  const Matrix in = as_matrix(projected, "projected"), out = as_matrix(latent, "latent");
  const int64_t rows = latent.size(0), rank = latent.size(1);
  matrix_of(projected, "projected", rows, 3 * rank);
  for (const auto& [tensor, name] : {std::pair{&state, "state"}, {&latent, "latent"}, {&next_state, "next_state"}})
    require_same_type(*tensor, projected, name);
  const Call call = make_call(kernels_.head_gate, HeadGate{true, in, {}, matrix_of(state, "state", rows, rank),
                                                           matrix_of(next_state, "next_state", rows, rank), out, rows, rank});
  submit({&call, 1}, {&projected, &state, &latent, &next_state});
}

void Executor::confidence(const Tensor& hidden, const std::optional<Tensor>& embedded, const Tensor& weight,
                          const Tensor& bias, const Tensor& out) {
  const Matrix in = as_matrix(hidden, "hidden");
  const int64_t rows = hidden.size(0), features = hidden.size(1);
  Matrix second{};
  int64_t rank = 0;
  if (embedded) {
    require_same_type(*embedded, hidden, "embedded");
    second = as_matrix(*embedded, "embedded");
    rank = embedded->size(1);
    matrix_of(*embedded, "embedded", rows, rank);
  }
  const Call call = make_call(kernels_.confidence,
                              Confidence{in, second, float_vector(weight, "weight", features + rank),
                                         float_vector(bias, "bias", 1), rows, features, rank, float_vector(out, "out", rows)});
  const Tensor* tensors[] = {&hidden, &weight, &bias, &out, embedded ? &*embedded : &hidden};
  submit({&call, 1}, tensors);
}

void Executor::add_logits(const Tensor& base, const Tensor& bias, const Tensor& out) {
  require(base.dims == 2, "base", "float32 [rows, features]", base);
  const int64_t rows = base.size(0), features = base.size(1);
  const Call call = make_call(kernels_.add_logits,
                              AddLogits{float_matrix_of(base, "base", rows, features), float_matrix_of(bias, "bias", rows, features),
                                        float_matrix_of(out, "out", rows, features), rows, features});
  submit({&call, 1}, {&base, &bias, &out});
}

void Executor::draft_pick(const Tensor& base, const std::optional<Tensor>& bias, const std::optional<Tensor>& target_ids,
                          const Tensor& token_ids, const Tensor& scores) {
  require(base.dims == 2 && base.size(1) > 0, "base", "float32 [rows, features] of at least one feature", base);
  const int64_t rows = base.size(0), features = base.size(1);
  as_int64(token_ids, "token_ids", rows);
  const Call call = make_call(
      kernels_.draft_pick,
      DraftPick{float_matrix_of(base, "base", rows, features),
                bias ? float_matrix_of(*bias, "bias", rows, features) : Matrix{},
                target_ids ? as_int64(*target_ids, "target_ids", features) : nullptr, rows, features,
                static_cast<int64_t*>(token_ids.data), float_vector(scores, "scores", rows)});
  const Tensor* tensors[] = {&base, &token_ids, &scores, bias ? &*bias : &base, target_ids ? &*target_ids : &base};
  submit({&call, 1}, tensors);
}

void Executor::markov_chain(const Tensor& base, const Tensor& hidden, const Tensor& anchors, int64_t lead_rows,
                            const Tensor& table, std::shared_ptr<const PackedWeight> weight,
                            const std::optional<Tensor>& target_ids, const std::optional<Tensor>& confidence_weights,
                            const std::optional<Tensor>& confidence_biases, const Tensor& token_ids, const Tensor& scores,
                            const std::optional<Tensor>& confidences) {
  require(base.type == Tensor::Type::kFloat32 && base.dims == 3 && base.contiguous_from(0), "base",
          "contiguous float32 [sequences, block_rows, draft_vocab]", base);
  const int64_t sequences = base.size(0), block_rows = base.size(1), vocab = base.size(2), steps = block_rows - lead_rows;
  if (lead_rows < 0 || steps < 1) throw std::invalid_argument("lead_rows must leave at least one row of each block");
  require(vocab > 0, "base", "of at least one draft token", base);
  require(hidden.is_float() && hidden.dims == 3 && hidden.contiguous_from(0) && hidden.size(0) == sequences &&
              hidden.size(1) == block_rows,
          "hidden", "contiguous float32 or bfloat16 [sequences, block_rows, features]", hidden);
  const Matrix w1 = as_matrix(table, "table");
  const int64_t rank = table.size(1), features = hidden.size(2);
  if (weight->in_features != rank || weight->out_features != vocab)
    throw std::invalid_argument("the weight must be [draft_vocab, rank]");
  const auto filled = [&](const Tensor& tensor, Tensor::Type type, const char* operand) {
    require(tensor.type == type && tensor.dims == 2 && tensor.contiguous_from(0) && tensor.size(0) == steps &&
                tensor.size(1) == sequences,
            operand, "contiguous [steps, sequences], token ids int64 and all else float32", tensor);
    return tensor.data;
  };
  auto* tokens = static_cast<int64_t*>(filled(token_ids, Tensor::Type::kInt64, "token_ids"));
  auto* values = static_cast<float*>(filled(scores, Tensor::Type::kFloat32, "scores"));
  const int64_t* first = as_int64(anchors, "anchors", sequences);
  const int64_t* ids = target_ids ? as_int64(*target_ids, "target_ids", vocab) : nullptr;
  MarkovEnd end{nullptr, threads_, ids, sequences, steps, first, tokens, values, {}, {}, table.size(0), nullptr, nullptr, 0, 0, features, rank,
                nullptr};
  if (confidences) {
    if (!confidence_weights || !confidence_biases) throw std::invalid_argument("confidences need weights and biases");
    const auto places = [&](const Tensor& tensor, const char* operand, const char* must_be) {
      require(tensor.type == Tensor::Type::kFloat32 && tensor.dims == 2 && tensor.contiguous_from(0) &&
                  (tensor.size(0) == 1 || tensor.size(0) >= steps),
              operand, must_be, tensor);
      return static_cast<const float*>(tensor.data);
    };
    end.weights = places(*confidence_weights, "confidence_weights", "contiguous float32 [1 or steps, features (+ rank)]");
    end.biases = places(*confidence_biases, "confidence_biases", "contiguous float32 [1 or steps, 1]");
    const int64_t width = confidence_weights->size(1);
    require(width == features || width == features + rank, "confidence_weights", "[places, features (+ rank)]", *confidence_weights);
    require(confidence_biases->size(1) == 1, "confidence_biases", "[places, 1]", *confidence_biases);
    end.weight_stride = confidence_weights->size(0) == 1 ? 0 : width;
    end.bias_stride = confidence_biases->size(0) == 1 ? 0 : 1;
    if (width > features) end.table = w1;
    end.hidden = {static_cast<std::byte*>(hidden.data) + lead_rows * features * (hidden.type == Tensor::Type::kFloat32 ? 4 : 2),
                  block_rows * features, features, hidden.dtype()};
    end.confidences = static_cast<float*>(filled(*confidences, Tensor::Type::kFloat32, "confidences"));
  }
  if (sequences == 0) return;
  const bool is_int8 = weight->form == PackedWeight::Form::kInt8;
  const DType packed_dtype = weight->form == PackedWeight::Form::kBFloat16 ? DType::kBFloat16 : DType::kFloat32;
  const size_t scratch = kernels_.markov_scratch_bytes(sequences, rank);
  const auto lock = lock_without_gil(mutex_);
  // What the threads found in a step is read in the next, while they leave there what they find then.
  const int64_t places = threads_ * sequences;
  auto* found = reinterpret_cast<PartialPick*>(workspace(size_t(2 * places) * sizeof(PartialPick)));
  std::vector<Call> calls;
  for (int64_t step = 0; step < steps; step++) {
    const PartialPick* before = found + (step + 1) % 2 * places;
    const int64_t last = (step - 1) * sequences;
    calls.push_back(make_call(
        kernels_.markov_step,
        MarkovStep{{static_cast<float*>(base.data) + (lead_rows + step) * vocab, block_rows * vocab, 0, DType::kFloat32},
                   w1,
                   table.size(0),
                   weight->packed.get(),
                   packed_dtype,
                   weight->input_scale,
                   is_int8 ? reinterpret_cast<const float*>(weight->scales.get()) : nullptr,
                   is_int8 ? reinterpret_cast<const int32_t*>(weight->offsets.get()) : nullptr,
                   reinterpret_cast<const float*>(weight->bias.get()),
                   sequences,
                   rank,
                   vocab,
                   threads_,
                   step ? nullptr : first,
                   before,
                   found + step % 2 * places,
                   ids,
                   step ? tokens + last : nullptr,
                   step ? values + last : nullptr},
        scratch));
    end.before = found + step % 2 * places;
  }
  calls.push_back(make_call(kernels_.markov_end, end));
  const Tensor* tensors[] = {&base,
                             &hidden,
                             &anchors,
                             &table,
                             &token_ids,
                             &scores,
                             target_ids ? &*target_ids : &base,
                             confidence_weights ? &*confidence_weights : &base,
                             confidence_biases ? &*confidence_biases : &base,
                             confidences ? &*confidences : &base};
  submit(calls, tensors, weight);
}

Result Executor::empty(const std::vector<int64_t>& shape, const std::string& dtype) {
  using Code = nb::dlpack::dtype_code;
  if (!recording_) throw std::logic_error("no capture is under way");
  nb::dlpack::dtype type{};
  if (dtype == "float32") type = {uint8_t(Code::Float), 32, 1};
  else if (dtype == "bfloat16") type = {uint8_t(Code::Bfloat), 16, 1};
  else if (dtype == "int64") type = {uint8_t(Code::Int), 64, 1};
  else throw std::invalid_argument("dtype must be float32, bfloat16 or int64, got " + dtype);
  size_t bytes = type.bits / 8;
  std::vector<size_t> sizes;
  for (const int64_t size : shape) {
    if (size < 0) throw std::invalid_argument("sizes must not be negative");
    sizes.push_back(size_t(size));
    bytes *= size_t(size);
  }
  struct Hold {
    std::shared_ptr<Arena> arena;
    std::byte* memory;
    ~Hold() { arena->release(memory); }
  };
  std::unique_ptr<Hold> hold(new Hold{recording_->arena_, recording_->arena_->allocate(bytes)});
  std::byte* memory = hold->memory;
  const nb::capsule owner(hold.release(), [](void* p) noexcept { delete static_cast<Hold*>(p); });
  return Result(memory, sizes.size(), sizes.data(), owner, nullptr, type);
}

Result alias(const std::shared_ptr<Arena>& arena, const Tensor& tensor) {
  if (!arena->contains(tensor.data)) throw std::invalid_argument("the tensor does not lie in this arena");
  using Code = nb::dlpack::dtype_code;
  const auto type = [&]() -> nb::dlpack::dtype {
    switch (tensor.type) {
      case Tensor::Type::kFloat32: return {uint8_t(Code::Float), 32, 1};
      case Tensor::Type::kBFloat16: return {uint8_t(Code::Bfloat), 16, 1};
      default: require(tensor.type == Tensor::Type::kInt64, "tensor", "float32, bfloat16 or int64", tensor);
               return {uint8_t(Code::Int), 64, 1};
    }
  }();
  std::vector<size_t> sizes(tensor.shape, tensor.shape + tensor.dims);
  const nb::capsule owner(new std::shared_ptr<Arena>(arena),
                          [](void* p) noexcept { delete static_cast<std::shared_ptr<Arena>*>(p); });
  return Result(tensor.data, sizes.size(), sizes.data(), owner, tensor.strides, type);
}

}  // namespace sparkgap
