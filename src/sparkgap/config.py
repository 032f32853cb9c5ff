"""Settings, with all their validation. Imports no torch, so that `--help` and bad input answer at once."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from sparkgap.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m"
"""Name of the model that is used when none is given."""

DTYPES = ("auto", "bfloat16", "float16", "float32")
"""Values of `EngineConfig.dtype`; `auto` is bfloat16."""

QUANTIZATIONS = ("auto", "w8a8", "w8a8-static", "none")
"""Values of `EngineConfig.quantization`."""

MAX_LOGPROBS = 20
"""Largest number of alternatives a request may ask for at each position (vLLM's limit)."""

GRAPHS = ("auto", "on", "off")
"""Values of `EngineConfig.graphs`; `auto` is on where the device can record passes."""

TASK_PIPELINES = ("auto", "on", "off")
"""Values of `EngineConfig.task_pipeline`; `auto` is on where rounds can be chained on the device."""

CONTEXT_GRAPHS = ("auto", "off", "compact", "masked")
"""Values of `EngineConfig.context_graph`."""

EXECUTION_MODES: Mapping[str, Mapping[str, Any]] = {
    "eager": {"graphs": "off", "context_graph": "off", "task_pipeline": "off"},
    "graphs": {"graphs": "on", "context_graph": "off", "task_pipeline": "off"},
    "compact": {"graphs": "on", "context_graph": "compact", "task_pipeline": "off"},
    "masked": {"graphs": "on", "context_graph": "masked", "task_pipeline": "off"},
    "pipeline": {"graphs": "on", "context_graph": "auto", "task_pipeline": "on"},
}
"""Ways to run a round that checks and benches compare, as settings of `EngineConfig`. All give the same tokens."""

MAX_COMPLETIONS = 16384
"""Most completions of one prompt (vLLM's limit)."""

REPETITION_PENALTIES = (1e-3, 1e3)
"""Range of `SamplingParams.repetition_penalty`: beyond it logits leave what float32 holds."""

MAX_BLOCK_SIZE = 4096
"""Most positions in one KV block."""

MAX_THREADS = 1024
"""Most compute threads; starting very many more ends the process where no error can be caught."""

SPECULATIVE_METHODS = ("dspark", "dflash", "ngram")
"""Values of `SpeculativeConfig.method`, written in any case; `ngram` needs no drafter."""

NGRAM_TOKENS = 7
"""Draft tokens a round of method `ngram`, if nothing else is said."""

DRAFT_SAMPLE_METHODS = ("greedy", "probabilistic")
"""Values of `SpeculativeConfig.draft_sample_method`."""

FinishReason = Literal["stop", "length", "abort", "timeout"]
"""Why a request ended: `stop` (end of sequence, stop string or stop token), `length`, `abort`, or `timeout` (its
`deadline_s` passed)."""


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def is_integer(value: object) -> bool:
    """Whether a value is an integer; `True` is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite(value: object) -> bool:
    """Whether a value is a number that a float holds; `True` and NaN are none."""
    # An integer is compared with a float exactly, where converting a huge one would raise.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_unicode(text: str) -> bool:
    """False with lone surrogates, which no model can write."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends. Names and meanings are vLLM's.

    Attributes:
        n: number of completions of the prompt.
        temperature: 0 is greedy.
        top_p: smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: number of most probable tokens kept; 0 or -1 keeps all.
        min_p: tokens below this share of the most probable token's probability are dropped, in [0, 1].
        seed: key of the counter-based random numbers; None draws one from the engine's seed.
        max_tokens: most output tokens; None runs to the end of the context.
        min_tokens: output tokens before end of sequence, stop tokens and stop strings can end the request.
        stop: strings that end the request; not part of the text unless `include_stop_str_in_output`.
        stop_token_ids: token ids that end the request.
        ignore_eos: do not stop at the model's end-of-sequence tokens.
        logprobs: number of most probable alternatives reported at each position; None reports none, 0 only
            the chosen token. They are log-softmax of the model's logits before any processing.
        presence_penalty, frequency_penalty: subtracted from logits of tokens in the output, in [-2, 2].
        repetition_penalty: divides (multiplies, when negative) logits of tokens in prompt and output; within
            `REPETITION_PENALTIES`.
        logit_bias: token id -> value in [-100, 100] added to its logit.
        skip_special_tokens: leave special tokens out of the text.
        speculation: whether an engine that speculates does so for this request.
        skip_reading_prefix_cache: compute the whole prompt, also where its KV is known already.
        deadline_s: seconds after its arrival at which the request ends with what it has, and finish reason `timeout`;
            None lets it run.

    Raises:
        ConfigError: a value is out of its range; the message names the parameter.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    skip_special_tokens: bool = True
    speculation: bool = True
    skip_reading_prefix_cache: bool = False
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        _check(is_integer(self.n) and self.n >= 1, f"n must be an integer of at least 1, got {self.n!r}")
        _check(self.n <= MAX_COMPLETIONS, f"n must be at most {MAX_COMPLETIONS}, got {self.n}")
        _check(
            is_finite(self.temperature) and self.temperature >= 0,
            f"temperature must be a finite number of at least 0, got {self.temperature!r}",
        )
        _check(is_finite(self.top_p) and 0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p!r}")
        _check(
            is_integer(self.top_k) and self.top_k >= -1,
            f"top_k must be an integer of at least 1, or 0 or -1 for all tokens, got {self.top_k!r}",
        )
        _check(is_finite(self.min_p) and 0 <= self.min_p <= 1, f"min_p must be in [0, 1], got {self.min_p!r}")
        _check(
            self.seed is None or (is_integer(self.seed) and -(2**63) <= self.seed < 2**64),
            f"seed must be a 64-bit integer, got {self.seed!r}",
        )
        _check(
            self.max_tokens is None or (is_integer(self.max_tokens) and self.max_tokens >= 1),
            f"max_tokens must be an integer of at least 1, got {self.max_tokens!r}",
        )
        _check(
            is_integer(self.min_tokens)
            and self.min_tokens >= 0
            and (self.max_tokens is None or self.min_tokens <= self.max_tokens),
            f"min_tokens must be an integer from 0 to max_tokens ({self.max_tokens}), got {self.min_tokens!r}",
        )
        _check(
            self.logprobs is None or (is_integer(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS),
            f"logprobs must be an integer from 0 to {MAX_LOGPROBS}, got {self.logprobs!r}",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(is_finite(value) and -2 <= value <= 2, f"{name} must be in [-2, 2], got {value!r}")
        smallest, largest = REPETITION_PENALTIES
        _check(
            is_finite(self.repetition_penalty) and smallest <= self.repetition_penalty <= largest,
            f"repetition_penalty must be above 0, from {smallest:g} to {largest:g}, got {self.repetition_penalty!r}",
        )
        _check(
            self.deadline_s is None or (is_finite(self.deadline_s) and self.deadline_s > 0),
            f"deadline_s must be a number of seconds above 0, got {self.deadline_s!r}",
        )
        self._check_stop()
        self._check_logit_bias()

    def _check_stop(self) -> None:
        listed = self.stop is None or isinstance(self.stop, str | Sequence)
        _check(
            listed and all(isinstance(s, str) for s in self.stop_strings),
            f"stop must be a string or strings, got {self.stop!r}",
        )
        _check(all(self.stop_strings), "stop must not contain an empty string")
        _check(all(map(_is_unicode, self.stop_strings)), f"stop has a string that is not valid Unicode: {self.stop!r}")
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        _check(
            isinstance(ids, Sequence) and all(is_integer(i) and i >= 0 for i in ids),
            f"stop_token_ids must be token ids of at least 0, got {self.stop_token_ids!r}",
        )

    def _check_logit_bias(self) -> None:
        _check(
            self.logit_bias is None or isinstance(self.logit_bias, Mapping),
            f"logit_bias must map token ids to numbers, got {self.logit_bias!r}",
        )
        for token_id, bias in (self.logit_bias or {}).items():
            _check(
                is_integer(token_id) and token_id >= 0,
                f"logit_bias keys must be token ids of at least 0, got {token_id!r}",
            )
            _check(
                is_finite(bias) and -100 <= bias <= 100,
                f"logit_bias values must be in [-100, 100], got {bias!r} for token {token_id}",
            )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check token ids against a model's vocabulary.

        Raises:
            ConfigError: a `logit_bias` or `stop_token_ids` id is not below `vocab_size`.
        """
        for name, ids in (
            ("logit_bias", self.logit_bias or {}),
            ("stop_token_ids", self.stop_token_ids or ()),
        ):
            for token_id in ids:
                _check(
                    token_id < vocab_size,
                    f"{name} has token id {token_id}, outside the vocabulary of {vocab_size} tokens",
                )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, empty when there is none."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def greedy(self) -> bool:
        """True when the most probable token is always taken."""
        return self.temperature == 0


@dataclass(frozen=True)
class SpeculativeConfig:
    """How an engine speculates. Names are vLLM's.

    Attributes:
        method: one of `SPECULATIVE_METHODS`, in any case; None takes what the drafter is.
        model: the drafter, a directory or `hf:owner/name`; None takes the one that comes with Sparkgap for the target.
        num_speculative_tokens: draft tokens a round; None takes the drafter's own default, which is as many as it was
            trained for unless its configuration says otherwise.
        draft_sample_method: how draft tokens of sampled requests are chosen. `greedy` takes the most probable and
            keeps the output the one without speculation; `probabilistic` samples them.
        adaptive_length: verify only as many draft tokens in a round as pay, by measured times and recent acceptance,
            down to a plain round. Changes no token; not with `draft_sample_method` `probabilistic`.
        prompt_lookup_max: most last tokens that are looked up in the sequence's own past; what followed them there is
            drafted instead of what a drafter proposes. None is 4 with `ngram`, and 0, which looks nothing up, with a
            drafter. Not with `draft_sample_method` `probabilistic`.
        prompt_lookup_min: fewest last tokens that must have stood there before.

    Raises:
        ConfigError: a value is out of its range; the message names the setting.
    """

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: int | None = None
    draft_sample_method: str = "greedy"
    adaptive_length: bool = False
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int = 2

    @property
    def needs_drafter(self) -> bool:
        """Whether a drafter proposes tokens."""
        return self.method != "ngram"

    @property
    def lookup_lengths(self) -> tuple[int, int] | None:
        """Fewest and most last tokens that are looked up; None when nothing is."""
        longest = self.prompt_lookup_max
        if longest is None:
            longest = 0 if self.needs_drafter else max(4, self.prompt_lookup_min)
        return (self.prompt_lookup_min, longest) if longest else None

    def __post_init__(self) -> None:
        if self.method is not None:
            lowered = self.method.lower() if isinstance(self.method, str) else self.method
            _check(
                lowered in SPECULATIVE_METHODS,
                f"speculative method must be one of {', '.join(SPECULATIVE_METHODS)}, got {self.method!r}",
            )
            object.__setattr__(self, "method", lowered)
        _check(
            self.model is None or (isinstance(self.model, str) and bool(self.model)),
            f"the speculative model must be a directory or hf:owner/name, got {self.model!r}",
        )
        _check(
            self.num_speculative_tokens is None
            or (is_integer(self.num_speculative_tokens) and self.num_speculative_tokens >= 1),
            f"num_speculative_tokens must be an integer of at least 1, got {self.num_speculative_tokens!r}",
        )
        _check(
            self.draft_sample_method in DRAFT_SAMPLE_METHODS,
            f"draft_sample_method must be one of {', '.join(DRAFT_SAMPLE_METHODS)}, got {self.draft_sample_method!r}",
        )
        _check(
            isinstance(self.adaptive_length, bool),
            f"adaptive_length must be True or False, got {self.adaptive_length!r}",
        )
        _check(
            not self.adaptive_length or self.draft_sample_method == "greedy",
            "adaptive_length needs draft_sample_method greedy: with probabilistic, a seeded request's tokens would "
            "depend on the lengths",
        )
        self._check_lookup()

    def _check_lookup(self) -> None:
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        _check(
            is_integer(shortest) and shortest >= 1,
            f"prompt_lookup_min must be an integer of at least 1, got {shortest!r}",
        )
        _check(
            longest is None or longest == 0 or (is_integer(longest) and longest >= shortest),
            f"prompt_lookup_max must be 0 or an integer of at least prompt_lookup_min ({shortest}), got {longest!r}",
        )
        _check(
            self.lookup_lengths is None or self.draft_sample_method == "greedy",
            "looking tokens up needs draft_sample_method greedy: they are not drawn from a distribution",
        )
        if self.needs_drafter:
            return
        _check(
            self.model is None,
            f"speculative method ngram needs no drafter, and {self.model!r} is one; leave out the model or the method",
        )
        _check(longest != 0, "speculative method ngram looks tokens up: prompt_lookup_max must be at least 1")
        _check(not self.adaptive_length, "adaptive_length needs a drafter; method ngram drafts only what it finds")

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> "SpeculativeConfig":
        """The configuration that a mapping such as vLLM's `speculative_config` describes.

        Raises:
            ConfigError: not a mapping, an unknown key, or a value out of its range.
        """
        _check(isinstance(settings, Mapping), f"speculative_config must be a mapping, got {settings!r}")
        known = [field.name for field in fields(cls)]
        for name in settings:
            _check(name in known, f"speculative_config has no setting {name!r}; there are {', '.join(known)}")
        return cls(**settings)


@dataclass(frozen=True)
class EngineConfig:
    """How a model is loaded and run. Names follow vLLM where vLLM has them.

    Attributes:
        model: catalog name, directory, `.gguf` file or `hf:owner/name`.
        dtype: one of `DTYPES`, of weights and KV cache, and of activations on accelerators (on the CPU they are
            float32).
        quantization: one of `QUANTIZATIONS`. `w8a8` runs matrix products on int8 weights, with a scale for each
            output channel, and int8 activations, with a scale for each token; `w8a8-static` takes the activations'
            scales from a model directory that `sparkgap quantize` calibrated. `auto` is what the model directory was
            quantized for; for others `w8a8` on the CPU when dtype is `auto` too, else `none`.
        device: `auto`, `cpu`, or an accelerator's torch name such as `cuda`.
        max_model_len: most positions of a sequence (prompt + output); None takes the model's own.
        max_num_seqs: most sequences decoded together.
        max_num_batched_tokens: most prompt tokens in one step (chunked prefill).
        max_decode_stretch: how much longer than a decode round alone a step may take that also reads prompts, which is
            how much later the tokens of running requests come meanwhile; above 1. Prompt tokens are counted out by
            measured times. A smaller value lets prompts wait longer for their first token.
        prefill_tokens_beside_decodes: most prompt tokens in a step that also decodes, instead of `max_decode_stretch`.
        enable_prefix_caching: reuse KV of prompt blocks that an earlier request has computed.
        max_queued_requests: most requests that wait for a place among `max_num_seqs`; one more is refused. None has no
            limit.
        block_size: positions in one KV block.
        kv_cache_memory_bytes: size of the KV cache; None sizes it for `max_num_seqs` sequences within a share
            of the free memory, and never below one sequence of `max_model_len`.
        seed: source of the seeds of requests that have none.
        threads: compute threads; None takes the cores available to the process.
        speculation: False decodes without a drafter.
        speculative_config: with which drafter, and how; a mapping is turned into a `SpeculativeConfig`. None speculates
            with the drafter that comes with Sparkgap for the target, if there is one.
        graphs: one of `GRAPHS`, or True or False: whether decode passes are captured at startup and replayed.
        task_pipeline: one of `TASK_PIPELINES`, or True or False: whether rounds are chained on the device, so that the
            host learns of a round while the next one runs. Requests that this cannot serve take rounds that the host
            carries.
        context_graph: one of `CONTEXT_GRAPHS`: how a round updates the drafter's context when passes are captured.
            `masked` replays a graph over all rows, where rejected ones write nothing; `compact` one for as many rows as
            were accepted, which the host copies together; `off` computes the accepted rows eagerly. `auto` is `masked`,
            the fastest for one sequence, where passes are captured.
        allow_download: whether a model that is not cached may be fetched.

    Raises:
        ConfigError: a value is out of its range; the message names the setting.
    """

    model: str = DEFAULT_MODEL
    dtype: str = "auto"
    quantization: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    max_decode_stretch: float = 2.5
    prefill_tokens_beside_decodes: int | None = None
    enable_prefix_caching: bool = True
    max_queued_requests: int | None = None
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    seed: int = 0
    threads: int | None = None
    speculation: bool = True
    speculative_config: SpeculativeConfig | None = None
    graphs: str | bool = "auto"
    task_pipeline: str | bool = "auto"
    context_graph: str = "auto"
    allow_download: bool = True

    def __post_init__(self) -> None:
        for name in ("graphs", "task_pipeline"):
            if isinstance(getattr(self, name), bool):
                object.__setattr__(self, name, "on" if getattr(self, name) else "off")
        _check(
            self.task_pipeline in TASK_PIPELINES,
            f"task_pipeline must be one of {', '.join(TASK_PIPELINES)}, got {self.task_pipeline!r}",
        )
        _check(self.graphs in GRAPHS, f"graphs must be one of {', '.join(GRAPHS)}, got {self.graphs!r}")
        _check(
            self.context_graph in CONTEXT_GRAPHS,
            f"context_graph must be one of {', '.join(CONTEXT_GRAPHS)}, got {self.context_graph!r}",
        )
        _check(
            self.graphs != "off" or self.context_graph in ("auto", "off"),
            f"context_graph {self.context_graph} contradicts graphs off; leave one of them out",
        )
        _check(isinstance(self.model, str), f"model must be a name or a path as text, got {self.model!r}")
        _check(bool(self.model), "model must not be empty")
        _check(isinstance(self.device, str), f"device must be a name, got {self.device!r}")
        _check(self.dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        _check(
            self.quantization in QUANTIZATIONS,
            f"quantization must be one of {', '.join(QUANTIZATIONS)}, got {self.quantization!r}",
        )
        _check(is_integer(self.seed), f"seed must be an integer, got {self.seed!r}")
        if self.speculative_config is not None and not isinstance(self.speculative_config, SpeculativeConfig):
            object.__setattr__(self, "speculative_config", SpeculativeConfig.from_mapping(self.speculative_config))
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            value = getattr(self, name)
            _check(is_integer(value) and value >= 1, f"{name} must be an integer of at least 1, got {value!r}")
        _check(self.block_size <= MAX_BLOCK_SIZE, f"block_size must be at most {MAX_BLOCK_SIZE}, got {self.block_size}")
        for name in ("speculation", "allow_download", "enable_prefix_caching"):
            _check(isinstance(getattr(self, name), bool), f"{name} must be True or False, got {getattr(self, name)!r}")
        _check(
            is_finite(self.max_decode_stretch) and self.max_decode_stretch > 1,
            f"max_decode_stretch must be a finite number above 1, got {self.max_decode_stretch!r}",
        )
        _check(
            self.max_queued_requests is None
            or (is_integer(self.max_queued_requests) and self.max_queued_requests >= 0),
            f"max_queued_requests must be an integer of at least 0, got {self.max_queued_requests!r}",
        )
        for name in ("max_model_len", "kv_cache_memory_bytes", "threads", "prefill_tokens_beside_decodes"):
            value = getattr(self, name)
            _check(
                value is None or (is_integer(value) and value >= 1),
                f"{name} must be an integer of at least 1, got {value!r}",
            )
        _check(
            self.threads is None or self.threads <= MAX_THREADS,
            f"threads must be at most {MAX_THREADS}, got {self.threads}",
        )
