"""Speculation without a drafter: draft what followed the last tokens where they stood before in the same sequence.

Known as prompt lookup or n-gram speculation; vLLM's method `ngram`. A round whose last tokens stood nowhere before is
plain decoding, so that a text that repeats nothing costs nothing.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import torch

from sparkgap.graphs.passes import Passes
from sparkgap.models.interfaces import Target
from sparkgap.ops.operands import KVCache
from sparkgap.rounds.sampling import Sampler
from sparkgap.rounds.sequence import RoundOutput, Sequence
from sparkgap.rounds.verification import Drafted
from sparkgap.rounds.verifying import SWITCHED_OFF, VerifyingRunner

NOT_FOUND = "the last tokens stood nowhere before"
"""Reason for a plain round."""


@dataclass
class _Index:
    """Where each run of tokens of one sequence ended last, for every length that is looked for.

    Attributes:
        token_ids: the sequence's tokens that were read so far; the runs' ends are all before the last one.
        ends: for each length, the position of the last token of the latest such run.
    """

    token_ids: list[int] = field(default_factory=list)
    ends: dict[int, dict[tuple[int, ...], int]] = field(default_factory=dict)


class PromptLookup:
    """Finds what may follow a sequence in its own past.

    Args:
        shortest: fewest last tokens that must have stood before.
        longest: most last tokens that are compared; more of them are looked for first.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"lengths must be 1 <= shortest <= longest, got {shortest} and {longest}")
        self.shortest, self.longest = shortest, longest
        self._lengths = range(longest, shortest - 1, -1)
        self._indices: dict[int, _Index] = {}

    def continuation(self, sequence: Sequence, count: int) -> tuple[int, ...] | None:
        """The `count` tokens that followed the latest earlier place with the same last tokens; None without one.

        Where fewer than `count` follow, the text goes on as if it repeated itself from there.
        """
        index = self._indices.setdefault(sequence.sequence_id, _Index(ends={n: {} for n in self._lengths}))
        self._read(index, sequence)
        tokens = index.token_ids
        for length in self._lengths:
            end = index.ends[length].get(tuple(tokens[-length:])) if len(tokens) > length else None
            if end is not None:
                drafted: list[int] = []
                for place in range(end + 1, end + 1 + count):
                    drafted.append(tokens[place] if place < len(tokens) else drafted[place - len(tokens)])
                return tuple(drafted)
        return None

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        self._indices.pop(sequence.sequence_id, None)

    def _read(self, index: _Index, sequence: Sequence) -> None:
        """Take in tokens that are new; runs are entered when another token follows them."""
        known = index.token_ids
        start = len(known)
        known += sequence.token_ids(start, sequence.num_tokens)
        for end in range(max(start - 1, 0), len(known) - 1):
            for length in self._lengths:
                if end + 1 >= length:
                    index.ends[length][tuple(known[end + 1 - length : end + 1])] = end


class LookupRunner(VerifyingRunner):
    """Runs a target and verifies what `PromptLookup` finds, by exact match: the output is that of plain decoding.

    Args:
        target, caches, sampler, num_speculative_tokens, max_model_len, passes: as `VerifyingRunner`.
        lookup: finds drafts.
    """

    def __init__(
        self,
        target: Target,
        caches: Seq[KVCache],
        sampler: Sampler,
        lookup: PromptLookup,
        num_speculative_tokens: int,
        max_model_len: int,
        passes: Passes | None = None,
    ) -> None:
        super().__init__(target, caches, sampler, num_speculative_tokens, max_model_len, passes)
        self.lookup = lookup

    @torch.inference_mode()
    def decode(self, sequences: Seq[Sequence]) -> list[RoundOutput]:
        """One round of each sequence: its accepted draft tokens and the target's own."""
        drafts = [self._draft(sequence) for sequence in sequences]
        drafted = [draft for draft in drafts if isinstance(draft, Drafted)]
        plain = [s for s, draft in zip(sequences, drafts, strict=True) if isinstance(draft, str)]
        from_rounds = iter(self._verify(drafted) if drafted else [])
        from_plain = iter(super().decode(plain) if plain else [])
        return [
            next(from_rounds) if isinstance(draft, Drafted) else replace(next(from_plain), not_speculated=draft)
            for draft in drafts
        ]

    def release(self, sequence: Sequence) -> None:
        """See `PlainRunner.release`."""
        super().release(sequence)
        self.lookup.release(sequence)

    def _draft(self, sequence: Sequence) -> Drafted | str:
        """Draft tokens, or why there are none."""
        if not sequence.params.speculation:
            return SWITCHED_OFF
        found = self.lookup.continuation(sequence, self.num_speculative_tokens)
        return NOT_FOUND if found is None else Drafted(sequence, found)
