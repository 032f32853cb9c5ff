// The kernels of the CPU device: their operands, and the table of them that each instruction set brings.
//
// Every kernel is row-independent: a row's result has the same bits whatever rows stand beside it and however many
// threads run. No kernel splits a sum between threads, and the order of each sum is fixed by positions alone.
#pragma once
#include <cstdint>

#include "../call.h"

namespace sparkgap {

enum class DType : int32_t { kFloat32, kBFloat16 };

// Rows of float32 or bfloat16, each contiguous, `stride` elements apart.
struct Matrix {
  void* data;
  int64_t stride;
  DType dtype;
};

// `[rows, heads, width]` with a stride (in elements) for each of the first two.
struct HeadRows {
  void* data;
  int64_t row_stride;
  int64_t head_stride;
  DType dtype;
};

// A contiguous vector.
struct Vector {
  const void* data;
  DType dtype;
};

// Weights are packed in blocks of 16 output channels, so that one vector holds the same inputs' weights of 16
// channels. Widths are padded with zeros.
constexpr int64_t kBlockChannels = 16;
constexpr int64_t kQuantizedAlignment = 64;  // bytes between rows of quantized activations are a multiple of this

// int8 weights in pairs of blocks, `[out / 32, in / 4, 2, 16, 4]`, where a last block without a partner is
// `[in / 4, 16, 4]`; `scales` float32 `[out]`; from rows of float32 or bfloat16.
// Scale = largest magnitude / 127; weight = round(value / scale), ties to even, in -127 ... 127.
struct PackInt8 {
  Matrix weight;
  int64_t out_features, in_features;
  int8_t* packed;
  float* scales;
  int32_t* offsets;  // [out], -128 * sum of the channel's weights: what activations' zero point adds
};

// Weights `[out / 16, in, 16]` in float32 or bfloat16.
struct PackFloat {
  Matrix weight;
  int64_t out_features, in_features;
  void* packed;
  DType packed_dtype;
};

// Activations as bytes: round(x * (127 / largest magnitude of the row)) + 128; scale = largest magnitude / 127.
// With a fixed scale: round(x * (1 / scale)) + 128, in 1 ... 255; a row with a NaN or an infinity has a NaN as its scale.
struct QuantizedRows {
  uint8_t* values;  // rows `stride` apart, padding is 128
  int64_t stride;
  float* scales;
  float fixed_scale;  // 0: each row has its own
};

struct QuantizeRows {
  Matrix x;
  int64_t rows, features;
  QuantizedRows to;
  const float* multipliers;  // [features], what x is multiplied by first; null leaves it. Takes scratch
  const int64_t* slots;      // [rows], rows at -1 are left out, their scale is 0; null takes all
};

// float(int32 dot product) * (row scale * channel scale) + bias.
struct LinearInt8 {
  const uint8_t* quantized;
  int64_t quantized_stride;
  const float* row_scales;
  const int8_t* packed;
  const float* channel_scales;
  const int32_t* offsets;
  const float* bias;  // may be null
  Matrix out;
  int64_t rows, in_features, out_features;
};

// float32 rows `x`, float32 accumulation in order of the inputs.
struct LinearFloat {
  const float* x;
  int64_t x_stride;
  const void* packed;
  DType packed_dtype;
  const float* bias;  // may be null
  Matrix out;
  int64_t rows, in_features, out_features;
  const int64_t* slots;  // [rows]: rows of slot -1 are left out; null computes all
};

struct ConvertRows {
  Matrix x;
  int64_t rows, features;
  Matrix out;
};

// sum = x + residual (when given, rounded to its dtype); out = sum / sqrt(mean(sum^2) + eps) * weight.
struct RmsNorm {
  HeadRows x;
  HeadRows residual;  // data may be null
  HeadRows sum;       // where the residual is given
  Vector weight;
  HeadRows out;
  int64_t rows, heads, features;
  float eps;
};

// What RmsNorm gives, quantized. Scratch: a row of float32.
struct NormQuantize {
  Matrix x, residual, sum;  // residual's data may be null
  Vector weight;
  int64_t rows, features;
  float eps;
  QuantizedRows to;
};

struct RotaryAngles {
  const int64_t* positions;  // [rows]
  const float* cos;          // [max_positions, half]
  const float* sin;
  int64_t max_positions, half;
};

// x, normed first where a norm is given (its data may be null), rotated.
struct Rotary {
  HeadRows x;
  Vector norm;
  float eps;
  RotaryAngles angles;
  HeadRows out;
  int64_t rows, heads, features;
};

constexpr int64_t kLargestHeadDim = 1024;

struct Cache {
  void* keys;  // [num_blocks, block_size, kv_heads, head_dim]
  void* values;
  int64_t num_blocks, block_size, kv_heads, head_dim;
  DType dtype;
};

struct KvWrite {
  HeadRows keys, values;
  Cache cache;
  const int64_t* slots;
  int64_t rows;
};

// Queries rotated to `queries`, keys rotated and values to the cache; queries and keys are normed first where norms are
// given (their data may be null).
struct RotaryWrite {
  HeadRows qkv;  // [rows, heads + 2 * kv_heads, head_dim]: queries, keys, values
  int64_t rows, heads;
  Vector query_norm, key_norm;
  float eps;
  RotaryAngles angles;
  HeadRows queries;  // [rows, heads, head_dim]
  Cache cache;
  const int64_t* slots;
};

struct SiluMul {
  Matrix gate_up;
  Matrix out;
  int64_t rows, features;
};

// What SiluMul gives, quantized. Scratch: a row of float32.
struct SiluQuantize {
  Matrix gate_up;
  int64_t rows, features;
  QuantizedRows to;
};

struct Embed {
  const int64_t* token_ids;
  Matrix table;
  int64_t vocab_size;
  Matrix out;
  int64_t rows, features;
};

struct Argmax {
  Matrix x;
  int64_t rows, features;
  int64_t* out;
};

// Attention's softmax runs over chunks of positions counted from 0 (and a block's own rows as chunks after them).
// Each chunk gives its largest score, sum and weighted values; chunks are joined one after another.
constexpr int64_t kChunkPositions = 128;

// Bytes that a later call reads; each thread reads its part of them, in order.
struct Following {
  const std::byte* data;
  int64_t bytes;
};

struct PagedAttention {
  HeadRows queries;
  Cache cache;
  const int64_t* positions;     // [rows]
  const int32_t* row_starts;    // [sequences + 1]
  const int32_t* block_tables;  // [sequences, max_blocks]
  int64_t sequences, rows, heads, max_blocks;
  float scale;
  int64_t window;  // 0: none
  HeadRows out;
  // Partial results when chunks are shared between threads: [rows, heads, max_chunks, head_dim + 2]; null when not.
  float* partial;
  int64_t max_chunks;
  // Attention computes more than it reads, and what comes next is the other way round: meanwhile memory is idle, and
  // what is read next is fetched.
  Following following[2];
};

struct BlockAttention {
  HeadRows queries;  // rows = sequences * block_rows
  HeadRows keys, values;
  Cache cache;
  const int64_t* context_lengths;  // [sequences]
  const int32_t* block_tables;
  int64_t sequences, block_rows, heads, max_blocks;
  float scale;
  int64_t window;
  bool causal;  // a row sees itself and the block's rows before it, not those after
  HeadRows out;
};

// Rows of draft blocks: the anchor, then mask tokens, at positions from the context length on.
struct DraftBlocks {
  const int64_t* anchors;  // [sequences]
  const int64_t* context_lengths;
  int64_t sequences, block_rows, mask_token_id;
  int64_t* token_ids;  // [sequences, block_rows]
  int64_t* positions;
};

struct ZeroRows {
  Matrix out;
  int64_t rows, features;
};

// What a head's second matrix multiplies. Gated: sigmoid(g) * embedded for projected [g]. Recurrent, for projected
// [g, c, o]: tanh(o), and the next state sigmoid(g) * state + (1 - sigmoid(g)) * tanh(c).
struct HeadGate {
  bool recurrent;
  Matrix projected;
  Matrix embedded;  // gated only
  Matrix state;     // recurrent only
  Matrix next_state;
  Matrix latent;
  int64_t rows, rank;
};

// sigmoid(weight . [hidden, embedded] + bias).
struct Confidence {
  Matrix hidden;
  Matrix embedded;      // data may be null
  const float* weight;  // [features + rank], or [features]
  const float* bias;    // [1]
  int64_t rows, features, rank;
  float* out;
};

// base + bias, float32.
struct AddLogits {
  Matrix base, bias, out;
  int64_t rows, features;
};

// The token with the largest of base + bias (float32; the first of equals, NaN being largest) and that logit.
struct DraftPick {
  Matrix base;
  Matrix bias;                // data may be null
  const int64_t* target_ids;  // [features], target id of each draft id; null when they are the same
  int64_t rows, features;
  int64_t* token_ids;
  float* scores;
};

// What one thread found among its share of a row's draft logits: the largest, the first place of it, and the first NaN's.
// A place that is not there is `kNoPlace`.
constexpr int32_t kNoPlace = INT32_MAX;

struct PartialPick {
  float value;
  int32_t place, nan_place;
};

// One step of the Markov chain: the largest of base + W2 times W1's row of the token before, of all sequences. Each
// thread looks at consecutive draft ids. Which token stood before follows from what all threads found in the step
// before, which each of them puts together for itself, so that a step takes one barrier.
struct MarkovStep {
  HeadRows base;  // float32 [sequences, 1, draft_vocab]
  Matrix table;   // W1 [vocab_size, rank]
  int64_t vocab_size;
  const void* packed;  // W2: as LinearInt8's with scales, else as LinearFloat's
  DType packed_dtype;
  float fixed_scale;  // int8 only, see QuantizedRows
  const float* channel_scales;
  const int32_t* offsets;
  const float* bias;  // may be null
  int64_t sequences, rank, draft_vocab;
  int threads;                // most that run a step
  const int64_t* anchors;     // [sequences], of the first step; null later
  const PartialPick* before;  // [threads, sequences], of the step before
  PartialPick* found;         // [threads, sequences]
  const int64_t* target_ids;  // see DraftPick
  int64_t* token_ids;         // [sequences], of the step before; null in the first step
  float* scores;
};

// The end of a Markov chain: the last step's tokens, and the confidences of all steps.
struct MarkovEnd {
  const PartialPick* before;  // [threads, sequences]
  int threads;
  const int64_t* target_ids;
  int64_t sequences, steps;
  const int64_t* anchors;
  int64_t* token_ids;  // [steps, sequences]; all but the last step's are there
  float* scores;       // the same
  HeadRows hidden;     // [sequences, steps, features]
  Matrix table;        // data null where confidences do not read it
  int64_t vocab_size;
  const float* weights;  // [steps, features + rank], `weight_stride` apart; null without confidences
  const float* biases;   // [steps], `bias_stride` apart
  int64_t weight_stride, bias_stride, features, rank;
  float* confidences;  // [steps, sequences]
};

// The first place of the largest of a row, and that value; a NaN is larger than every number.
struct LargestLogit {
  int64_t place;
  float value;
};

struct KernelTable {
  const char* name;
  Kernel<PackInt8> pack_int8;
  Kernel<PackFloat> pack_float;
  Kernel<QuantizeRows> quantize_rows;
  Kernel<NormQuantize> norm_quantize;
  Kernel<SiluQuantize> silu_quantize;
  Kernel<LinearInt8> linear_int8;
  Kernel<LinearFloat> linear_float;
  Kernel<ConvertRows> convert_rows;
  Kernel<RmsNorm> rms_norm;
  Kernel<Rotary> rotary;
  Kernel<KvWrite> kv_write;
  Kernel<RotaryWrite> rotary_write;
  Kernel<SiluMul> silu_mul;
  Kernel<Embed> embed;
  Kernel<Argmax> argmax;
  Kernel<DraftBlocks> fill_draft_blocks;
  Kernel<ZeroRows> zero_rows;
  Kernel<HeadGate> head_gate;
  Kernel<Confidence> confidence;
  Kernel<AddLogits> add_logits;
  Kernel<DraftPick> draft_pick;
  Kernel<MarkovStep> markov_step;
  Kernel<MarkovEnd> markov_end;
  Kernel<PagedAttention> paged_attention;
  Kernel<PagedAttention> paged_attention_join;  // second step when `partial` is given
  Kernel<BlockAttention> block_attention;
  LargestLogit (*largest_logit)(const float* logits, int64_t n);
  // exp((logits - largest) / temperature), 0 where the scaled logit is below `lowest`.
  void (*weigh_logits)(const float* logits, int64_t n, float largest, float temperature, float lowest, float* weights);
  size_t (*attention_scratch_bytes)(int64_t heads, int64_t kv_heads, int64_t head_dim);
  size_t (*markov_scratch_bytes)(int64_t sequences, int64_t rank);
};

}  // namespace sparkgap
