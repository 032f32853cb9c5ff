"""A tiny target, and settings that train on it in a second or two."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from sparkgap.train.config import (
    ConversationConfig,
    FeatureConfig,
    NetworkConfig,
    OptimizationConfig,
    TrainConfig,
)
from sparkgap.train.progress import Progress
from tests.tiny_model import write_tiny_model


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(
        tmp_path_factory.mktemp("target") / "tiny", std=0.3, num_hidden_layers=2, max_position_embeddings=128
    )


def make_settings(target: Path, out: Path, **changes: Any) -> TrainConfig:
    """A small run's settings; keywords replace fields of any stage by its name, such as `optimization={...}`."""
    conversation = {
        "answer_tokens": 100, "lanes": 4, "shard_conversations": 4, "max_positions": 48,
        "max_user_tokens": 10, "min_answer_tokens": 4, "answer_temperatures": (0.0,),
    }  # fmt: skip
    optimization = {
        "steps": 6, "anchors_per_step": 24, "anchors_per_conversation": 8, "held_out_conversations": 2,
        "evaluation_interval": 3, "checkpoint_interval_s": 1e-6, "warmup_steps": 2,
    }  # fmt: skip
    network = {"draft_vocab_size": 160, "markov_rank": 4, "num_layers": 1, "num_speculative_tokens": 3}
    parts = {
        "conversation": ConversationConfig(**conversation | changes.pop("conversation", {})),
        "features": FeatureConfig(**{"top_k": 8} | changes.pop("features", {})),
        "optimization": OptimizationConfig(**optimization | changes.pop("optimization", {})),
        "network": NetworkConfig(**network | changes.pop("network", {})),
    }
    return TrainConfig(str(target), out, device="cpu", **{"workers": 2} | parts | changes)


@pytest.fixture
def settings(tiny_target: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """`make_settings` on the tiny target, in a directory of the test's own."""

    def make(out: str = "out", **changes: Any) -> TrainConfig:
        return make_settings(tiny_target, tmp_path / out, **changes)

    return make


@pytest.fixture(scope="session")
def quiet() -> Progress:
    return Progress(Console(quiet=True))
