"""From settings to an engine that is ready to serve."""

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias

import torch

from sparkgap.catalog.checkpoint import Checkpoint, open_checkpoint
from sparkgap.catalog.progress import ProgressReporter
from sparkgap.catalog.quantization import CheckpointQuantization
from sparkgap.config import EngineConfig, SpeculativeConfig
from sparkgap.device.host import available_memory_bytes, usable_cores
from sparkgap.engine.engine import Engine
from sparkgap.engine.intake import ModelLimits
from sparkgap.engine.memory import check_model_fits, kv_cache_blocks
from sparkgap.engine.packed import kept_weights
from sparkgap.engine.speculation import (
    ChosenDrafter,
    drafting_sequences,
    find_drafter,
    find_shipped_drafter,
    schedules_prefixes,
)
from sparkgap.errors import ConfigError
from sparkgap.graphs.captured import CapturedPasses
from sparkgap.graphs.counters import GraphCounters
from sparkgap.graphs.passes import Passes
from sparkgap.models.cache import allocate_caches, cache_block_bytes
from sparkgap.models.config import ModelConfig
from sparkgap.models.decoder import Decoder
from sparkgap.models.loading import build_target, check_tensors, expected_shapes
from sparkgap.models.rope import rotary_bytes
from sparkgap.ops import Kernels, KVCache, NativeKernels, make_kernels
from sparkgap.rounds.draft_length import DraftLengthPolicy, draft_lengths
from sparkgap.rounds.drawing import DeviceDraw
from sparkgap.rounds.lookup import LookupRunner, PromptLookup
from sparkgap.rounds.pipeline.admission import EngineFacts, Refusal, refusals
from sparkgap.rounds.pipeline.pipeline import Pipeline
from sparkgap.rounds.pipeline.runner import PipelinedRunner
from sparkgap.rounds.plain import PlainRunner
from sparkgap.rounds.sampling import Sampler
from sparkgap.rounds.sequence import Runner
from sparkgap.rounds.speculative import Speculation, SpeculativeRunner

_logger = logging.getLogger(__name__)

EngineQuantization: TypeAlias = Literal["w8a8", "w8a8-static"]
"""Quantization of a network: `w8a8` quantizes each row of activations by a scale of its own, `w8a8-static` by
calibrated scales."""


@dataclass(frozen=True)
class LoadedEngine:
    """An engine and what it was made of.

    Attributes:
        engine: ready to serve.
        checkpoint: the model's files, tokenizer and chat template.
        target: the network.
        caches: its KV caches.
        threads: compute threads.
        quantization: of the network's weights and activations; None without.
        speculation: the drafter; None without speculation.
        passes: what computes the rounds' passes.
        pipeline: what chains rounds on the device; None without.
        pipeline_refusals: why there is none.
        drafter_note: what a user should know of a drafter that comes with Sparkgap; None for nothing.
    """

    engine: Engine
    checkpoint: Checkpoint
    target: Decoder
    caches: Seq[KVCache]
    threads: int
    quantization: EngineQuantization | None
    speculation: ChosenDrafter | None
    passes: Passes
    pipeline: PipelinedRunner | None
    pipeline_refusals: tuple[Refusal, ...]
    drafter_note: str | None = None

    @property
    def graph_counters(self) -> GraphCounters:
        """Counts of captures, replays and eager passes; all zero with graphs off."""
        return self.passes.report() if isinstance(self.passes, CapturedPasses) else GraphCounters()

    @property
    def instruction_set(self) -> str | None:
        """The native kernels' variant; None where torch computes."""
        kernels = self.target.kernels
        return kernels.executor.variant if isinstance(kernels, NativeKernels) else None


