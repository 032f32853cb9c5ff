"""Settings, with all their validation. Imports no torch, so that `--help` and bad input answer at once."""

from sparkgap.config.checks import is_finite, is_integer
from sparkgap.config.engine import (
    CONTEXT_GRAPHS,
    DEFAULT_MODEL,
    DTYPES,
    EXECUTION_MODES,
    GRAPHS,
    MAX_BLOCK_SIZE,
    MAX_THREADS,
    QUANTIZATIONS,
    TASK_PIPELINES,
    EngineConfig,
)
from sparkgap.config.sampling import MAX_COMPLETIONS, MAX_LOGPROBS, REPETITION_PENALTIES, FinishReason, SamplingParams
from sparkgap.config.speculative import (
    DEFAULT_MTP_TOKENS,
    DRAFT_SAMPLE_METHODS,
    MOST_MTP_TOKENS,
    NGRAM_TOKENS,
    SPECULATIVE_METHODS,
    SpeculativeConfig,
)

__all__ = [
    "CONTEXT_GRAPHS",
    "DEFAULT_MTP_TOKENS",
    "DEFAULT_MODEL",
    "DRAFT_SAMPLE_METHODS",
    "DTYPES",
    "EXECUTION_MODES",
    "EngineConfig",
    "FinishReason",
    "GRAPHS",
    "MAX_BLOCK_SIZE",
    "MAX_COMPLETIONS",
    "MAX_LOGPROBS",
    "MAX_THREADS",
    "MOST_MTP_TOKENS",
    "NGRAM_TOKENS",
    "QUANTIZATIONS",
    "REPETITION_PENALTIES",
    "SPECULATIVE_METHODS",
    "SamplingParams",
    "SpeculativeConfig",
    "TASK_PIPELINES",
    "is_finite",
    "is_integer",
]
