"""A request of which everything is recorded."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sparkgap.api import LLM
from sparkgap.config import SamplingParams
from sparkgap.engine.outputs import RequestOutput
from sparkgap.engine.tracing import Recording


@dataclass(frozen=True)
class TracedRequest:
    """One request in one execution mode.

    Attributes:
        recording: of its answer.
        counted: of its answer, once more, with torch operations.
        output: its answer.
        same_tokens: whether it has the same tokens without a recording, and with one of torch operations.
        graph_captures: graphs captured while it was answered; 0.
    """

    recording: Recording
    counted: Recording
    output: RequestOutput
    same_tokens: bool
    graph_captures: int


def trace_request(
    llm: LLM, ask: Callable[[LLM, SamplingParams], RequestOutput], params: SamplingParams
) -> TracedRequest:
    """Answer a request three times: to warm up, recorded, and recorded with torch operations to count these.

    Args:
        llm: the model, without other requests.
        ask: gives it the request.
        params: of one answer; a seed is chosen where they have none.

    Raises:
        ConfigError: the model runs on other kernels than the CPU's.
        EngineError: computing failed.
    """
    params = replace(
        params, seed=llm.config.seed if params.seed is None else params.seed, skip_reading_prefix_cache=True
    )
    plain = ask(llm, params)
    captures = llm.graph_counts()["captures_since_startup"]
    with llm.trace() as timed:
        output = ask(llm, params)
    with llm.trace(torch_operations=True) as counted:
        again = ask(llm, params)
    answers = [answer.outputs[0].token_ids for answer in (plain, output, again)]
    return TracedRequest(
        timed,
        counted,
        output,
        same_tokens=answers[0] == answers[1] == answers[2],
        graph_captures=llm.graph_counts()["captures_since_startup"] - captures,
    )


def mode_of(info: dict[str, Any]) -> str:
    """Name of the execution mode (`config.EXECUTION_MODES`) of a model with this `LLM.info`."""
    if info["task_pipeline"]["active"]:
        return "pipeline"
    if info["graphs"] is None:
        return "eager"
    context = info["graphs"]["context_graph"]
    return "graphs" if context in (None, "off") else str(context)