def load_engine(config: EngineConfig, progress: ProgressReporter | None = None) -> LoadedEngine:
    """Find, read and set up the model that `config` names. Sets the number of torch's compute threads.

    Raises:
        ConfigError: a setting does not fit the model or the machine.
        ModelNotFoundError, DownloadError, CheckpointError, UnsupportedModelError: the model cannot be had.
    """
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype)
    # What is wrong with a drafter shows here, before the target is read.
    drafter = find_drafter(config, progress)
    checkpoint = open_checkpoint(config.model, allow_download=config.allow_download, progress=progress)
    drafter_note = None
    if drafter is None:
        drafter, drafter_note = find_shipped_drafter(config, checkpoint)
    model = ModelConfig.from_hf(checkpoint.config)
    quantization = resolve_quantization(config, device, model.quantization, checkpoint.name)
    threads = config.threads or usable_cores()
    kernels = make_kernels(device, dtype, None if quantization is None else "w8a8", threads)
    use_graphs = resolve_graphs(config, kernels)
    # The native kernels have threads of their own, which torch's must not compete with.
    torch.set_num_threads(1 if isinstance(kernels, NativeKernels) else threads)
    if drafter is not None:
        drafter.check_fits(model)
    max_model_len = resolve_max_model_len(config.max_model_len, model, checkpoint.name)
    check_tensors(model, checkpoint.weights)
    check_model_fits(
        checkpoint.name,
        weights_bytes=_weights_bytes(model, dtype, quantization),
        position_bytes=cache_block_bytes(model.num_layers, model.num_kv_heads, model.head_dim, 1, dtype)
        + rotary_bytes(model.rope, model.head_dim),
        max_model_len=max_model_len,
        available_bytes=available_memory_bytes(device),
    )
    with torch.inference_mode(), kept_weights(checkpoint, model, dtype, quantization, kernels) as prepared:
        target = build_target(
            model,
            checkpoint.weights,
            kernels=kernels,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            static_activations=quantization == "w8a8-static",
            prepared=prepared,
        )
    with torch.inference_mode():
        chosen = None if drafter is None else drafter.load(target, dtype, max_model_len)
        caches, draft_caches = _allocate(config, target, chosen, max_model_len)
    # Some checkpoints name end-of-sequence tokens that their network cannot give.
    eos_token_ids = tuple(i for i in checkpoint.eos_token_ids if i < model.vocab_size)
    draw = DeviceDraw(kernels) if isinstance(kernels, NativeKernels) else None
    sampler = Sampler(checkpoint.name, eos_token_ids, draw)
    captures = use_graphs and isinstance(kernels, NativeKernels)
    facts = _engine_facts(config, captures, chosen)
    # How rounds speculate; None where they do not.
    wanted = chosen.config if chosen is not None else config.speculative_config if config.lookup_tokens else None
    schedules = wanted is not None and schedules_prefixes(wanted, chosen, target, refusals(facts))
    speculation = None if chosen is None else _speculation(chosen, target, draft_caches, max_model_len)
    passes = Passes(target, caches, None if speculation is None else speculation.draft_model)
    if captures and isinstance(kernels, NativeKernels):
        passes = _capture(config, kernels, passes, speculation, max_model_len)
    if speculation is not None:
        runner: PlainRunner = SpeculativeRunner(target, caches, sampler, speculation, passes)
    elif (lookup := _prompt_lookup(wanted)) is not None:
        runner = LookupRunner(target, caches, sampler, lookup, config.lookup_tokens, max_model_len, passes)
    else:
        runner = PlainRunner(target, caches, sampler, passes)
    pipelined = _chain(
        config,
        runner,
        passes,
        kernels,
        facts,
        max_model_len,
        lookup_lengths=None if wanted is None else wanted.lookup_lengths,
        max_drafting=None if chosen is None else drafting_sequences(chosen, target, schedules),
        prefix_scheduling=schedules,
    )
    if isinstance(passes, CapturedPasses):
        _logger.info("%s", passes.counters.summary())
    limits = ModelLimits(checkpoint.name, model.vocab_size, eos_token_ids, max_model_len)
    served: Runner = runner if pipelined is None else pipelined
    reads_ahead = chosen is not None and chosen.drafter.reads_ahead
    engine = Engine(served, checkpoint.tokenizer, limits, config, caches[0].num_blocks, reads_ahead=reads_ahead)
    return LoadedEngine(
        engine,
        checkpoint,
        target,
        caches,
        threads,
        quantization,
        chosen,
        passes,
        pipelined,
        refusals(facts),
        drafter_note,
    )


