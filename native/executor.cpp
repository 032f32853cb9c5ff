#include "executor.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>

#include "gil.h"
#include "operands.h"
#include "pool.h"
#include "variants.h"

namespace nb = nanobind;

namespace sparkgap {

std::string describe_fault(uint32_t fault) {
  std::string text;
  const auto add = [&](Fault bit, const char* what) {
    if (fault & bit) text += (text.empty() ? "" : "; ") + std::string(what);
  };
  add(kTokenOutOfRange, "a token id lies outside the embedding table");
  add(kPositionOutOfRange, "a position lies outside the rotary table");
  add(kSlotOutOfRange, "a slot lies outside the KV cache");
  add(kBlockOutOfRange, "a block table names a block outside the KV cache");
  add(kLengthOutOfRange, "a sequence is longer than its block table or the given max_length");
  add(kSourceOutOfRange, "a row of the state between rounds does not exist");
  return text;
}

namespace {

void raise_fault(uint32_t fault) {
  if (fault) throw std::out_of_range(describe_fault(fault));
}

// `[..., features]` seen as rows of heads: two dimensions are rows of one head.
HeadRows as_norm_rows(const Tensor& tensor, const char* operand) {
  if (tensor.dims == 3) return as_head_rows(tensor, operand);
  const Matrix m = as_matrix(tensor, operand);
  return {m.data, m.stride, 0, m.dtype};
}

}  // namespace

Graph::~Graph() {
  for (PyObject* object : objects_) Py_DECREF(object);
}

void Graph::replay() {
  uint32_t fault;
  {
    const GilRelease released;
    fault = Pool::shared().run(calls(), threads_);
  }
  raise_fault(fault);
}

std::vector<std::string> Graph::kinds() const {
  std::vector<std::string> names;
  for (const Call& call : calls_) names.push_back(kind_of(call));
  return names;
}

std::vector<int64_t> Graph::profile(int repeats) {
  if (repeats < 1) throw std::invalid_argument("repeats must be at least 1, got " + std::to_string(repeats));
  std::vector<int64_t> shortest;
  uint32_t fault = 0;
  {
    const GilRelease released;
    for (int i = 0; i < repeats && !fault; i++) {
      const std::vector<int64_t> times = Pool::shared().measure(calls_, threads_, &fault);
      if (shortest.empty()) shortest = times;
      for (size_t at = 0; at < times.size(); at++) shortest[at] = std::min(shortest[at], times[at]);
    }
  }
  raise_fault(fault);
  return shortest;
}

Executor::Executor(int threads, const std::string& variant) : kernels_(kernels_of(variant)), threads_(threads) {
  if (threads < 1) throw std::invalid_argument("threads must be at least 1, got " + std::to_string(threads));
}

void Executor::begin_capture(std::shared_ptr<Graph> graph) {
  if (recording_) throw std::logic_error("a capture is under way");
  if (graph->size()) throw std::logic_error("the graph was captured before");
  graph->threads_ = threads_;
  recording_ = std::move(graph);
  captures_++;
}

void Executor::end_capture() {
  if (!recording_) throw std::logic_error("no capture is under way");
  recording_->calls_.shrink_to_fit();
  recording_.reset();
}

std::byte* Executor::workspace(size_t bytes) {
  if (recording_) return recording_->arena_->workspace(bytes);
  std::byte* p = workspace_.get(bytes);
  workspace_.keep_largest_only();
  return p;
}

void Executor::submit(std::span<const Call> calls, std::span<const Tensor* const> tensors,
                      std::shared_ptr<const PackedWeight> weight) {
  if (recording_) {
    for (const Call& call : calls) recording_->calls_.push_back(call);
    for (const Tensor* tensor : tensors) {
      if (recording_->arena_->contains(tensor->data)) continue;
      Py_INCREF(tensor->object);
      recording_->objects_.push_back(tensor->object);
    }
    if (weight) recording_->weights_.push_back(std::move(weight));
    return;
  }
  uint32_t fault;
  {
    const GilRelease released;
    fault = Pool::shared().run({calls}, threads_);
  }
  raise_fault(fault);
}

void Executor::linear(const Tensor& x, std::shared_ptr<const PackedWeight> weight, const Tensor& out,
                      const std::optional<Tensor>& slots, const std::optional<Tensor>& multipliers) {
  Matrix in = as_matrix(x, "x");
  const Matrix result = as_matrix(out, "out");
  const int64_t rows = x.size(0), in_features = weight->in_features, out_features = weight->out_features;
  require(x.size(1) == in_features, "x", ("[rows, " + std::to_string(in_features) + "]").c_str(), x);
  require(out.size(0) == rows && out.size(1) == out_features, "out", "[x's rows, out_features]", out);
  if (rows == 0) return;
  const auto* bias = reinterpret_cast<const float*>(weight->bias.get());
  const float* factors = multipliers ? as_floats(*multipliers, "multipliers") : nullptr;
  if (factors)
    require(multipliers->dims == 1 && multipliers->size(0) == in_features, "multipliers", "float32 [in_features]", *multipliers);
  const int64_t* written = slots ? as_int64(*slots, "slots", rows) : nullptr;
  const Tensor *slots_or_x = slots ? &*slots : &x, *multipliers_or_x = multipliers ? &*multipliers : &x;
  if (weight->form == PackedWeight::Form::kInt8) {
    const auto lock = lock_without_gil(mutex_);
    const LinearInt8 product = int8_product(*weight, rows, result);
    const Call calls[] = {
        make_call(kernels_.quantize_rows,
                  QuantizeRows{in, rows, in_features, activations_of(product, *weight), factors, factors ? written : nullptr},
                  factors ? size_t(in_features) * sizeof(float) : 0),
        make_call(kernels_.linear_int8, product),
    };
    submit(calls, {&x, &out, slots_or_x, multipliers_or_x}, weight);
    return;
  }
  if (factors) throw std::invalid_argument("only an int8 weight has multipliers");
  const DType form = weight->form == PackedWeight::Form::kFloat32 ? DType::kFloat32 : DType::kBFloat16;
  const auto lock = lock_without_gil(mutex_);
  Call calls[2];
  size_t count = 0;
  if (in.dtype == DType::kBFloat16) {
    const Matrix wide{workspace(size_t(rows * in_features) * sizeof(float)), in_features, DType::kFloat32};
    calls[count++] = make_call(kernels_.convert_rows, ConvertRows{in, rows, in_features, wide});
    in = wide;
  }
  calls[count++] = make_call(kernels_.linear_float,
                             LinearFloat{static_cast<const float*>(in.data), in.stride, weight->packed.get(), form, bias,
                                         result, rows, in_features, out_features, written});
  submit({calls, count}, {&x, &out, slots_or_x}, weight);
}

void Executor::quantize_rows(const Tensor& x, const Tensor& quantized, const Tensor& scales, float fixed_scale) {
  const Matrix in = as_matrix(x, "x");
  require(quantized.type == Tensor::Type::kUInt8 && quantized.dims == 2 && quantized.contiguous_from(0) &&
              quantized.size(0) == x.size(0) && quantized.size(1) == int64_t(aligned(size_t(x.size(1)))),
          "quantized", "contiguous uint8 [rows, features rounded up to 64]", quantized);
  as_floats(scales, "scales");
  require(scales.dims == 1 && scales.size(0) == x.size(0), "scales", "float32 [rows]", scales);
  const Call call = make_call(kernels_.quantize_rows,
                              QuantizeRows{in, x.size(0), x.size(1),
                                           {static_cast<uint8_t*>(quantized.data), quantized.size(1),
                                            static_cast<float*>(scales.data), fixed_scale},
                                           nullptr, nullptr});
  submit({&call, 1}, {&x, &quantized, &scales});
}

void Executor::rms_norm(const Tensor& x, const Tensor& weight, float eps, const Tensor& out) {
  const HeadRows in = as_norm_rows(x, "x"), result = as_norm_rows(out, "out");
  require(same_shape(x, out) && x.type == out.type, "out", "of x's shape and dtype", out);
  const int64_t heads = x.dims == 3 ? x.size(1) : 1;
  const Call call = make_call(kernels_.rms_norm, RmsNorm{in, {}, {}, as_vector(weight, "weight", x.size(-1)), result,
                                                         x.size(0), heads, x.size(-1), eps});
  submit({&call, 1}, {&x, &weight, &out});
}

void Executor::add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, float eps, const Tensor& out,
                            const Tensor& sum) {
  const HeadRows in = as_norm_rows(x, "x");
  for (const auto& [tensor, name] : {std::pair{&residual, "residual"}, {&out, "out"}, {&sum, "sum"}})
    require(same_shape(x, *tensor) && x.type == tensor->type, name, "of x's shape and dtype", *tensor);
  const int64_t heads = x.dims == 3 ? x.size(1) : 1;
  const Call call = make_call(
      kernels_.rms_norm, RmsNorm{in, as_norm_rows(residual, "residual"), as_norm_rows(sum, "sum"),
                                 as_vector(weight, "weight", x.size(-1)), as_norm_rows(out, "out"), x.size(0), heads,
                                 x.size(-1), eps});
  submit({&call, 1}, {&x, &residual, &weight, &out, &sum});
}

