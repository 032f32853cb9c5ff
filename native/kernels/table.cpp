#include "variant.h"

#define SPARKGAP_STRING(x) #x
#define SPARKGAP_NAME(x) SPARKGAP_STRING(x)

namespace sparkgap::SPARKGAP_VARIANT {

extern const KernelTable table;
const KernelTable table = {
    .name = SPARKGAP_NAME(SPARKGAP_VARIANT),
    .pack_int8 = pack_int8,
    .pack_float = pack_float,
    .quantize_rows = quantize_rows,
    .norm_quantize = norm_quantize,
    .silu_quantize = silu_quantize,
    .linear_int8 = linear_int8,
    .linear_float = linear_float,
    .convert_rows = convert_rows,
    .rms_norm = rms_norm,
    .rotary = rotary,
    .kv_write = kv_write,
    .rotary_write = rotary_write,
    .silu_mul = silu_mul,
    .embed = embed,
    .argmax = argmax,
    .fill_draft_blocks = fill_draft_blocks,
    .zero_rows = zero_rows,
    .head_gate = head_gate,
    .confidence = confidence,
    .add_logits = add_logits,
    .draft_pick = draft_pick,
    .markov_step = markov_step,
    .markov_end = markov_end,
    .paged_attention = paged_attention,
    .paged_attention_join = paged_attention_join,
    .block_attention = block_attention,
    .largest_logit = largest_logit,
    .weigh_logits = weigh_logits,
    .attention_scratch_bytes = attention_scratch_bytes,
    .markov_scratch_bytes = markov_scratch_bytes,
};

}  // namespace sparkgap::SPARKGAP_VARIANT
