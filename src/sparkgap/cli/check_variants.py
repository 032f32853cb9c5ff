"""Which engines `sparkgap check` runs, of the lists in its options."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sparkgap.cli import loading
from sparkgap.cli.bench_options import check_positive, mode_configs, speculating_config
from sparkgap.cli.options import EngineOptions
from sparkgap.config import EXECUTION_MODES, EngineConfig
from sparkgap.errors import ConfigError

ALL_MODES = "all"
"""Names every execution mode at once."""

_NUMBER = re.compile("-?[0-9]{1,30}")
"""Longer ones are no settings of anything, and Python refuses to read very long ones."""


@dataclass(frozen=True)
class Variant:
    """One engine that is checked.

    Attributes:
        mode: its execution mode; None where none was named, and the engine's own settings decide.
        num_speculative_tokens: draft tokens a round; None for the drafter's own.
        config: all of its settings.
    """

    mode: str | None
    num_speculative_tokens: int | None
    config: EngineConfig

    @property
    def name(self) -> str:
        """What reports call it; empty where nothing was named."""
        number = self.num_speculative_tokens
        return " ".join(part for part in (self.mode, None if number is None else f"N={number}") if part)


def split_list(texts: Sequence[str] | None) -> list[str]:
    """The items of an option that takes lists with commas and may be repeated, each once, in order."""
    items = [item.strip() for text in texts or () for item in text.split(",")]
    return list(dict.fromkeys(items))


def number_list(name: str, texts: Sequence[str] | None) -> list[int]:
    """`split_list` as numbers of at least 1.

    Raises:
        ConfigError: an item is no such number; the message names the option, called `name`.
    """
    numbers = []
    for item in split_list(texts):
        if not _NUMBER.fullmatch(item):
            raise ConfigError(f"{name} must be a number or a list such as 1,3,8, got {item!r}")
        check_positive(name, int(item))
        numbers.append(int(item))
    return list(dict.fromkeys(numbers))


def read_modes(texts: Sequence[str] | None) -> list[str]:
    """The execution modes of an option, `all` being every one of them."""
    named = split_list(texts)
    return list(EXECUTION_MODES) if named == [ALL_MODES] else named


def make_variants(engine: EngineOptions, modes: Sequence[str], numbers: Sequence[int], num_seqs: int) -> list[Variant]:
    """The engines of every mode with every number of draft tokens.

    Args:
        engine: the options of all of them, which name no number of draft tokens.
        modes: execution modes; none leaves the engine's own settings.
        numbers: draft tokens a round; none leaves the drafter's own.
        num_seqs: sequences that are decoded together, at least.

    Raises:
        ConfigError: no such mode, a setting out of range or that contradicts a mode, or speculation is switched off.
        SparkgapError: with several engines, the drafter cannot be had or drafts fewer tokens.
    """
    variants: list[Variant] = []
    for number in numbers or (None,):
        config = speculating_config(replace(engine, num_speculative_tokens=number), num_seqs)
        if modes:
            variants += [Variant(mode, number, settings) for mode, settings in mode_configs(config, modes).items()]
        else:
            variants.append(Variant(None, number, config))
    variants.sort(key=lambda variant: 0 if variant.mode is None else modes.index(variant.mode))
    if len(variants) > 1:
        # What would end a sweep halfway shows before it begins.
        loading.num_draft_tokens(max(variants, key=lambda variant: variant.num_speculative_tokens or 0).config)
    return variants
