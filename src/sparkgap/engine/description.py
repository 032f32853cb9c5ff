"""What is loaded, as data for people and programs."""

from typing import Any

from sparkgap import __version__
from sparkgap.config import EngineConfig
from sparkgap.engine.loading import LoadedEngine
from sparkgap.engine.speculation import drafting_sequences
from sparkgap.graphs.captured import CapturedPasses


def describe(loaded: LoadedEngine, config: EngineConfig) -> dict[str, Any]:
    """Model, settings as resolved, sizes in bytes.

    Args:
        loaded: the engine.
        config: what it was asked to be.
    """
    target, limits = loaded.target, loaded.engine.model
    cache = loaded.caches[0]
    cache_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in loaded.caches)
    return {
        "version": __version__,
        "model": loaded.checkpoint.name,
        "path": str(loaded.checkpoint.path),
        "format": loaded.checkpoint.format,
        "architecture": target.config.architecture,
        "file_bytes": loaded.checkpoint.size_bytes,
        "device": str(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "quantization": loaded.quantization,
        "threads": loaded.threads,
        "instruction_set": loaded.instruction_set,
        "weight_bytes_per_token": target.weight_bytes_per_token,
        "vocab_size": target.config.vocab_size,
        "eos_token_ids": list(limits.eos_token_ids),
        "max_model_len": limits.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "enable_prefix_caching": config.enable_prefix_caching,
        "block_size": cache.block_size,
        "kv_cache_blocks": cache.num_blocks,
        "kv_cache_tokens": cache.num_blocks * cache.block_size,
        "kv_cache_bytes": cache_bytes,
        "speculation": _speculation(loaded, config),
        "drafter_note": loaded.drafter_note,
        "graphs": _graphs(loaded),
        "task_pipeline": _pipeline(loaded),
    }


def _graphs(loaded: LoadedEngine) -> dict[str, Any] | None:
    passes, counters = loaded.passes, loaded.graph_counters
    if not isinstance(passes, CapturedPasses):
        return None
    return {
        "captures": counters.captures_at_startup,
        "capture_ms": counters.capture_ms,
        "memory_bytes": counters.memory_bytes,
        "sequences": list(passes.buckets),
        "context_graph": passes.context_graph,
    }


def _pipeline(loaded: LoadedEngine) -> dict[str, Any]:
    runner = loaded.pipeline
    if runner is None:
        return {"active": False, "refused": list(loaded.pipeline_refusals)}
    return {
        "active": True,
        "slots": len(runner.pipeline.slots),
        "memory_bytes": runner.pipeline.nbytes,
        "refused_rounds": dict(runner.refused),
    }


def _prefix_scheduling(loaded: LoadedEngine) -> dict[str, Any] | None:
    """What the device chooses the number of verified draft tokens by; None where a round verifies all."""
    pipeline = None if loaded.pipeline is None else loaded.pipeline.pipeline
    costs = None if pipeline is None or not pipeline.prefix_scheduling else pipeline.costs
    if costs is None:
        return None
    return {
        "verified_tokens": costs.lengths.tolist(),
        "passes_ms": costs.as_dict(),
        "ms_per_position": costs.growth.tolist(),
        "measure_ms": costs.measure_ms,
    }


def _speculation(loaded: LoadedEngine, config: EngineConfig) -> dict[str, Any] | None:
    chosen, number = loaded.speculation, config.lookup_tokens
    if chosen is None:
        if not number or config.speculative_config is None:
            return None
        lengths = config.speculative_config.lookup_lengths
        return {
            "method": "ngram",
            "num_speculative_tokens": number,
            "prompt_lookup": lengths,
            "prefix_scheduling": _prefix_scheduling(loaded),
        }
    drafter, scheduling = chosen.drafter.config, _prefix_scheduling(loaded)
    settings = drafter.settings
    return {
        "drafter": drafter.name,
        "method": settings.method,
        "num_speculative_tokens": chosen.num_speculative_tokens,
        "draft_sample_method": chosen.config.draft_sample_method,
        "disable_by_batch_size": drafting_sequences(chosen, loaded.target, scheduling is not None),
        "prompt_lookup": chosen.config.lookup_lengths,
        "prefix_scheduling": scheduling,
        "parameters": chosen.drafter.num_parameters,
        "draft_vocab_size": settings.draft_vocab_size,
        "target_layer_ids": list(settings.target_layer_ids),
        "max_context_length": chosen.drafter.max_context_length,
    }
