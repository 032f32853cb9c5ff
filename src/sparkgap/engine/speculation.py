"""From settings to a drafter: which one, and whether it fits."""

from dataclasses import dataclass

import torch

from sparkgap.catalog.drafters import DrafterCheckpoint, open_drafter
from sparkgap.catalog.progress import ProgressReporter
from sparkgap.config import EngineConfig, SpeculativeConfig
from sparkgap.errors import ConfigError
from sparkgap.models.decoder import Decoder
from sparkgap.models.drafter import Drafter


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


def choose_drafter(
    config: EngineConfig,
    target: Decoder,
    dtype: torch.dtype,
    max_model_len: int,
    progress: ProgressReporter | None = None,
) -> ChosenDrafter | None:
    """The drafter that `config` names, None when it names none or speculation is off.

    Raises:
        ConfigError: speculation is configured without a drafter; the drafter is of another method, or was trained
            for fewer tokens than wanted.
        ModelNotFoundError, DownloadError, CheckpointError, UnsupportedModelError: the drafter cannot be had or does
            not fit the target.
    """
    wanted = config.speculative_config
    if not config.speculation or wanted is None:
        return None
    if wanted.model is None:
        raise ConfigError(
            "speculation needs a drafter: name one with --draft DIR (in Python: speculative_config={'model': DIR}), "
            "or train one with `sparkgap train`"
        )
    checkpoint = open_drafter(wanted.model, allow_download=config.allow_download, progress=progress)
    _check_method(wanted, checkpoint)
    drafter = Drafter.from_checkpoint(checkpoint, target, target.kernels, dtype, max_model_len)
    number = wanted.num_speculative_tokens or drafter.config.max_speculative_tokens
    drafter.config.block_rows(number)
    return ChosenDrafter(drafter, number, wanted)


def _check_method(wanted: SpeculativeConfig, checkpoint: DrafterCheckpoint) -> None:
    method = checkpoint.settings.method
    if wanted.method is not None and wanted.method != method:
        raise ConfigError(f"the speculative method is {wanted.method}, and drafter {checkpoint.name} is {method}")
