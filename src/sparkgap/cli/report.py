"""What `generate` says about an answer: the footer and the JSON object."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sparkgap.config import SamplingParams

if TYPE_CHECKING:
    from sparkgap.api import LLM, RequestOutput
    from sparkgap.engine.outputs import CompletionOutput


def footer(output: "RequestOutput", num_tokens: int) -> str:
    """One line: output tokens, speed and time to the first token; and what ended an answer that was cut off."""
    metrics = output.metrics
    parts = [f"{num_tokens} tokens" if num_tokens != 1 else "1 token"]
    if metrics.output_tokens_per_s:
        parts.append(f"{metrics.output_tokens_per_s:.1f} tokens/s")
    parts.append(f"first token after {metrics.ttft_ms:.0f} ms")
    parts.append(f"prompt of {len(output.prompt_token_ids)}")
    if any(completion.finish_reason == "length" for completion in output.outputs):
        parts.append("cut at the token limit (--max-tokens, --max-model-len)")
    return ", ".join(parts)


def generation_report(llm: "LLM", output: "RequestOutput", params: SamplingParams) -> dict[str, Any]:
    """The object that `generate --json` prints: the first answer at the top, and all in `choices` if n > 1."""
    choices = [_choice(llm, completion) for completion in output.outputs]
    report = {key: value for key, value in choices[0].items() if key != "index"}
    report["usage"] = {
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": sum(len(completion.token_ids) for completion in output.outputs),
    }
    report["metrics"] = asdict(output.metrics)
    if params.n > 1:
        report["choices"] = choices
    return report


def _choice(llm: "LLM", completion: "CompletionOutput") -> dict[str, Any]:
    return {
        "index": completion.index,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
    }
