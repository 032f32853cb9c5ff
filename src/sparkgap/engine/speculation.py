"""From settings to a drafter: which one, and whether it fits."""

import logging
from dataclasses import dataclass

import torch

from sparkgap.catalog.checkpoint import Checkpoint
from sparkgap.catalog.drafters import DrafterCheckpoint, open_drafter
from sparkgap.catalog.progress import ProgressReporter
from sparkgap.catalog.shipped import match_shipped
from sparkgap.config import EngineConfig, SpeculativeConfig
from sparkgap.errors import ConfigError
from sparkgap.models.decoder import Decoder
from sparkgap.models.drafter import Drafter

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChosenDrafter:
    """A drafter that is ready to draft.

    Attributes:
        drafter: bound to the target.
        num_speculative_tokens: draft tokens a round.
        config: what was asked for.
    """

    drafter: Drafter
    num_speculative_tokens: int
    config: SpeculativeConfig


@dataclass(frozen=True)
class DrafterChoice:
    """Which drafter an engine has.

    Attributes:
        chosen: the drafter; None for plain decoding.
        note: what a user should know of a shipped drafter: why it is not used, or that it was made for another
            precision of the target. None when there is nothing to say.
    """

    chosen: ChosenDrafter | None = None
    note: str | None = None


def choose_drafter(
    config: EngineConfig,
    checkpoint: Checkpoint,
    target: Decoder,
    dtype: torch.dtype,
    max_model_len: int,
    progress: ProgressReporter | None = None,
) -> DrafterChoice:
    """The drafter that `config` names, else the one that comes with Sparkgap for this target, if there is one.

    Raises:
        ConfigError: speculation is configured without a drafter, and none comes with Sparkgap; the drafter is of
            another method, or was trained for fewer tokens than wanted.
        ModelNotFoundError, DownloadError, CheckpointError, UnsupportedModelError: the drafter cannot be had or does
            not fit the target.
    """
    if not config.speculation:
        return DrafterChoice()
    wanted = config.speculative_config or SpeculativeConfig()
    note = None
    if wanted.model is not None:
        draft_model = open_drafter(wanted.model, allow_download=config.allow_download, progress=progress)
    else:
        match = match_shipped(checkpoint)
        note = match.note
        if match.drafter is None and config.speculative_config is not None:
            raise ConfigError(
                f"speculation needs a drafter: {note or 'none comes with Sparkgap for this model'}; name one with "
                "--draft DIR (in Python: speculative_config={'model': DIR}), or train one with `sparkgap train`"
            )
        if note is not None:
            _logger.warning("%s", note)
        if match.drafter is None:
            return DrafterChoice(note=note)
        draft_model = match.drafter.open()
    _check_method(wanted, draft_model)
    drafter = Drafter.from_checkpoint(draft_model, target, target.kernels, dtype, max_model_len)
    by_default = draft_model.settings.default_speculative_tokens or drafter.config.max_speculative_tokens
    number = wanted.num_speculative_tokens or by_default
    drafter.config.block_rows(number)
    return DrafterChoice(ChosenDrafter(drafter, number, wanted), note)


def _check_method(wanted: SpeculativeConfig, checkpoint: DrafterCheckpoint) -> None:
    method = checkpoint.settings.method
    if wanted.method is not None and wanted.method != method:
        raise ConfigError(f"the speculative method is {wanted.method}, and drafter {checkpoint.name} is {method}")
