"""From settings to an engine that is ready to serve."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from sparkgap.catalog.checkpoint import Checkpoint, open_checkpoint
from sparkgap.catalog.progress import ProgressReporter
from sparkgap.config import EngineConfig
from sparkgap.device.host import available_memory_bytes, usable_cores
from sparkgap.engine.engine import Engine, ModelLimits
from sparkgap.engine.memory import kv_cache_blocks
from sparkgap.errors import ConfigError
from sparkgap.models.cache import allocate_caches, cache_block_bytes
from sparkgap.models.config import ModelConfig
from sparkgap.models.decoder import Decoder
from sparkgap.models.loading import load_target
from sparkgap.ops import KVCache, make_kernels
from sparkgap.rounds.plain import PlainRunner
from sparkgap.rounds.sampling import Sampler


@dataclass(frozen=True)
class LoadedEngine:
    """An engine and what it was made of.

    Attributes:
        engine: ready to serve.
        checkpoint: the model's files, tokenizer and chat template.
        target: the network.
        caches: its KV caches.
        threads: compute threads.
    """

    engine: Engine
    checkpoint: Checkpoint
    target: Decoder
    caches: Seq[KVCache]
    threads: int


def load_engine(config: EngineConfig, progress: ProgressReporter | None = None) -> LoadedEngine:
    """Find, read and set up the model that `config` names. Sets the number of torch's compute threads.

    Raises:
        ConfigError: a setting does not fit the model or the machine.
        ModelNotFoundError, DownloadError, CheckpointError, UnsupportedModelError: the model cannot be had.
    """
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype)
    threads = config.threads or usable_cores()
    torch.set_num_threads(threads)
    checkpoint = open_checkpoint(config.model, allow_download=config.allow_download, progress=progress)
    model = ModelConfig.from_hf(checkpoint.config)
    max_model_len = resolve_max_model_len(config.max_model_len, model, checkpoint.name)
    with torch.inference_mode():
        target = load_target(
            checkpoint.config,
            checkpoint.weights,
            kernels=make_kernels(device),
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
        )
        caches = _allocate(config, model, max_model_len, dtype, device)
    # Some checkpoints name end-of-sequence tokens that their network cannot give.
    eos_token_ids = tuple(i for i in checkpoint.eos_token_ids if i < model.vocab_size)
    runner = PlainRunner(target, caches, Sampler(checkpoint.name, eos_token_ids))
    limits = ModelLimits(checkpoint.name, model.vocab_size, eos_token_ids, max_model_len)
    engine = Engine(runner, checkpoint.tokenizer, limits, config, caches[0].num_blocks)
    return LoadedEngine(engine, checkpoint, target, caches, threads)


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
    config: EngineConfig, model: ModelConfig, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> list[KVCache]:
    shape = (model.num_layers, model.num_kv_heads, model.head_dim)
    num_blocks = kv_cache_blocks(
        config,
        block_bytes=cache_block_bytes(*shape, config.block_size, dtype),
        max_model_len=max_model_len,
        available_bytes=available_memory_bytes(device),
        on_cpu=device.type == "cpu",
    )
    return allocate_caches(*shape, num_blocks, config.block_size, dtype, device)
