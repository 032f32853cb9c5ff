// Operations that save a pass over memory, or a barrier, by doing several things to a row at once.
#include <stdexcept>

#include "executor.h"
#include "operands.h"

namespace sparkgap {

LinearInt8 Executor::int8_product(const PackedWeight& weight, int64_t rows, const Matrix& out) {
  const int64_t stride = (weight.in_features + kQuantizedAlignment - 1) / kQuantizedAlignment * kQuantizedAlignment;
  const size_t quantized_bytes = size_t(rows * stride);
  std::byte* memory = workspace(quantized_bytes + size_t(rows) * sizeof(float));
  return {reinterpret_cast<const uint8_t*>(memory),
          stride,
          reinterpret_cast<const float*>(memory + quantized_bytes),
          reinterpret_cast<const int8_t*>(weight.packed.get()),
          reinterpret_cast<const float*>(weight.scales.get()),
          reinterpret_cast<const int32_t*>(weight.offsets.get()),
          reinterpret_cast<const float*>(weight.bias.get()),
          out,
          rows,
          weight.in_features,
          weight.out_features};
}

QuantizedRows Executor::activations_of(const LinearInt8& product, const PackedWeight& weight) {
  return {const_cast<uint8_t*>(product.quantized), product.quantized_stride, const_cast<float*>(product.row_scales),
          weight.input_scale};
}

namespace {

Matrix product_out(const Tensor& out, const PackedWeight& weight, int64_t rows, const Tensor& like) {
  require(out.type == like.type && out.dims == 2 && out.size(0) == rows && out.size(1) == weight.out_features, "out",
          "[rows, the weight's out_features] of the input's dtype", out);
  return as_matrix(out, "out");
}

void require_int8(const PackedWeight& weight) {
  if (weight.form != PackedWeight::Form::kInt8) throw std::invalid_argument("the weight must be int8");
}

}  // namespace

void Executor::norm_linear(const Tensor& x, const std::optional<Tensor>& residual, const Tensor& norm, float eps,
                           std::shared_ptr<const PackedWeight> weight, const Tensor& out, const std::optional<Tensor>& sum) {
  require_int8(*weight);
  const Matrix in = as_matrix(x, "x");
  const int64_t rows = x.size(0), features = x.size(1);
  require(features == weight->in_features, "x", "[rows, the weight's in_features]", x);
  if (residual.has_value() != sum.has_value()) throw std::invalid_argument("residual and sum are given together or not at all");
  for (const auto& [tensor, name] : {std::pair{&residual, "residual"}, {&sum, "sum"}})
    if (*tensor) require(same_shape(x, **tensor) && x.type == (*tensor)->type, name, "of x's shape and dtype", **tensor);
  const Matrix result = product_out(out, *weight, rows, x);
  if (rows == 0) return;
  const auto lock = lock_without_gil(mutex_);
  const LinearInt8 product = int8_product(*weight, rows, result);
  const Call calls[] = {
      make_call(kernels_.norm_quantize,
                NormQuantize{in, residual ? as_matrix(*residual, "residual") : Matrix{}, sum ? as_matrix(*sum, "sum") : Matrix{},
                             as_vector(norm, "norm", features), rows, features, eps, activations_of(product, *weight)},
                aligned(size_t(features) * sizeof(float))),
      make_call(kernels_.linear_int8, product),
  };
  submit(calls, {&x, residual ? &*residual : &x, &norm, &out, sum ? &*sum : &x}, weight);
}

void Executor::silu_linear(const Tensor& gate_up, std::shared_ptr<const PackedWeight> weight, const Tensor& out) {
  require_int8(*weight);
  const Matrix in = as_matrix(gate_up, "gate_up");
  const int64_t rows = gate_up.size(0), features = weight->in_features;
  require(gate_up.size(1) == 2 * features, "gate_up", "[rows, twice the weight's in_features]", gate_up);
  const Matrix result = product_out(out, *weight, rows, gate_up);
  if (rows == 0) return;
  const auto lock = lock_without_gil(mutex_);
  const LinearInt8 product = int8_product(*weight, rows, result);
  const Call calls[] = {
      make_call(kernels_.silu_quantize, SiluQuantize{in, rows, features, activations_of(product, *weight)},
                aligned(size_t(features) * sizeof(float))),
      make_call(kernels_.linear_int8, product),
  };
  submit(calls, {&gate_up, &out}, weight);
}

void Executor::rotary_write(const Tensor& qkv, const std::optional<Tensor>& query_norm, const std::optional<Tensor>& key_norm,
                            float eps, const Tensor& positions, const Tensor& cos, const Tensor& sin,
                            const Tensor& cache_keys, const Tensor& cache_values, const Tensor& slots, const Tensor& queries) {
  const Cache cache = as_cache(cache_keys, cache_values);
  const HeadRows in = as_head_rows(qkv, "qkv"), out = as_head_rows(queries, "queries");
  const int64_t rows = qkv.size(0), heads = qkv.size(1) - 2 * cache.kv_heads;
  require(heads >= 0 && qkv.size(2) == cache.head_dim, "qkv", "[rows, heads + 2 * the cache's kv_heads, its head_dim]", qkv);
  require(queries.type == qkv.type && queries.size(0) == rows && queries.size(1) == heads && queries.size(2) == qkv.size(2),
          "queries", "[rows, heads, head_dim] of qkv's dtype", queries);
  const auto norm_of = [&](const std::optional<Tensor>& norm, const char* name) {
    return norm ? as_vector(*norm, name, cache.head_dim) : Vector{};
  };
  const Call call = make_call(
      kernels_.rotary_write,
      RotaryWrite{in, rows, heads, norm_of(query_norm, "query_norm"), norm_of(key_norm, "key_norm"), eps,
                  rotary_angles(positions, cos, sin, rows, cache.head_dim), out, cache, as_int64(slots, "slots", rows)});
  submit({&call, 1}, {&qkv, query_norm ? &*query_norm : &qkv, key_norm ? &*key_norm : &qkv, &positions, &cos, &sin, &cache_keys,
                      &cache_values, &slots, &queries});
}

}  // namespace sparkgap
