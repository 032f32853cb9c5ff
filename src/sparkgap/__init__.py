"""Sparkgap: LLM inference with DSpark speculative decoding and captured graphs."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparkgap.api import LLM
    from sparkgap.async_llm import AsyncLLM
    from sparkgap.config import EngineConfig, SamplingParams
    from sparkgap.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
    from sparkgap.errors import SparkgapError

__version__ = "0.1.0"

__all__ = [
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "LLM",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SparkgapError",
]

_HOMES = {
    "AsyncLLM": "sparkgap.async_llm",
    "CompletionOutput": "sparkgap.engine.outputs",
    "EngineConfig": "sparkgap.config",
    "LLM": "sparkgap.api",
    "RequestMetrics": "sparkgap.engine.outputs",
    "RequestOutput": "sparkgap.engine.outputs",
    "SamplingParams": "sparkgap.config",
    "SparkgapError": "sparkgap.errors",
}


def __getattr__(name: str) -> object:
    # Loading on first use keeps `import sparkgap`, and so `sparkgap --help`, free of torch.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
