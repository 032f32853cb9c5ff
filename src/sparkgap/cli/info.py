"""`sparkgap info`: what this machine offers, which models are here, and the facts of one model."""

import os
import platform
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparkgap import __version__
from sparkgap.cli.cache import cached_models
from sparkgap.cli.console import format_bytes, print_json, use_utf8_output, write_text
from sparkgap.cli.interrupts import ending_at_once
from sparkgap.config import EngineConfig

if TYPE_CHECKING:
    from sparkgap.catalog.shipped import ShippedDrafter


def info(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Report this model instead of the machine; it is not downloaded."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Report as one JSON object.")] = False,
) -> None:
    """Show the machine and the models that are here, or the facts of one model."""
    use_utf8_output()
    with ending_at_once():
        facts = machine_facts() if model is None else model_facts(model)
    if as_json:
        print_json(facts)
    else:
        _print_table(_readable(facts))


def machine_facts() -> dict[str, Any]:
    """Versions, processor, memory, device and cached models, in JSON's types; sizes in bytes."""
    import torch

    from sparkgap import _native
    from sparkgap.catalog.packed_files import packed_files
    from sparkgap.catalog.store import cache_root
    from sparkgap.device.host import available_memory_bytes, usable_cores
    from sparkgap.engine.loading import resolve_device, resolve_dtype, resolve_quantization

    defaults = EngineConfig()
    device = resolve_device(defaults.device)
    return {
        "version": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "device": str(device),
        "dtype": str(resolve_dtype(defaults.dtype)).removeprefix("torch."),
        "quantization": resolve_quantization(defaults, device) or "none",
        "task_pipeline": _task_pipeline(device.type == "cpu"),
        "cores": {"usable": usable_cores(), "total": os.cpu_count()},
        "instruction_sets": [name for name, present in _native.cpu_features().items() if present],
        "memory": {
            "total_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            "available_bytes": available_memory_bytes(torch.device("cpu")),
        },
        "cache_directory": str(cache_root()),
        "packed_weights_bytes": sum(path.stat().st_size for path in packed_files()),
        "models": cached_models(),
        "shipped_drafters": _shipped_drafters(),
    }


def _task_pipeline(captured: bool) -> str:
    """Whether rounds are chained on the device where nothing is said, and if not why."""
    from sparkgap.rounds.pipeline.admission import EngineFacts, refusals

    facts = EngineFacts(
        "auto",
        captured=captured,
        speculates=False,
        samples_drafts=False,
        looks_up=False,
        adapts_length=False,
        max_context_length=None,
    )
    reasons = refusals(facts)
    return f"off: {'; '.join(reasons)}" if reasons else "on"


def _shipped_drafters() -> list[str]:
    from sparkgap.catalog.shipped import shipped_drafters

    return [drafter.path.name for drafter in shipped_drafters()]


def model_facts(model: str) -> dict[str, Any]:
    """A model's architecture, sizes and limits, in JSON's types.

    Raises:
        SparkgapError: the model is not here, damaged, or of a kind that is not supported.
    """
    from math import prod

    from sparkgap.catalog.checkpoint import open_checkpoint
    from sparkgap.catalog.shipped import match_shipped
    from sparkgap.engine.loading import resolve_dtype
    from sparkgap.models.cache import cache_block_bytes
    from sparkgap.models.config import ModelConfig

    EngineConfig(model=model)
    checkpoint = open_checkpoint(model, allow_download=False)
    config = ModelConfig.from_hf(checkpoint.config)
    weights = checkpoint.weights
    shape = (config.num_layers, config.num_kv_heads, config.head_dim)
    match, mtp = match_shipped(checkpoint), match_shipped(checkpoint, "mtp").drafter
    also_mtp = mtp is not None and mtp != match.drafter and mtp.settings.method == "mtp"
    return {
        "model": checkpoint.name,
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "architecture": config.architecture,
        "parameters": sum(prod(weights.shape(name)) for name in weights.names()),
        "size_bytes": checkpoint.size_bytes,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "attention_heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocabulary": config.vocab_size,
        "context": config.max_position_embeddings,
        "kv_bytes_per_token": cache_block_bytes(*shape, 1, resolve_dtype(EngineConfig.dtype)),
        "chat_template": checkpoint.tokenizer.chat_template is not None,
        "drafter": None if match.drafter is None else _drafter_facts(match.drafter),
        "mtp_drafter": _drafter_facts(mtp) if mtp is not None and also_mtp else None,
        "drafter_note": match.note,
    }


def _drafter_facts(drafter: "ShippedDrafter") -> dict[str, Any]:
    from sparkgap.catalog.files import directory_bytes

    settings = drafter.settings
    return {
        "name": drafter.name,
        "path": str(drafter.path),
        "size_bytes": directory_bytes(drafter.path),
        "method": settings.method,
        "num_speculative_tokens": settings.usual_speculative_tokens,
        "max_speculative_tokens": settings.max_speculative_tokens,
    }


def _readable(facts: dict[str, Any]) -> dict[str, str]:
    """Labels and values for people: sizes in units, lists in words."""
    table: dict[str, str] = {}
    for key, value in facts.items():
        label = key.removesuffix("_bytes").replace("_", " ")
        if key == "models":
            names = [f"{entry['name']} ({format_bytes(entry['size_bytes'])})" for entry in value]
            table[label] = ", ".join(names) or "none; sparkgap pull fetches one"
        elif key == "drafter":
            table[label] = "none comes with Sparkgap for this model" if value is None else _drafter_line(value)
        elif value is None:
            continue
        elif key == "mtp_drafter":
            table["MTP drafter"] = _drafter_line(value)
        elif key == "cores":
            table[label] = f"{value['usable']} usable of {value['total']}"
        elif key == "memory":
            sizes = [f"{format_bytes(size)} {name.removesuffix('_bytes')}" for name, size in value.items()]
            table[label] = ", ".join(sizes)
        elif key == "size_bytes":
            table["size"] = format_bytes(value)
        elif key == "packed_weights_bytes":
            table[label] = f"{format_bytes(value)} in the cache; sparkgap cache --clear removes them"
        elif key == "kv_bytes_per_token":
            table["KV cache per token"] = f"{format_bytes(value)} (bfloat16)"
        elif isinstance(value, bool):
            table[label] = "yes" if value else "no"
        elif isinstance(value, int):
            table[label] = f"{value:,}"
        else:
            table[label] = (", ".join(value) or "none") if isinstance(value, list) else str(value)
    return table


def _drafter_line(drafter: dict[str, Any]) -> str:
    size, number = format_bytes(drafter["size_bytes"]), drafter["num_speculative_tokens"]
    return f"{drafter['name']}, {drafter['method']}, {number} draft tokens a round, {size}"


def _print_table(rows: dict[str, str]) -> None:
    width = max(map(len, rows)) + 2
    for label, value in rows.items():
        write_text(f"{label:<{width}}{value}\n")
