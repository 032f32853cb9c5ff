"""What `generate` says about an answer: the footer and the JSON object."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sparkgap.config import SamplingParams

if TYPE_CHECKING:
    from sparkgap.engine.outputs import CompletionOutput, Logprob, RequestOutput


def footer(output: "RequestOutput", num_tokens: int) -> str:
    """One line: output tokens, speed, time to the first token, accepted drafts; and what cut an answer off.

    Args:
        output: the last output of a request.
        num_tokens: output tokens of all its completions.
    """
    parts = [f"{num_tokens} tokens" if num_tokens != 1 else "1 token"]
    metrics = output.metrics
    if metrics is not None:
        parts.append(f"{metrics.output_tokens_per_s:.1f} tokens/s")
        if metrics.ttft_ms is not None:
            parts.append(f"first token after {metrics.ttft_ms:.0f} ms")
    parts.append(f"prompt of {len(output.prompt_token_ids)}")
    if metrics is not None and metrics.draft_rounds:
        drafted = metrics.draft_tokens / metrics.draft_rounds
        parts.append(f"{metrics.accepted_per_round:.2f} of {drafted:.3g} draft tokens accepted a round")
    elif metrics is not None and metrics.not_speculated:
        reason = max(metrics.not_speculated, key=metrics.not_speculated.__getitem__)
        parts.append(f"0 of 0 draft tokens accepted: {reason}")
    if any(completion.finish_reason == "length" for completion in output.outputs):
        parts.append("cut at the token limit (--max-tokens, --max-model-len)")
    return ", ".join(parts)


def generation_report(output: "RequestOutput", params: SamplingParams, graphs: Mapping[str, Any]) -> dict[str, Any]:
    """The object that `generate --json` prints: the first answer at the top, and all in `choices` if n > 1.

    Args:
        output: the last output of the request.
        params: how it was sampled.
        graphs: counters of captured passes (`GraphCounters.report`); rounds outside the drafter's declared capacity
            are added to `eager`.
    """
    choices = [_choice(completion) for completion in output.outputs]
    report = {key: value for key, value in choices[0].items() if key != "index"}
    report["usage"] = {
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": sum(len(completion.token_ids) for completion in output.outputs),
    }
    report["metrics"] = None if output.metrics is None else _rounded(asdict(output.metrics))
    not_speculated = {} if output.metrics is None else output.metrics.not_speculated
    report["graphs"] = {**graphs, "eager": {**graphs["eager"], **not_speculated}}
    if params.n > 1:
        report["choices"] = choices
    return report


def _rounded(value: Any) -> Any:
    """Floats in a report with four decimals: a tenth of a microsecond, a hundredth of a percent."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


def _choice(completion: "CompletionOutput") -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": completion.index,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        positions = zip(completion.token_ids, completion.logprobs, strict=True)
        choice["logprobs"] = [_position(token_id, table) for token_id, table in positions]
    return choice


def _position(token_id: int, table: Mapping[int, "Logprob"]) -> dict[str, Any]:
    """The chosen token, and under `top` the table it came from, most probable first."""
    entries = {
        key: {"token_id": key, "token": entry.decoded_token, "logprob": round(entry.logprob, 6), "rank": entry.rank}
        for key, entry in table.items()
    }
    return {**entries[token_id], "top": sorted(entries.values(), key=lambda entry: entry["rank"])}