def _weights_bytes(model: ModelConfig, dtype: torch.dtype, quantization: EngineQuantization | None) -> int:
    """Bytes of all weights: one an element where matrix products are quantized, `dtype`'s elsewhere."""
    total = 0
    for name, shape in expected_shapes(model).items():
        is_product = len(shape) == 2 and name != "model.embed_tokens.weight"
        total += prod(shape) * (1 if quantization and is_product else dtype.itemsize)
    return total


def resolve_device(name: str) -> torch.device:
    """The device of a setting: `auto` is an accelerator where there is one that the engine supports, else the CPU.

    Raises:
        ConfigError: there is no such device.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        # Apple's GPU lacks the float64 that sampling adds probabilities in.
        return torch.device("cpu") if accelerator is None or accelerator.type == "mps" else accelerator
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device must be auto, cpu or an accelerator such as cuda, got {name!r}") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if accelerator is None or accelerator.type != device.type:
        found = "none" if accelerator is None else accelerator.type
        raise ConfigError(f"device {name} is not usable here: the accelerator torch finds is {found}; use cpu")
    if device.index is not None and device.index >= torch.accelerator.device_count():
        raise ConfigError(f"device {name} does not exist: there are {torch.accelerator.device_count()}")
    return device


def resolve_dtype(name: str) -> torch.dtype:
    """The dtype of a setting."""
    dtypes = {
        "auto": torch.bfloat16,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "float32": torch.float32,
    }
    return dtypes[name]


def resolve_quantization(
    config: EngineConfig, device: torch.device, stored: CheckpointQuantization | None = None, model: str = ""
) -> EngineQuantization | None:
    """The quantization of the settings, for a model called `model` whose weights are `stored` so.

    Raises:
        ConfigError: the model's weights do not fit the settings.
    """
    wanted = config.quantization
    if stored is not None:
        if wanted == "none":
            raise ConfigError(f"model {model} is stored as int8 weights; use quantization auto, or its original")
        if stored.is_static and wanted in ("auto", "w8a8-static"):
            return "w8a8-static"
    if wanted == "w8a8-static":
        raise ConfigError(
            f"quantization w8a8-static needs calibrated activation scales, and model {model} has none; make them with "
            "`sparkgap quantize --scheme w8a8-static`, or use quantization w8a8"
        )
    by_default = wanted == "auto" and (stored is not None or (config.dtype == "auto" and device.type == "cpu"))
    return "w8a8" if by_default or wanted == "w8a8" else None


def resolve_graphs(config: EngineConfig, kernels: Kernels) -> bool:
    """Whether passes are captured.

    Raises:
        ConfigError: they are to be, and these kernels cannot be recorded.
    """
    if config.graphs == "on" and not isinstance(kernels, NativeKernels):
        raise ConfigError(
            f"graphs on needs the CPU's native kernels, and device {config.device} with dtype {config.dtype} runs on "
            "others; use graphs off, or device cpu with another dtype than float16"
        )
    if config.context_graph in ("compact", "masked") and not isinstance(kernels, NativeKernels):
        raise ConfigError(
            f"context_graph {config.context_graph} needs captured passes, and device {config.device} with dtype "
            f"{config.dtype} has none; use context_graph off"
        )
    return config.graphs != "off" and isinstance(kernels, NativeKernels)


def resolve_max_model_len(wanted: int | None, model: ModelConfig, name: str) -> int:
    """Most positions of a sequence.

    Raises:
        ConfigError: more are wanted than the model has.
    """
    longest = model.max_position_embeddings
    if wanted is not None and wanted > longest:
        raise ConfigError(f"max_model_len is {wanted}, and model {name} has {longest} positions; lower it")
    return wanted or longest


def _allocate(
    config: EngineConfig, target: Decoder, chosen: ChosenDrafter | None, max_model_len: int
) -> tuple[list[KVCache], list[KVCache]]:
    """KV caches of the target and context caches of the drafter (none without one), of as many blocks each."""
    network = target.config
    shapes = [(network.num_layers, network.num_kv_heads, network.head_dim)]
    if chosen is not None:
        shapes += chosen.drafter.cache_shapes
    num_blocks = kv_cache_blocks(
        config,
        block_bytes=sum(cache_block_bytes(*shape, config.block_size, target.dtype) for shape in shapes),
        max_model_len=max_model_len,
        available_bytes=available_memory_bytes(target.device),
        on_cpu=target.device.type == "cpu",
    )
    caches = [allocate_caches(*shape, num_blocks, config.block_size, target.dtype, target.device) for shape in shapes]
    return caches[0], [cache for part in caches[1:] for cache in part]


def _prompt_lookup(wanted: SpeculativeConfig | None) -> PromptLookup | None:
    """What finds drafts in a sequence's own past; None where nothing is looked up."""
    return None if wanted is None or wanted.lookup_lengths is None else PromptLookup(*wanted.lookup_lengths)


