"""A driver of runners and drafters of every character, for tests."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from drafter_cases import SETTINGS, VOCAB, checkpoint, random_target, random_tensors
from torch import Tensor

from sparkgap.config import SamplingParams
from sparkgap.models.cache import allocate_caches
from sparkgap.models.drafter import Drafter
from sparkgap.models.heads import DraftOutput, Pick, Proposal
from sparkgap.ops.operands import KVCache
from sparkgap.rounds.plain import PlainRunner
from sparkgap.rounds.sampling import Sampler
from sparkgap.rounds.sequence import PrefillChunk, RoundOutput, Sequence
from sparkgap.rounds.speculative import Speculation, SpeculativeRunner

BLOCK = 4
BLOCKS = 160
EOS = 1


def caches_for(layers: int, kv_heads: int, head_dim: int) -> list[KVCache]:
    caches = allocate_caches(layers, kv_heads, head_dim, BLOCKS, BLOCK, torch.float32, torch.device("cpu"))
    for cache in caches:
        cache.keys.fill_(torch.nan)
        cache.values.fill_(torch.nan)
    return caches


def plain_runner(target: Any) -> PlainRunner:
    config = target.config
    caches = caches_for(config.num_layers, config.num_kv_heads, config.head_dim)
    return PlainRunner(target, caches, Sampler("tiny", [EOS]))


def speculative_runner(
    target: Any, drafter: Any, num_speculative_tokens: int = 4, method: Any = "greedy", max_model_len: int = 96
) -> SpeculativeRunner:
    config = target.config
    backbone = drafter.config.backbone
    speculation = Speculation(
        drafter,
        caches_for(backbone.num_layers, backbone.num_kv_heads, backbone.head_dim),
        num_speculative_tokens,
        method,
        max_model_len,
    )
    caches = caches_for(config.num_layers, config.num_kv_heads, config.head_dim)
    return SpeculativeRunner(target, caches, Sampler("tiny", [EOS]), speculation)


def real_drafter(target: Any, seed: int = 3, **changes: Any) -> Drafter:
    settings = replace(SETTINGS, **changes)
    return Drafter.from_checkpoint(
        checkpoint(settings, random_tensors(settings, seed)), target, target.kernels, torch.float32
    )


@dataclass
class Driver:
    """Feeds sequences to a runner as an engine does, with blocks scattered over the cache."""

    runner: PlainRunner
    free: list[int] = field(default_factory=list)
    outputs: list[tuple[int, RoundOutput]] = field(default_factory=list)
    max_model_len: int = 96

    def __post_init__(self) -> None:
        self.free = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(9)).tolist()

    def blocks(self, sequence: Sequence, end: int) -> None:
        while len(sequence.block_table) * BLOCK < min(end, self.max_model_len):
            sequence.block_table.append(self.free.pop())

    def prefill(self, sequences: Seq[Sequence], chunk: int = 1000) -> None:
        waiting = list(sequences)
        while waiting:
            ends = [min(s.num_computed_tokens + chunk, s.num_tokens) for s in waiting]
            for sequence, end in zip(waiting, ends, strict=True):
                self.blocks(sequence, end)
            unfinished = [s for s, end in zip(waiting, ends, strict=True) if end < s.num_tokens]
            chunks = [PrefillChunk(s, end) for s, end in zip(waiting, ends, strict=True)]
            for sequence, output in zip(waiting, self.runner.prefill(chunks), strict=True):
                if output is not None:
                    self.take(sequence, output)
            waiting = unfinished

    def decode(self, sequences: Seq[Sequence]) -> list[RoundOutput]:
        for sequence in sequences:
            self.blocks(sequence, sequence.num_computed_tokens + self.runner.num_lookahead_tokens)
        outputs = self.runner.decode(sequences)
        for sequence, output in zip(sequences, outputs, strict=True):
            self.take(sequence, output)
        return outputs

    def take(self, sequence: Sequence, output: RoundOutput) -> None:
        self.outputs.append((sequence.sequence_id, output))
        room = self.max_model_len - sequence.num_tokens
        sequence.output_token_ids += [token.token_id for token in output.tokens][:room]

    def generate(self, sequences: Seq[Sequence], num_tokens: int, chunk: int = 1000) -> list[list[int]]:
        """At least `num_tokens` output tokens of each (fewer at the context's end), cut to that many."""
        self.prefill(sequences, chunk)
        while True:
            running = [
                s for s in sequences if len(s.output_token_ids) < num_tokens and s.num_tokens < self.max_model_len
            ]
            if not running:
                return [s.output_token_ids[:num_tokens] for s in sequences]
            self.decode(running)


def sequences_of(lengths: Seq[int], params: Seq[SamplingParams], seed: int = 0) -> list[Sequence]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Sequence(i, p, 1000 + i, torch.randint(2, VOCAB, (length,), generator=generator).tolist())
        for i, (length, p) in enumerate(zip(lengths, params, strict=True))
    ]


class ScriptedDrafter:
    """Wraps a drafter: its passes and context run, its proposals are replaced.

    `script` gives, for an anchor position, the draft tokens of each sequence in turn.
    """

    def __init__(self, drafter: Drafter, script: Any, nan: bool = False) -> None:
        self.drafter = drafter
        self.script = script
        self.nan = nan
        self._lengths: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def draft(self, anchors: Tensor, context_lengths: Tensor, *args: Any) -> DraftOutput:
        self._lengths = context_lengths.tolist()
        return self.drafter.draft(anchors, context_lengths, *args)

    def propose(self, anchors: Tensor, draft: DraftOutput, pick: Pick | None = None) -> Proposal:
        proposal = self.drafter.propose(anchors, draft, pick)
        tokens = [
            self.script(anchor, length, draft.base_logits.shape[1])
            for anchor, length in zip(anchors.tolist(), self._lengths, strict=True)
        ]
        scores = torch.full_like(proposal.scores, torch.nan) if self.nan else proposal.scores
        return proposal._replace(token_ids=torch.tensor(tokens), scores=scores)


__all__ = [
    "BLOCK",
    "Driver",
    "ScriptedDrafter",
    "plain_runner",
    "random_target",
    "real_drafter",
    "sequences_of",
    "speculative_runner",
]
