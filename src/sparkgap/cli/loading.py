"""From the options to a model that is ready, with its download and loading shown."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING

from sparkgap.cli.console import DownloadProgress, format_bytes, print_note, status, stderr_console
from sparkgap.cli.interrupts import ending_at_once
from sparkgap.config import EngineConfig

if TYPE_CHECKING:
    from sparkgap.api import LLM


@contextmanager
def _collection_paused() -> Iterator[None]:
    """No search for garbage while hundreds of thousands of objects come to stay, and none among them afterwards."""
    was_enabled = gc.isenabled()
    if gc.get_freeze_count():
        # A model that was loaded before may be garbage by now.
        gc.unfreeze()
        gc.collect()
    gc.disable()
    try:
        yield
        gc.freeze()
        # At the end they are to be taken apart like all others: the native module reports what is left over.
        atexit.register(gc.unfreeze)
    finally:
        if was_enabled:
            gc.enable()


def load_llm(config: EngineConfig) -> "LLM":
    """The model of a configuration; it and its drafter are downloaded if they are not here yet.

    Raises:
        SparkgapError: it is not found, damaged, or of a kind that is not supported.
    """
    from sparkgap.catalog.resolve import resolve

    _fetch_drafter(config)
    resolve(config.model, allow_download=config.allow_download, progress=DownloadProgress())
    with status(f"loading {config.model} ..."), _collection_paused():
        with ending_at_once():
            from sparkgap.api import LLM

        llm = LLM(**{field.name: getattr(config, field.name) for field in fields(config)})
    graphs = llm.info()["graphs"]
    if graphs is not None and stderr_console().is_terminal:
        size = format_bytes(graphs["memory_bytes"])
        print_note(f"captured {graphs['captures']} graphs in {graphs['capture_ms'] / 1000:.2f} s, {size}")
    return llm


def num_draft_tokens(config: EngineConfig) -> int:
    """Draft tokens a round, by the configuration or by the drafter's files, which are downloaded if need be.

    Raises:
        SparkgapError: no drafter is named and none comes with Sparkgap for the model, it is not found, damaged, or of a
            kind that is not supported.
    """
    if config.lookup_tokens:
        return config.lookup_tokens
    _fetch_drafter(config)
    from sparkgap.catalog.checkpoint import open_checkpoint
    from sparkgap.engine.speculation import find_drafter, find_shipped_drafter

    found = find_drafter(config)
    if found is None:
        target = open_checkpoint(config.model, allow_download=config.allow_download, progress=DownloadProgress())
        found, _ = find_shipped_drafter(config, target)
    return 0 if found is None else found.num_speculative_tokens


def _fetch_drafter(config: EngineConfig) -> None:
    """What is wrong with a drafter's name shows before a target is downloaded."""
    from sparkgap.catalog.resolve import resolve_drafter

    wanted = config.speculative_config if config.speculation else None
    if wanted is not None and wanted.model is not None:
        resolve_drafter(wanted.model, allow_download=config.allow_download, progress=DownloadProgress())
