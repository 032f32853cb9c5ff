"""From settings to a drafter: which one, and whether it fits."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparkgap.catalog.checkpoint import Checkpoint
from sparkgap.catalog.drafters import DrafterCheckpoint, open_drafter
from sparkgap.catalog.progress import ProgressReporter
from sparkgap.catalog.shipped import match_shipped
from sparkgap.config import EngineConfig, SpeculativeConfig
from sparkgap.errors import ConfigError
from sparkgap.models.config import ModelConfig
from sparkgap.models.decoder import Decoder
from sparkgap.models.drafter import Drafter
from sparkgap.models.drafter_config import DrafterConfig
from sparkgap.models.mtp import MTPDrafter

_logger = logging.getLogger(__name__)

_PAYING_ROWS = 22
"""Rows that a round may draft and verify, all sequences together, where reading the weights is what takes the time.

Measured on one core (AVX-512 VNNI, smollm2-135m, 5 draft tokens): rounds of 1, 2, 3, 4 and 8 sequences take 1.6, 2.0,
2.4, 3.1 and 6.7 times as long as plain ones, and give 1.9 to 2.7 times as many tokens.
"""

_PAYING_SCHEDULED_ROWS = 33
"""The same where the device chooses how many draft tokens a round verifies.

Measured on two cores: answers of 1, 2, 3, 4 and 8 sequences came 1.75, 1.29, 1.11, 0.89 and 0.95 times as fast as
without drafts, and where all were verified 1.71, 1.26, 1.01, 0.73 and 0.67 times.
"""

_CACHED_WEIGHTS_BYTES = 32 << 20
"""Smaller weights stay in the processor's caches: nothing is read that more rows could share."""


@dataclass(frozen=True)
class ChosenDrafter:
    """A drafter that is ready to draft.

    Attributes:
        drafter: bound to the target.
        num_speculative_tokens: draft tokens a round.
        config: what was asked for.
    """

    drafter: Drafter | MTPDrafter
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
        kind = MTPDrafter if self.checkpoint.settings.method == "mtp" else Drafter
        drafter = kind.from_checkpoint(self.checkpoint, target, target.kernels, dtype, max_model_len)
        return ChosenDrafter(drafter, self.num_speculative_tokens, self.wanted)


def find_drafter(config: EngineConfig, progress: ProgressReporter | None = None) -> FoundDrafter | None:
    """The drafter that `config` names, None when it names none or speculation is off.

    Raises:
        ConfigError: the drafter is of another method than wanted, or was trained for fewer tokens.
        ModelNotFoundError, DownloadError, CheckpointError, UnsupportedModelError: the drafter cannot be had.
    """
    wanted = config.speculative_config
    if not config.speculation or wanted is None or wanted.model is None:
        return None
    return _found(wanted, open_drafter(wanted.model, allow_download=config.allow_download, progress=progress))


def find_shipped_drafter(config: EngineConfig, target: Checkpoint) -> tuple[FoundDrafter | None, str | None]:
    """The drafter that comes with Sparkgap for a target, for a configuration that names none.

    Returns:
        The drafter, None when there is none or speculation is off; and what a user should know, which is logged too:
        why a drafter of the target's name is not used, or that it was made for another precision of the target.

    Raises:
        ConfigError: speculation is configured, and no drafter comes with Sparkgap for this target; as `find_drafter`.
        CheckpointError, UnsupportedModelError: a drafter is damaged, or the target's tensors cannot be read.
    """
    wanted = config.speculative_config
    if not config.speculation or (wanted is not None and not wanted.needs_drafter):
        return None, None
    match = match_shipped(target, None if wanted is None else wanted.method)
    if match.drafter is None and config.speculative_config is not None:
        raise ConfigError(
            f"speculation needs a drafter: {match.note or 'none comes with Sparkgap for this model'}; name one with "
            "--draft DIR (in Python: speculative_config={'model': DIR}), or train one with `sparkgap train`"
        )
    if match.note is not None:
        _logger.warning("%s", match.note)
    if match.drafter is None:
        return None, match.note
    return _found(config.speculative_config or SpeculativeConfig(), match.drafter.open()), match.note


def drafting_sequences(chosen: ChosenDrafter, target: Decoder, schedules_prefixes: bool) -> int | None:
    """Most sequences of a round that drafts; None lets all draft.

    On CPUs a pass over few rows takes as long as reading the weights, and drafts are verified nearly for nothing; many
    rows take as long as their products, and every rejected one costs as much as a token.
    """
    config = chosen.config
    if not config.limits_batches:
        return config.disable_by_batch_size
    if not _reads_weights(target):
        return None
    paying = _PAYING_SCHEDULED_ROWS if schedules_prefixes else _PAYING_ROWS
    return max(paying // (2 * chosen.num_speculative_tokens + 1), 1)


def schedules_prefixes(
    config: SpeculativeConfig, chosen: ChosenDrafter | None, target: Decoder, pipeline_refusals: Sequence[str]
) -> bool:
    """Whether the device chooses how many draft tokens a round verifies.

    Args:
        config: what was asked for.
        chosen: the drafter; None where draft tokens are only looked up, which needs no confidences.
        target: what verifies.
        pipeline_refusals: why rounds are not chained on the device; none where they are.

    Raises:
        ConfigError: it is to, and cannot: the host carries the rounds, or the drafter gives no confidences.
    """
    wanted = config.prefix_scheduling
    if wanted and pipeline_refusals:
        raise ConfigError(
            f"prefix_scheduling needs the task pipeline, and {'; '.join(pipeline_refusals)}; leave one of them out"
        )
    knows_chances = chosen is None or chosen.drafter.config.settings.confidence_head
    if wanted and chosen is not None and not knows_chances:
        name = chosen.drafter.config.name
        raise ConfigError(
            f"prefix_scheduling goes by confidences, and drafter {name} has no confidence head; leave it out"
        )
    if pipeline_refusals or (chosen is not None and chosen.num_speculative_tokens == 1):
        return False
    return knows_chances and _reads_weights(target) if wanted is None else wanted


def _reads_weights(target: Decoder) -> bool:
    """Whether reading the weights is what a pass takes: small ones stay in caches, and only CPUs were measured."""
    return target.device.type == "cpu" and target.weight_bytes_per_token >= _CACHED_WEIGHTS_BYTES


def _found(wanted: SpeculativeConfig, checkpoint: DrafterCheckpoint) -> FoundDrafter:
    _check_method(wanted, checkpoint)
    drafter = DrafterConfig.from_settings(checkpoint.settings, checkpoint.name)
    number = wanted.num_speculative_tokens or checkpoint.settings.usual_speculative_tokens
    drafter.block_rows(number)
    return FoundDrafter(checkpoint, number, wanted)


def _check_method(wanted: SpeculativeConfig, checkpoint: DrafterCheckpoint) -> None:
    method = checkpoint.settings.method
    if wanted.method is not None and wanted.method != method:
        raise ConfigError(f"the speculative method is {wanted.method}, and drafter {checkpoint.name} is {method}")