def _speculation(chosen: ChosenDrafter, target: Decoder, caches: Seq[KVCache], max_model_len: int) -> Speculation:
    return Speculation(
        drafter=chosen.drafter,
        caches=caches,
        num_speculative_tokens=chosen.num_speculative_tokens,
        sample_method="probabilistic" if chosen.config.draft_sample_method == "probabilistic" else "greedy",
        max_model_len=max_model_len,
        lookup=_prompt_lookup(chosen.config),
        length_policy=DraftLengthPolicy(chosen.num_speculative_tokens) if chosen.config.adaptive_length else None,
        max_sequences=drafting_sequences(chosen, target, schedules_prefixes=False),
    )


def _capture(
    config: EngineConfig, kernels: NativeKernels, passes: Passes, speculation: Speculation | None, max_model_len: int
) -> CapturedPasses:
    policy = None if speculation is None else speculation.length_policy
    looked_up = config.lookup_tokens
    verified = (looked_up,) if looked_up else () if policy is None else draft_lengths(policy.lengths[0])[1:]
    return CapturedPasses(
        passes.target,
        passes.caches,
        passes.drafting,
        executor=kernels.executor,
        max_sequences=config.max_num_seqs,
        max_model_len=max_model_len,
        sampled_drafts=speculation is not None and speculation.sample_method == "probabilistic",
        verified_lengths=verified,
        context_graph="masked" if config.context_graph == "auto" else config.context_graph,
    )


def _engine_facts(config: EngineConfig, captured: bool, chosen: ChosenDrafter | None) -> EngineFacts:
    return EngineFacts(
        str(config.task_pipeline),
        captured=captured,
        speculates=chosen is not None,
        samples_drafts=chosen is not None and chosen.config.draft_sample_method == "probabilistic",
        looks_up=bool(config.lookup_tokens),
        adapts_length=chosen is not None and chosen.config.adaptive_length,
        max_context_length=None if chosen is None else chosen.drafter.max_context_length,
    )


def _chain(
    config: EngineConfig,
    runner: PlainRunner,
    passes: Passes,
    kernels: Kernels,
    facts: EngineFacts,
    max_model_len: int,
    *,
    lookup_lengths: tuple[int, int] | None,
    max_drafting: int | None,
    prefix_scheduling: bool,
) -> PipelinedRunner | None:
    """The runner that chains rounds on the device; None where admission refuses it.

    Raises:
        ConfigError: it is wanted, and refused.
    """
    reasons = refusals(facts)
    if reasons and config.task_pipeline == "on":
        raise ConfigError(
            f"task_pipeline on is not possible: {'; '.join(reasons)}; use task_pipeline auto, or leave out what "
            "stands against it"
        )
    if reasons or not (isinstance(passes, CapturedPasses) and isinstance(kernels, NativeKernels)):
        return None
    pipeline = Pipeline(
        passes,
        kernels,
        max_sequences=config.max_num_seqs,
        max_model_len=max_model_len,
        counters=passes.counters,
        lookup_lengths=lookup_lengths,
        lookup_tokens=config.lookup_tokens,
        max_drafting=max_drafting,
        prefix_scheduling=prefix_scheduling,
    )
    passes.counters.memory_bytes += pipeline.nbytes
    passes.counters.capture_ms += pipeline.capture_ms
    passes.end_startup()
    return PipelinedRunner(runner, pipeline, facts)
