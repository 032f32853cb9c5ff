"""The block manager against a model of who uses what, and what lies where."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from sparkgap.engine.blocks import BlockManager

NUM_BLOCKS, BLOCK_SIZE = 12, 4
KEYS = [bytes([i]) for i in range(6)]


class Blocks(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
        self.live = []
        self.content = {}
        """What was last written to each block: an owner's private mark, or a key that it was published under."""

    tables = Bundle("tables")

    @rule(target=tables)
    def start(self):
        self.live.append([])
        return self.live[-1]

    @rule(table=tables, num_tokens=st.integers(0, NUM_BLOCKS * BLOCK_SIZE + 5))
    def extend(self, table, num_tokens):
        before, free = list(table), self.manager.num_free_blocks
        reusable = [self.manager.find(key) for key in KEYS]
        wanted = max(-(-num_tokens // BLOCK_SIZE), len(before))
        fits = wanted - len(before) <= free
        assert self.manager.extend(table, num_tokens) == fits
        assert table[: len(before)] == before
        assert len(table) == (wanted if fits else len(before))
        new = table[len(before) :]
        assert not set(new) & {block for other in self.live if other is not table for block in other}
        blank = free - sum(block is not None and not self.is_used(block, but=new) for block in reusable)
        assert sum(block in reusable for block in new) == max(len(new) - blank, 0)
        for block in new:
            self.content[block] = object()

    @rule(table=tables, place=st.integers(0, NUM_BLOCKS - 1), key=st.sampled_from(KEYS))
    def publish(self, table, place, key):
        if place >= len(table) or self.content[table[place]] in KEYS:
            return
        was = self.manager.find(key)
        self.manager.publish(table[place], key)
        if was is None:
            self.content[table[place]] = key
        assert self.manager.find(key) == (table[place] if was is None else was)

    @rule(table=tables, key=st.sampled_from(KEYS))
    def share(self, table, key):
        block = self.manager.find(key)
        if block is not None and block not in table:
            self.manager.share(table, [block])
            assert table[-1] == block

    @rule(table=consumes(tables))
    def free(self, table):
        self.manager.free(table)
        assert table == []
        self.live = [other for other in self.live if other is not table]

    def is_used(self, block, but=()):
        return any(block in table for table in self.live) and block not in but

    @invariant()
    def a_block_is_free_when_nobody_uses_it(self):
        used = {block for table in self.live for block in table}
        assert all(0 <= block < NUM_BLOCKS for block in used)
        assert len(used) + self.manager.num_free_blocks == NUM_BLOCKS

    @invariant()
    def what_is_found_is_there(self):
        found = {key: block for key in KEYS if (block := self.manager.find(key)) is not None}
        assert len(set(found.values())) == len(found)
        for key, block in found.items():
            assert self.content[block] == key
        assert self.manager.num_reusable_blocks == sum(not self.is_used(block) for block in found.values())


Blocks.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBlocks = Blocks.TestCase


def test_freeing_twice_raises():
    manager, table = BlockManager(4, 2), []
    manager.extend(table, 5)
    copy = list(table)
    manager.free(table)
    with pytest.raises(ValueError, match="freed twice"):
        manager.free(copy)


def test_content_that_was_free_longest_goes_first_and_a_chain_from_its_end():
    manager = BlockManager(6, 2)
    first, second = [], []
    for table, keys in ((first, b"ab"), (second, b"cd")):
        manager.extend(table, 4)
        for block, key in zip(table, keys, strict=True):
            manager.publish(block, bytes([key]))
    manager.free(first)
    manager.free(second)
    found = []
    table = []
    for blocks in range(1, 7):
        assert manager.extend(table, 2 * blocks)
        found.append("".join(key for key in "abcd" if manager.find(key.encode()) is not None))
    assert found == ["abcd", "abcd", "acd", "cd", "c", ""]
    assert not manager.extend(table, 14)
