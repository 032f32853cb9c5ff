// The operations that only drafters use, and memory for captures.
#include <memory>
#include <stdexcept>

#include "executor.h"

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
