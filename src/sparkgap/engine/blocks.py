"""Who owns which KV block."""


class BlockManager:
    """Hands out KV blocks. A block belongs to one block table at a time.

    Attributes:
        num_blocks: blocks in the cache.
        block_size: positions in one block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.reset()

    def reset(self) -> None:
        """Make every block free, whatever tables held; the tables are their owners' to empty."""
        num_blocks = self.num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_free = [True] * num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that belong to no table."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def extend(self, block_table: list[int], num_tokens: int) -> bool:
        """Grow `block_table` to hold `num_tokens` positions; False, and nothing changed, when blocks are short."""
        missing = self.blocks_for(num_tokens) - len(block_table)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            block = self._free.pop()
            self._is_free[block] = False
            block_table.append(block)
        return True

    def free(self, block_table: list[int]) -> None:
        """Take back all blocks of `block_table` and empty it.

        Raises:
            ValueError: a block is free already, which means that two tables held it.
        """
        for block in reversed(block_table):
            if self._is_free[block]:
                raise ValueError(f"KV block {block} is freed twice")
            self._is_free[block] = True
            self._free.append(block)
        block_table.clear()