void Executor::rotary(const Tensor& x, const std::optional<Tensor>& norm, float eps, const Tensor& positions,
                      const Tensor& cos, const Tensor& sin, const Tensor& out) {
  const HeadRows in = as_head_rows(x, "x"), result = as_head_rows(out, "out");
  require(same_shape(x, out) && x.type == out.type, "out", "of x's shape and dtype", out);
  require(!norm || x.size(2) <= kLargestHeadDim, "x", "of a head_dim of at most 1024", x);
  const Call call = make_call(
      kernels_.rotary, Rotary{in, norm ? as_vector(*norm, "norm", x.size(2)) : Vector{}, eps,
                              rotary_angles(positions, cos, sin, x.size(0), x.size(2)), result, x.size(0), x.size(1), x.size(2)});
  submit({&call, 1}, {&x, norm ? &*norm : &x, &positions, &cos, &sin, &out});
}

void Executor::kv_write(const Tensor& keys, const Tensor& values, const Tensor& cache_keys, const Tensor& cache_values,
                        const Tensor& slots) {
  const Cache cache = as_cache(cache_keys, cache_values);
  const HeadRows k = as_head_rows(keys, "keys"), v = as_head_rows(values, "values");
  require(keys.size(1) == cache.kv_heads && keys.size(2) == cache.head_dim, "keys", "[rows, cache's kv_heads, head_dim]", keys);
  require(same_shape(keys, values) && keys.type == values.type, "values", "of the keys' shape and dtype", values);
  const Call call = make_call(kernels_.kv_write, KvWrite{k, v, cache, as_int64(slots, "slots", keys.size(0)), keys.size(0)});
  submit({&call, 1}, {&keys, &values, &cache_keys, &cache_values, &slots});
}

