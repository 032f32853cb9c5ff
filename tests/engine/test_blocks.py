"""The block manager against a model of who owns what."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from sparkgap.engine.blocks import BlockManager

NUM_BLOCKS, BLOCK_SIZE = 12, 4


class Blocks(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
        self.live = []

    tables = Bundle("tables")

    @rule(target=tables)
    def start(self):
        self.live.append([])
        return self.live[-1]

    @rule(table=tables, num_tokens=st.integers(0, NUM_BLOCKS * BLOCK_SIZE + 5))
    def extend(self, table, num_tokens):
        before, free = list(table), self.manager.num_free_blocks
        wanted = max(-(-num_tokens // BLOCK_SIZE), len(before))
        fits = wanted - len(before) <= free
        assert self.manager.extend(table, num_tokens) == fits
        assert table[: len(before)] == before
        assert len(table) == (wanted if fits else len(before))

    @rule(table=consumes(tables))
    def free(self, table):
        self.manager.free(table)
        assert table == []
        self.live = [other for other in self.live if other is not table]

    @invariant()
    def each_block_has_one_owner(self):
        owned = [block for table in self.live for block in table]
        assert len(set(owned)) == len(owned)
        assert all(0 <= block < NUM_BLOCKS for block in owned)
        assert len(owned) + self.manager.num_free_blocks == NUM_BLOCKS


Blocks.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBlocks = Blocks.TestCase


def test_freeing_twice_raises():
    manager, table = BlockManager(4, 2), []
    manager.extend(table, 5)
    copy = list(table)
    manager.free(table)
    with pytest.raises(ValueError, match="freed twice"):
        manager.free(copy)
