"""How a model is loaded and run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparkgap.config.checks import check, is_finite, is_integer
from sparkgap.config.speculative import SpeculativeConfig

DEFAULT_MODEL = "smollm2-135m"
"""Name of the model that is used when none is given."""

DTYPES = ("auto", "bfloat16", "float16", "float32")
"""Values of `EngineConfig.dtype`; `auto` is bfloat16."""

QUANTIZATIONS = ("auto", "w8a8", "w8a8-static", "none")
"""Values of `EngineConfig.quantization`."""

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

MAX_BLOCK_SIZE = 4096
"""Most positions in one KV block."""

MAX_THREADS = 1024
"""Most compute threads; starting very many more ends the process where no error can be caught."""


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
        max_decode_stretch: how many times as long as a step that only decodes one may take that also reads prompts,
            which is how much later the tokens of running requests come meanwhile; above 1. Prompt tokens are counted
            out by measured times. A smaller value lets prompts wait longer for their first token.
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
    max_decode_stretch: float = 1.75
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

    @property
    def lookup_tokens(self) -> int:
        """Draft tokens a round where they are only looked up; 0 with a drafter, and without speculation."""
        wanted = self.speculative_config
        return 0 if not self.speculation or wanted is None else wanted.lookup_tokens

    def __post_init__(self) -> None:
        for name in ("graphs", "task_pipeline"):
            if isinstance(getattr(self, name), bool):
                object.__setattr__(self, name, "on" if getattr(self, name) else "off")
        check(
            self.task_pipeline in TASK_PIPELINES,
            f"task_pipeline must be one of {', '.join(TASK_PIPELINES)}, got {self.task_pipeline!r}",
        )
        check(self.graphs in GRAPHS, f"graphs must be one of {', '.join(GRAPHS)}, got {self.graphs!r}")
        check(
            self.context_graph in CONTEXT_GRAPHS,
            f"context_graph must be one of {', '.join(CONTEXT_GRAPHS)}, got {self.context_graph!r}",
        )
        check(
            self.graphs != "off" or self.context_graph in ("auto", "off"),
            f"context_graph {self.context_graph} contradicts graphs off; leave one of them out",
        )
        check(isinstance(self.model, str), f"model must be a name or a path as text, got {self.model!r}")
        check(bool(self.model), "model must not be empty")
        check(isinstance(self.device, str), f"device must be a name, got {self.device!r}")
        check(self.dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        check(
            self.quantization in QUANTIZATIONS,
            f"quantization must be one of {', '.join(QUANTIZATIONS)}, got {self.quantization!r}",
        )
        check(is_integer(self.seed), f"seed must be an integer, got {self.seed!r}")
        if self.speculative_config is not None and not isinstance(self.speculative_config, SpeculativeConfig):
            object.__setattr__(self, "speculative_config", SpeculativeConfig.from_mapping(self.speculative_config))
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            value = getattr(self, name)
            check(is_integer(value) and value >= 1, f"{name} must be an integer of at least 1, got {value!r}")
        check(self.block_size <= MAX_BLOCK_SIZE, f"block_size must be at most {MAX_BLOCK_SIZE}, got {self.block_size}")
        for name in ("speculation", "allow_download", "enable_prefix_caching"):
            check(isinstance(getattr(self, name), bool), f"{name} must be True or False, got {getattr(self, name)!r}")
        check(
            is_finite(self.max_decode_stretch) and self.max_decode_stretch > 1,
            f"max_decode_stretch must be a finite number above 1, got {self.max_decode_stretch!r}",
        )
        check(
            self.max_queued_requests is None
            or (is_integer(self.max_queued_requests) and self.max_queued_requests >= 0),
            f"max_queued_requests must be an integer of at least 0, got {self.max_queued_requests!r}",
        )
        for name in ("max_model_len", "kv_cache_memory_bytes", "threads", "prefill_tokens_beside_decodes"):
            value = getattr(self, name)
            check(
                value is None or (is_integer(value) and value >= 1),
                f"{name} must be an integer of at least 1, got {value!r}",
            )
        check(
            self.threads is None or self.threads <= MAX_THREADS,
            f"threads must be at most {MAX_THREADS}, got {self.threads}",
        )
