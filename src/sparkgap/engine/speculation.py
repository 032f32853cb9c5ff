"""From settings to a drafter: which one, and whether it fits."""

from dataclasses import dataclass

import torch

from sparkgap.catalog.drafters import DrafterCheckpoint, open_drafter
from sparkgap.catalog.progress import ProgressReporter
from sparkgap.config import EngineConfig, SpeculativeConfig
from sparkgap.errors import ConfigError
from sparkgap.models.config import ModelConfig
from sparkgap.models.decoder import Decoder
from sparkgap.models.drafter import Drafter
from sparkgap.models.drafter_config import DrafterConfig


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
class FoundDrafter:
    """A drafter whose files are there and whose configuration is sound; no weight is read yet.

    Attributes:
        checkpoint: its files.
        num_speculative_tokens: draft tokens a round.
        wanted: what was asked for.
    """

    checkpoint: DrafterCheckpoint
    num_speculative_tokens: int
    wanted: SpeculativeConfig

    def check_fits(self, target: ModelConfig) -> None:
        """Check that the drafter was made for such a target. Raises what `DrafterConfig.check_fits` raises."""
        DrafterConfig.from_settings(self.checkpoint.settings, self.checkpoint.name).check_fits(target)

    def load(self, target: Decoder, dtype: torch.dtype, max_model_len: int) -> ChosenDrafter:
        """Read the weights.

        Raises:
            CheckpointError, UnsupportedModelError: the drafter does not fit the target, or is damaged.
        """
        drafter = Drafter.from_checkpoint(self.checkpoint, target, target.kernels, dtype, max_model_len)
        return ChosenDrafter(drafter, self.num_speculative_tokens, self.wanted)


def find_drafter(config: EngineConfig, progress: ProgressReporter | None = None) -> FoundDrafter | None:
    """The drafter that `config` names, None when it names none or speculation is off.

    Raises:
        ConfigError: speculation is configured without a drafter; the drafter is of another method, or was trained
            for fewer tokens than wanted.
        ModelNotFoundError, DownloadError, CheckpointError, UnsupportedModelError: the drafter cannot be had.
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
    drafter = DrafterConfig.from_settings(checkpoint.settings, checkpoint.name)
    number = wanted.num_speculative_tokens or drafter.max_speculative_tokens
    drafter.block_rows(number)
    return FoundDrafter(checkpoint, number, wanted)


def _check_method(wanted: SpeculativeConfig, checkpoint: DrafterCheckpoint) -> None:
    method = checkpoint.settings.method
    if wanted.method is not None and wanted.method != method:
        raise ConfigError(f"the speculative method is {wanted.method}, and drafter {checkpoint.name} is {method}")
