"""What quantization costs: perplexity, and the distance of next-token distributions from the float32 reference."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from sparkgap.api import LLM
from sparkgap.engine.scoring import windows_of
from sparkgap.errors import PromptError

_ROWS_AT_ONCE = 128
"""Rows whose logits are held together."""


@dataclass(frozen=True)
class Quality:
    """How one way of computing a model reads a text.

    Attributes:
        tokens: tokens predicted.
        perplexity: e to the mean negative log-probability of the text's tokens.
        mean_kl: mean Kullback-Leibler divergence of the next-token distribution from the reference's, in nats a
            token: `sum p_reference * ln(p_reference / p)`.
        kl_99: 99th percentile of the divergences of single tokens.
        top1_agreement: share of tokens at which both find the same token most probable.
        weight_bytes_per_token: bytes of weights that a pass of one row reads.
    """

    tokens: int
    perplexity: float
    mean_kl: float
    kl_99: float
    top1_agreement: float
    weight_bytes_per_token: int


class Reference:
    """The reference's reading of a text: its hidden states, from which its distributions are computed again.

    Args:
        llm: the model in float32, without quantization.
        windows: token ids of the text's pieces.
        advance: told how many pieces are done.
    """

    def __init__(self, llm: LLM, windows: Sequence[list[int]], advance: Callable[[int], None]) -> None:
        self.llm = llm
        self.windows = windows
        self.hidden: list[Tensor] = []
        for window in windows:
            self.hidden.append(llm.hidden_states(window))
            advance(1)


def measure_quality(llm: LLM, reference: Reference, advance: Callable[[int], None] = lambda number: None) -> Quality:
    """Read the reference's text with another way of computing its model.

    Raises:
        EngineError: it gives infinities or NaN.
    """
    losses, divergences, agreements = [], [], []
    for window, expected in zip(reference.windows, reference.hidden, strict=True):
        hidden = llm.hidden_states(window)
        for start in range(0, len(window) - 1, _ROWS_AT_ONCE):
            rows = slice(start, min(start + _ROWS_AT_ONCE, len(window) - 1))
            following = torch.tensor(window[rows.start + 1 : rows.stop + 1], device=hidden.device)
            found = llm.logits(hidden[rows]).log_softmax(-1)
            wanted = reference.llm.logits(expected[rows]).log_softmax(-1)
            losses.append(-found.gather(1, following[:, None])[:, 0])
            divergences.append((wanted.exp() * (wanted - found)).sum(-1))
            agreements.append(found.argmax(-1) == wanted.argmax(-1))
        advance(1)
    loss, divergence = (torch.cat(parts).to(torch.float64).cpu() for parts in (losses, divergences))
    return Quality(
        tokens=len(loss),
        perplexity=math.exp(float(loss.mean())),
        mean_kl=float(divergence.mean()),
        kl_99=float(divergence.quantile(0.99)),
        top1_agreement=float(torch.cat(agreements).to(torch.float64).mean()),
        weight_bytes_per_token=llm.info()["weight_bytes_per_token"],
    )


def held_text() -> str:
    """Text that was written for this measurement and trained on by nobody: stories, letters, minutes, explanations,
    a program and a calculation, in English, about 2,000 words."""
    return resources.files("sparkgap.bench").joinpath("held_text.txt").read_text(encoding="utf-8")


def read_text(file: Path) -> str:
    """A text file.

    Raises:
        PromptError: it cannot be read, or is not UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise PromptError(f"cannot read text file {file}: {error.strerror}; check the path") from error
    except ValueError as error:
        raise PromptError(f"text file {file} is not valid UTF-8; convert it to UTF-8") from error


def text_windows(llm: LLM, text: str, context: int, limit: int | None = None) -> list[list[int]]:
    """A text's tokens in pieces of `context`, each read on its own.

    Args:
        llm: whose tokens.
        text: any.
        context: most tokens of a piece.
        limit: most tokens of all.

    Raises:
        PromptError: fewer than two tokens.
    """
    pieces = windows_of(llm.tokenizer.encode(text)[:limit], context)
    if not pieces:
        raise PromptError("the text has fewer than two tokens: nothing can be predicted")
    return pieces
