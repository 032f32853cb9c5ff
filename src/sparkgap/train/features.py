"""Files of sampled conversations with what the target computed of them, one safetensors file a shard."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from sparkgap.train.generation import Conversation
from sparkgap.train.kept import damaged, read_kept_tensors


def shard_bytes(positions: int, tap_width: int, top_k: int, dtype: torch.dtype) -> int:
    """Bytes on disk of `positions` positions."""
    return positions * (tap_width * dtype.itemsize + top_k * 6 + 4)


def write_shard(path: Path, conversations: Sequence[Conversation]) -> None:
    """Write a shard at once: the file is complete or absent."""
    lengths = [len(c.token_ids) for c in conversations]
    tensors = {
        "token_ids": torch.tensor([t for c in conversations for t in c.token_ids], dtype=torch.int32),
        "lengths": torch.tensor(lengths, dtype=torch.int64),
        "answer_starts": torch.tensor([c.answer_start for c in conversations], dtype=torch.int64),
        "temperatures": torch.tensor([c.temperature for c in conversations], dtype=torch.float32),
    }
    if conversations:
        for name in ("taps", "top_ids", "top_logprobs"):
            tensors[name] = torch.cat([getattr(c, name) for c in conversations]).cpu()
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    os.replace(partial, path)


def layer_columns(captured: Sequence[int], wanted: Sequence[int], hidden_size: int) -> list[slice] | None:
    """Columns of the states of layers `captured` that hold those of `wanted`; None where they are the same."""
    if tuple(captured) == tuple(wanted):
        return None
    return [slice(i * hidden_size, (i + 1) * hidden_size) for i in map(tuple(captured).index, wanted)]


@dataclass(frozen=True)
class Example:
    """A conversation in a shard. The last token has no taps: nothing was computed of it.

    Attributes:
        token_ids: int64 `[length]`.
        answer_start: first position of the answer.
        temperature: of the answer.
        shard: index of its shard in `Examples`.
        offset: first row of its taps in the shard.
    """

    token_ids: Tensor
    answer_start: int
    temperature: float
    shard: int
    offset: int

    @property
    def computed(self) -> int:
        """Positions with taps."""
        return self.token_ids.shape[0] - 1

    @property
    def answer_tokens(self) -> int:
        """Tokens of the answer."""
        return self.token_ids.shape[0] - self.answer_start


def _read_shard(path: Path) -> dict[str, Tensor]:
    remedy = "remove it and continue the run it belongs to, which samples it again"
    tensors = read_kept_tensors(path, ("token_ids", "lengths", "answer_starts", "temperatures"), remedy)
    lengths = tensors["lengths"]
    computed = int(lengths.sum()) - lengths.numel()
    rows = {"token_ids": computed + lengths.numel(), "answer_starts": lengths.numel(), "temperatures": lengths.numel()}
    rows |= dict.fromkeys(("taps", "top_ids", "top_logprobs"), computed) if lengths.numel() else {}
    for name, count in rows.items():
        if name not in tensors or tensors[name].shape[:1] != (count,):
            raise damaged(path, f"{name} does not have {count} rows", remedy)
    return tensors


class Examples:
    """Conversations of several shards, without those whose user turn came before. Taps stay in mapped files.

    Args:
        paths: the shards.
        columns: columns of the captured states that `taps` gives; None gives all.
    """

    def __init__(self, paths: Sequence[Path] = (), columns: Sequence[slice] | None = None) -> None:
        self._columns = columns
        self.items: list[Example] = []
        self._files: list[dict[str, Tensor]] = []
        self._seen: set[tuple[int, ...]] = set()
        for path in paths:
            self.add(path)

    def add(self, path: Path) -> None:
        """Append a shard's conversations.

        Raises:
            ConfigError: the file is damaged.
        """
        shard = len(self._files)
        self._files.append(_read_shard(path))
        tokens, offset, row = self._files[-1]["token_ids"].long(), 0, 0
        tensors = (self._files[-1][name].tolist() for name in ("lengths", "answer_starts", "temperatures"))
        for length, start, temperature in zip(*tensors, strict=True):
            ids = tokens[offset : offset + length]
            example = Example(ids, start, temperature, shard, row)
            offset, row = offset + length, row + length - 1
            turn = tuple(ids[:start].tolist())
            if turn not in self._seen:
                self._seen.add(turn)
                self.items.append(example)

    @property
    def answer_tokens(self) -> int:
        """Answer tokens of all conversations."""
        return sum(item.answer_tokens for item in self.items)

    def taps(self, example: Example) -> Tensor:
        """`[computed, m * hidden]`, captured hidden states."""
        taps = self._rows(example, "taps")
        if self._columns is None:
            return taps
        parts = [taps[:, part] for part in self._columns]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def top(self, example: Example) -> tuple[Tensor, Tensor]:
        """Target ids int32 and log-probabilities float16 `[computed, k]` of the most probable next tokens."""
        return self._rows(example, "top_ids"), self._rows(example, "top_logprobs")

    def _rows(self, example: Example, name: str) -> Tensor:
        return self._files[example.shard][name][example.offset : example.offset + example.computed]
