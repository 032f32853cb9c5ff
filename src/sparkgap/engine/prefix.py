"""Prefix reuse: KV of prompt blocks that an earlier sequence has computed.

A block's key is a hash of all tokens up to its end, chained block by block, so equal keys mean equal KV: of the target,
and of the drafter's context, which lies in blocks of the same numbers. Only blocks all of whose positions are
committed get a key; what a round wrote for rejected drafts lies beyond those. Where a drafter's context is made of the
token after a position, too, a block's key covers the token behind its end.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from sparkgap.engine.blocks import BlockManager
from sparkgap.rounds.sequence import Sequence

_KEY_BYTES = 16


@dataclass
class _Chain:
    """Keys of a sequence's full blocks, and how many of them its own blocks have been published under."""

    keys: list[bytes] = field(default_factory=list)
    num_published: int = 0


class PrefixCache:
    """Finds and publishes blocks by their content.

    Attributes:
        blocks: where content lies.
        enabled: False finds and publishes nothing.
        reads_ahead: whether KV of a position is made of the token after it, too.
        num_queried_tokens: tokens of admitted sequences that were looked for.
        num_hit_tokens: how many of them were found.
    """

    def __init__(self, blocks: BlockManager, *, enabled: bool = True, reads_ahead: bool = False) -> None:
        self.blocks = blocks
        self.enabled = enabled
        self.reads_ahead = reads_ahead
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._chains: dict[int, _Chain] = {}

    def find(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the beginning of a waiting sequence, without its last token: that must be computed."""
        if not self._reads(sequence):
            return []
        found = []
        for key in self._keys(sequence)[: self._most_reused(sequence)]:
            block = self.blocks.find(key)
            if block is None:
                break
            found.append(block)
        return found

    def is_underway(self, sequence: Sequence, num_found: int, others: Iterable[Sequence]) -> bool:
        """Whether one of `others`, which read their prompts, is about to compute the block after those found."""
        if not self._reads(sequence) or num_found >= self._most_reused(sequence):
            return False
        key = self._keys(sequence)[num_found]
        chains = (self._chains[other.sequence_id] for other in others)
        return any(
            chain.num_published <= num_found < len(chain.keys) and chain.keys[num_found] == key for chain in chains
        )

    def admit(self, sequence: Sequence, num_found: int) -> None:
        """A sequence starts with `num_found` blocks that were found for it."""
        if self.enabled:
            self._keys(sequence)
            self._chains[sequence.sequence_id].num_published = num_found
        if self._reads(sequence):
            self.num_queried_tokens += sequence.num_tokens
            self.num_hit_tokens += num_found * self.blocks.block_size

    def publish(self, sequence: Sequence) -> None:
        """Let others find the full blocks of a sequence's committed tokens; call it after a pass that succeeded."""
        if not self.enabled:
            return
        chain = self._chains[sequence.sequence_id]
        # A round may have computed tokens after one that ended the sequence; those were dropped.
        num_full = min(sequence.num_computed_tokens // self.blocks.block_size, self._num_keyed(sequence))
        if num_full <= chain.num_published:
            return
        keys = self._keys(sequence)
        for index in range(chain.num_published, num_full):
            self.blocks.publish(sequence.block_table[index], keys[index])
        chain.num_published = num_full

    def forget(self, sequence: Sequence) -> None:
        """Drop the keys of a sequence that has ended; its blocks' content stays."""
        self._chains.pop(sequence.sequence_id, None)

    def retain(self, sequences: Iterable[Sequence]) -> None:
        """Drop the keys of all sequences but these."""
        kept = {sequence.sequence_id for sequence in sequences}
        self._chains = {number: chain for number, chain in self._chains.items() if number in kept}

    def _reads(self, sequence: Sequence) -> bool:
        # What was not computed has no logits.
        return self.enabled and not sequence.lacks_prompt_logprobs and not sequence.params.skip_reading_prefix_cache

    def _most_reused(self, sequence: Sequence) -> int:
        return (sequence.num_tokens - 1) // self.blocks.block_size

    def _num_keyed(self, sequence: Sequence) -> int:
        """Full blocks all of whose tokens are known, with the one behind the end where it counts."""
        return (sequence.num_tokens - self.reads_ahead) // self.blocks.block_size

    def _keys(self, sequence: Sequence) -> list[bytes]:
        """Keys of all full blocks of a sequence's tokens."""
        keys = self._chains.setdefault(sequence.sequence_id, _Chain()).keys
        size = self.blocks.block_size
        for index in range(len(keys), self._num_keyed(sequence)):
            tokens = array("q", sequence.token_ids(index * size, (index + 1) * size + self.reads_ahead))
            keys.append(blake2b((keys[-1] if keys else b"") + tokens.tobytes(), digest_size=_KEY_BYTES).digest())
        return keys