void Executor::paged_attention(const Tensor& queries, const Tensor& cache_keys, const Tensor& cache_values,
                               const Tensor& positions, const Tensor& row_starts, const Tensor& block_tables, int64_t max_rows,
                               int64_t max_length, float scale, int64_t window, const Tensor& out,
                               const std::vector<std::shared_ptr<const PackedWeight>>& following) {
  const Cache cache = as_cache(cache_keys, cache_values);
  const HeadRows q = as_head_rows(queries, "queries"), result = as_head_rows(out, "out");
  const int64_t rows = queries.size(0), heads = queries.size(1);
  require(heads % cache.kv_heads == 0 && queries.size(2) == cache.head_dim, "queries",
          "[rows, a multiple of the cache's kv_heads, head_dim]", queries);
  require(same_shape(queries, out) && queries.type == out.type, "out", "of the queries' shape and dtype", out);
  const int32_t *starts = as_int32(row_starts, "row_starts"), *tables = as_int32(block_tables, "block_tables");
  require(row_starts.dims == 1 && row_starts.size(0) >= 1, "row_starts", "[sequences + 1]", row_starts);
  const int64_t sequences = row_starts.size(0) - 1;
  require(block_tables.dims == 2 && block_tables.size(0) == sequences, "block_tables", "[sequences, max_blocks]", block_tables);
  if (window < 0) throw std::invalid_argument("sliding_window must not be negative");
  PagedAttention args{q,     cache, as_int64(positions, "positions", rows), starts, tables, sequences, rows, heads, block_tables.size(1),
                      scale, window, result, nullptr, 0, {}};
  for (size_t i = 0; i < std::min(following.size(), std::size(args.following)); i++) {
    args.following[i] = {following[i]->packed.get(), int64_t(following[i]->packed_bytes())};
    if (recording_) recording_->weights_.push_back(following[i]);
  }
  const size_t scratch = kernels_.attention_scratch_bytes(heads, cache.kv_heads, cache.head_dim);
  // Few rows over long contexts leave threads without work unless chunks are shared out too, and read memory better chunk
  // by chunk. Both ways join the same chunks in the same order, so the choice does not show in the result.
  constexpr int64_t kItemRows = 16, kItemsPerThread = 8;
  const int64_t items = sequences * cache.kv_heads * ((max_rows + kItemRows - 1) / kItemRows);
  const int64_t chunks = (max_length + kChunkPositions - 1) / kChunkPositions;
  const bool share_chunks = chunks > 1 && items < kItemsPerThread * threads_;
  const auto lock = lock_without_gil(mutex_);
  if (!share_chunks) {
    const Call call = make_call(kernels_.paged_attention, args, scratch);
    submit({&call, 1}, {&queries, &cache_keys, &cache_values, &positions, &row_starts, &block_tables, &out});
    return;
  }
  args.max_chunks = chunks;
  args.partial = reinterpret_cast<float*>(workspace(size_t(rows * heads * chunks * (cache.head_dim + 2)) * sizeof(float)));
  const Call calls[] = {make_call(kernels_.paged_attention, args, scratch),
                        make_call(kernels_.paged_attention_join, args, scratch)};
  submit(calls, {&queries, &cache_keys, &cache_values, &positions, &row_starts, &block_tables, &out});
}

