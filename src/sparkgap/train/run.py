"""The three stages in one directory: conversations, training, evaluation. Everything is kept, so that running the same
command again continues where it stopped."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sparkgap.catalog.checkpoint import Checkpoint, open_checkpoint
from sparkgap.config import DEFAULT_MODEL
from sparkgap.errors import ConfigError
from sparkgap.models.decoder import Decoder
from sparkgap.models.loading import load_target
from sparkgap.train.config import ConversationConfig, FeatureConfig
from sparkgap.train.conversations import collect
from sparkgap.train.generation import LaneKernels
from sparkgap.train.progress import Progress
from sparkgap.train.template import turn_template


def open_target(model: str, device: torch.device, max_positions: int, progress: Progress) -> tuple[Checkpoint, Decoder]:
    """The target in bfloat16, with the kernels that many conversations at a time want."""
    checkpoint = open_checkpoint(model)
    target = load_target(
        checkpoint.config,
        checkpoint.weights,
        kernels=LaneKernels(),
        dtype=torch.bfloat16,
        device=device,
        max_model_len=max_positions,
    )
    progress.log(f"target {checkpoint.name}: {target.config.num_layers} layers of {target.config.hidden_size}")
    return checkpoint, target


def sample_conversations(
    work: Path,
    model: str,
    device: torch.device,
    workers: int,
    config: ConversationConfig,
    features: FeatureConfig,
    seed: int,
    progress: Progress,
) -> list[Path]:
    """Stage 1: shards of conversations in `work`."""
    checkpoint, target = open_target(model, device, config.max_positions, progress)
    template = turn_template(checkpoint)
    return collect(
        work / "conversations", target, workers, template, checkpoint.tokenizer, config, features, seed, progress
    )
