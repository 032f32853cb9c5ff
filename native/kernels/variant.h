// The kernels' entry points within the namespace of the instruction set they are compiled for. SPARKGAP_VARIANT is
// its name, given by the build.
#pragma once
#include "kernels.h"

namespace sparkgap::SPARKGAP_VARIANT {

void pack_int8(const PackInt8&, Worker);
void pack_float(const PackFloat&, Worker);
void quantize_rows(const QuantizeRows&, Worker);
void norm_quantize(const NormQuantize&, Worker);
void silu_quantize(const SiluQuantize&, Worker);
void linear_int8(const LinearInt8&, Worker);
void linear_float(const LinearFloat&, Worker);
void convert_rows(const ConvertRows&, Worker);
void rms_norm(const RmsNorm&, Worker);
void rotary(const Rotary&, Worker);
void kv_write(const KvWrite&, Worker);
void rotary_write(const RotaryWrite&, Worker);
void silu_mul(const SiluMul&, Worker);
void embed(const Embed&, Worker);
void argmax(const Argmax&, Worker);
void fill_draft_blocks(const DraftBlocks&, Worker);
void zero_rows(const ZeroRows&, Worker);
void head_gate(const HeadGate&, Worker);
void confidence(const Confidence&, Worker);
void add_logits(const AddLogits&, Worker);
void draft_pick(const DraftPick&, Worker);
void markov_step(const MarkovStep&, Worker);
void markov_end(const MarkovEnd&, Worker);
void paged_attention(const PagedAttention&, Worker);
void paged_attention_join(const PagedAttention&, Worker);
void block_attention(const BlockAttention&, Worker);
LargestLogit largest_logit(const float* logits, int64_t n);
void weigh_logits(const float* logits, int64_t n, float largest, float temperature, float lowest, float* weights);
size_t attention_scratch_bytes(int64_t heads, int64_t kv_heads, int64_t head_dim);
size_t markov_scratch_bytes(int64_t sequences, int64_t rank);

}  // namespace sparkgap::SPARKGAP_VARIANT