void Executor::block_attention(const Tensor& queries, const Tensor& keys, const Tensor& values, const Tensor& cache_keys,
                               const Tensor& cache_values, const Tensor& context_lengths, const Tensor& block_tables,
                               float scale, int64_t window, bool causal, const Tensor& out) {
  const Cache cache = as_cache(cache_keys, cache_values);
  require(queries.dims == 4 && queries.is_float() && queries.contiguous_from(0), "queries",
          "contiguous float32 or bfloat16 [sequences, block_rows, heads, head_dim]", queries);
  require(same_shape(queries, out) && queries.type == out.type && out.contiguous_from(0), "out",
          "contiguous, of the queries' shape and dtype", out);
  const int64_t sequences = queries.size(0), block_rows = queries.size(1), heads = queries.size(2);
  require(heads % cache.kv_heads == 0 && queries.size(3) == cache.head_dim, "queries",
          "of a multiple of the cache's kv_heads and its head_dim", queries);
  const auto rows_of = [&](const Tensor& t, const char* name) {
    // The stride of a dimension of one place says nothing.
    const int64_t row_stride = t.dims == 4 ? t.stride(block_rows == 1 ? 0 : 1) : 0;
    require(t.dims == 4 && t.type == queries.type && t.contiguous_from(3) && t.size(0) == sequences && t.size(1) == block_rows &&
                t.size(2) == cache.kv_heads && t.size(3) == cache.head_dim &&
                (sequences == 1 || t.stride(0) == block_rows * row_stride),
            name, "[sequences, block_rows, kv_heads, head_dim] of the queries' dtype with evenly spaced rows", t);
    return HeadRows{t.data, row_stride, t.stride(2), t.dtype()};
  };
  // Contiguous: but strides of dimensions of one place may be anything.
  const int64_t head_dim = cache.head_dim;
  const HeadRows q{queries.data, heads * head_dim, head_dim, queries.dtype()};
  const HeadRows result{out.data, heads * head_dim, head_dim, out.dtype()};
  const int32_t* tables = as_int32(block_tables, "block_tables");
  require(block_tables.dims == 2 && block_tables.size(0) == sequences, "block_tables", "[sequences, max_blocks]", block_tables);
  if (window < 0) throw std::invalid_argument("sliding_window must not be negative");
  const BlockAttention args{q, rows_of(keys, "keys"), rows_of(values, "values"), cache,
                            as_int64(context_lengths, "context_lengths", sequences), tables, sequences, block_rows, heads,
                            block_tables.size(1), scale, window, causal, result};
  const Call call = make_call(kernels_.block_attention, args,
                              kernels_.attention_scratch_bytes(heads, cache.kv_heads, cache.head_dim));
  submit({&call, 1}, {&queries, &keys, &values, &cache_keys, &cache_values, &context_lengths, &block_tables, &out});
}

void Executor::silu_mul(const Tensor& gate_up, const Tensor& out) {
  const Matrix in = as_matrix(gate_up, "gate_up"), result = as_matrix(out, "out");
  require(out.size(0) == gate_up.size(0) && 2 * out.size(1) == gate_up.size(1) && out.type == gate_up.type, "out",
          "[rows, half of gate_up's features] of its dtype", out);
  const Call call = make_call(kernels_.silu_mul, SiluMul{in, result, out.size(0), out.size(1)});
  submit({&call, 1}, {&gate_up, &out});
}

void Executor::embed(const Tensor& token_ids, const Tensor& table, const Tensor& out) {
  const Matrix from = as_matrix(table, "table"), result = as_matrix(out, "out");
  require(out.size(1) == table.size(1), "out", "[rows, the table's features]", out);
  const Call call = make_call(kernels_.embed, Embed{as_int64(token_ids, "token_ids", out.size(0)), from, table.size(0), result,
                                                    out.size(0), out.size(1)});
  submit({&call, 1}, {&token_ids, &table, &out});
}

void Executor::argmax(const Tensor& x, const Tensor& out) {
  const Matrix in = as_matrix(x, "x");
  require(x.size(1) > 0, "x", "of at least one feature", x);
  as_int64(out, "out", x.size(0));
  const Call call = make_call(kernels_.argmax, Argmax{in, x.size(0), x.size(1), static_cast<int64_t*>(out.data)});
  submit({&call, 1}, {&x, &out});
}

void Executor::convert(const Tensor& x, const Tensor& out) {
  const Matrix in = as_matrix(x, "x"), result = as_matrix(out, "out");
  require(same_shape(x, out), "out", "of x's shape", out);
  const Call call = make_call(kernels_.convert_rows, ConvertRows{in, x.size(0), x.size(1), result});
  submit({&call, 1}, {&x, &out});
}

}  // namespace sparkgap
