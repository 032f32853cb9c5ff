// The device's operations as Python calls them: each checks its operands, becomes a few kernel calls, and these run
// at once or join the graph that is being captured.
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <nanobind/ndarray.h>

#include "call.h"
#include "kernels/kernels.h"
#include "memory.h"
#include "pool.h"
#include "tensor.h"

namespace sparkgap {

// A linear layer's weight in packed form.
struct PackedWeight {
  enum class Form { kInt8, kBFloat16, kFloat32 };

  Form form;
  int64_t out_features, in_features;
  float input_scale = 0;  // int8 only: what activations are quantized by; 0: each row has its own scale
  std::shared_ptr<std::byte> packed, scales, offsets, bias;  // int8 only: scales, offsets; bias may be null

  size_t channels() const { return size_t(out_features + kBlockChannels - 1) / kBlockChannels * kBlockChannels; }

  size_t packed_bytes() const {
    const size_t width = size_t(in_features);
    return channels() * (form == Form::kInt8 ? (width + 3) / 4 * 4 : width * (form == Form::kFloat32 ? 4 : 2));
  }

  // Int8 only: float32 [out_features].
  std::span<const float> scale_values() const {
    return {reinterpret_cast<const float*>(scales.get()), size_t(form == Form::kInt8 ? out_features : 0)};
  }
};

// What the bits of a fault word mean.
std::string describe_fault(uint32_t fault);

// A recorded list of kernel calls with bound pointers. Holds what the calls point to: the arena as a whole, everything
// else by itself.
class Graph {
 public:
  // `name` is what traces call it.
  Graph(int threads, std::shared_ptr<Arena> arena, const std::string& name = "")
      : threads_(threads), name_(intern_name(name)), arena_(std::move(arena)) {}
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void replay();  // GIL released while it runs
  CallList calls() const { return {calls_, name_}; }
  int threads() const { return threads_; }
  // Kind of each call, and the shortest time in nanoseconds of each thread's share of it in `repeats` runs on the
  // caller's thread, `[calls, threads]`.
  std::vector<std::string> kinds() const;
  std::vector<int64_t> profile(int repeats);
  size_t size() const { return calls_.size(); }
  size_t bytes() const { return calls_.capacity() * sizeof(Call); }  // beside the arena

 private:
  friend class Executor;

  int threads_;
  uint32_t name_;
  std::vector<Call> calls_;
  std::vector<PyObject*> objects_;
  std::vector<std::shared_ptr<const PackedWeight>> weights_;
  std::shared_ptr<Arena> arena_;
};

// A new tensor.
using Result = nanobind::ndarray<nanobind::pytorch>;

// The memory of a packed weight, padding included, as flat tensors that keep it alive: `packed`, and what it has of
// `scales`, `offsets` and `bias`.
std::map<std::string, Result> parts_of(const PackedWeight& weight);

// `tensor`, which must lie in `arena`, without a hold on its memory there: the arena may give it away again.
Result alias(const std::shared_ptr<Arena>& arena, const Tensor& tensor);

class Executor {
 public:
  Executor(int threads, const std::string& variant);

  int threads() const { return threads_; }
  std::string variant() const { return kernels_.name; }

  // Calls between these go to `graph` instead of running. Throw std::logic_error when out of order.
  void begin_capture(std::shared_ptr<Graph> graph);
  void end_capture();
  bool capturing() const { return recording_ != nullptr; }
  int64_t captures() const { return captures_; }  // begun so far

  std::shared_ptr<PackedWeight> pack_linear(const Tensor& weight, const std::optional<Tensor>& bias, const std::string& form);
  // A weight of zeros in packed form, for the caller to fill.
  std::shared_ptr<PackedWeight> blank_weight(int64_t out_features, int64_t in_features, const std::string& form, bool bias,
                                             float input_scale);
  // Rows of slot -1 may be left out.
  void linear(const Tensor& x, std::shared_ptr<const PackedWeight> weight, const Tensor& out,
              const std::optional<Tensor>& slots, const std::optional<Tensor>& multipliers);
  void quantize_rows(const Tensor& x, const Tensor& quantized, const Tensor& scales, float fixed_scale);
  void rms_norm(const Tensor& x, const Tensor& weight, float eps, const Tensor& out);
  void add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, float eps, const Tensor& out,
                    const Tensor& sum);
  void rotary(const Tensor& x, const std::optional<Tensor>& norm, float eps, const Tensor& positions, const Tensor& cos,
              const Tensor& sin, const Tensor& out);
  void norm_linear(const Tensor& x, const std::optional<Tensor>& residual, const Tensor& norm, float eps,
                   std::shared_ptr<const PackedWeight> weight, const Tensor& out, const std::optional<Tensor>& sum);
  void silu_linear(const Tensor& gate_up, std::shared_ptr<const PackedWeight> weight, const Tensor& out);
  void rotary_write(const Tensor& qkv, const std::optional<Tensor>& query_norm, const std::optional<Tensor>& key_norm, float eps,
                    const Tensor& positions, const Tensor& cos, const Tensor& sin, const Tensor& cache_keys,
                    const Tensor& cache_values, const Tensor& slots, const Tensor& queries);
  void kv_write(const Tensor& keys, const Tensor& values, const Tensor& cache_keys, const Tensor& cache_values,
                const Tensor& slots);
  void paged_attention(const Tensor& queries, const Tensor& cache_keys, const Tensor& cache_values, const Tensor& positions,
                       const Tensor& row_starts, const Tensor& block_tables, int64_t max_rows, int64_t max_length, float scale,
                       int64_t window, const Tensor& out, const std::vector<std::shared_ptr<const PackedWeight>>& following);
  void block_attention(const Tensor& queries, const Tensor& keys, const Tensor& values, const Tensor& cache_keys,
                       const Tensor& cache_values, const Tensor& context_lengths, const Tensor& block_tables, float scale,
                       int64_t window, bool causal, const Tensor& out);
  void silu_mul(const Tensor& gate_up, const Tensor& out);
  void embed(const Tensor& token_ids, const Tensor& table, const Tensor& out);
  void argmax(const Tensor& x, const Tensor& out);
  void convert(const Tensor& x, const Tensor& out);
  void draft_blocks(const Tensor& anchors, const Tensor& context_lengths, int64_t block_rows, int64_t mask_token_id,
                    const Tensor& token_ids, const Tensor& positions);
  void zero(const Tensor& out);
  void gated_head(const Tensor& projected, const Tensor& embedded, const Tensor& latent);
  void recurrent_head(const Tensor& projected, const Tensor& state, const Tensor& latent, const Tensor& next_state);
  void confidence(const Tensor& hidden, const std::optional<Tensor>& embedded, const Tensor& weight, const Tensor& bias,
                  const Tensor& out);
  void add_logits(const Tensor& base, const Tensor& bias, const Tensor& out);
  void draft_pick(const Tensor& base, const std::optional<Tensor>& bias, const std::optional<Tensor>& target_ids,
                  const Tensor& token_ids, const Tensor& scores);

  // The Markov chain of a vanilla head over draft blocks, see MarkovStep. Confidences of all places have the same weights
  // where there is one row of them.
  void markov_chain(const Tensor& base, const Tensor& hidden, const Tensor& anchors, int64_t lead_rows, const Tensor& table,
                    std::shared_ptr<const PackedWeight> weight, const std::optional<Tensor>& target_ids,
                    const std::optional<Tensor>& confidence_weights, const std::optional<Tensor>& confidence_biases,
                    const Tensor& token_ids, const Tensor& scores, const std::optional<Tensor>& confidences);

  // See sampling.h; `width` rows of each sequence.
  void draw_tokens(const Tensor& logits, const Tensor& temperatures, const Tensor& log_min_p, const Tensor& top_k,
                   const Tensor& top_p, const Tensor& seeds, const Tensor& positions, const Tensor& token_ids,
                   const Tensor& scores);
  // See rounds.h.
  void begin_round(const Tensor& sources, const Tensor& staged_anchors, const Tensor& staged_positions,
                   const Tensor& state_anchors, const Tensor& state_positions, const Tensor& anchors, const Tensor& positions);
  void verify_rows(const Tensor& anchors, const Tensor& positions, const std::optional<Tensor>& draft_ids,
                   const Tensor& block_tables, const Tensor& num_blocks, int64_t block_size, int64_t max_length,
                   const Tensor& token_ids, const Tensor& row_positions, const Tensor& slots);
  void step_rows(const Tensor& context_lengths, const Tensor& block_tables, int64_t block_size, int64_t max_length,
                 const Tensor& sources, const Tensor& positions, const Tensor& slots);
  void settle_round(const Tensor& picks, const Tensor& scores, const std::optional<Tensor>& draft_ids,
                    const std::optional<Tensor>& draft_scores, const std::optional<Tensor>& runs, const Tensor& positions,
                    const Tensor& row_positions, const Tensor& slots, int64_t context_length,
                    const std::optional<Tensor>& context_positions,
                    const std::optional<Tensor>& context_slots, const Tensor& next_anchors, const Tensor& next_positions,
                    const Tensor& results);
  // See lookup.h.
  void look_up(const Tensor& texts, const Tensor& text_rows, const Tensor& positions, int64_t shortest, int64_t longest,
               const Tensor& drafts, const Tensor& runs, const Tensor& wants_draft);
  void fill_drafts(const Tensor& proposed, const Tensor& runs, const Tensor& drafts);
  // See scheduling.h.
  void choose_length(const Tensor& confidences, const std::optional<Tensor>& runs, const Tensor& num_blocks,
                     const Tensor& positions, const Tensor& lengths, const Tensor& costs, const Tensor& growth,
                     const Tensor& draft_cost, const std::optional<Tensor>& wants_draft, const Tensor& chosen);
  void remember(const Tensor& texts, const Tensor& text_rows, const Tensor& positions, const Tensor& results);
  void hand_off(const Tensor& next_anchors, const Tensor& next_positions, const Tensor& state_anchors,
                const Tensor& state_positions);

  // Memory from the arena of the graph that is being captured; it returns there with the tensor's last view.
  Result empty(const std::vector<int64_t>& shape, const std::string& dtype);

 private:
  // Runs the calls, or records them with the objects and the weight they point to.
  void submit(std::span<const Call> calls, std::span<const Tensor* const> tensors,
              std::shared_ptr<const PackedWeight> weight = nullptr);
  void submit(std::span<const Call> calls, std::initializer_list<const Tensor*> tensors,
              std::shared_ptr<const PackedWeight> weight = nullptr) {
    submit(calls, std::span<const Tensor* const>(tensors.begin(), tensors.size()), std::move(weight));
  }
  std::byte* workspace(size_t bytes);
  // An int8 product whose activations lie in the workspace; the caller holds the mutex.
  LinearInt8 int8_product(const PackedWeight& weight, int64_t rows, const Matrix& out);
  static QuantizedRows activations_of(const LinearInt8& product, const PackedWeight& weight);

  const KernelTable& kernels_;
  const int threads_;
  WeightMemory weight_memory_;
  std::shared_ptr<Graph> recording_;
  int64_t captures_ = 0;
  Workspace workspace_;
  std::mutex mutex_;  // one operation at a time uses the workspace
};

}  // namespace sparkgap
