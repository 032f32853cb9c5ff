"""Who uses which KV block, and which blocks hold content that others may use too."""

from collections import OrderedDict
from collections.abc import Iterable


class BlockManager:
    """Hands out KV blocks and counts who uses each.

    A block that nobody uses is free. Published content of a free block stays findable until the block is needed for
    something else: blocks without content go first, then the one that was free longest.

    Attributes:
        num_blocks: blocks in the cache.
        block_size: positions in one block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.reset()

    def reset(self) -> None:
        """Make every block free and forget all content, whatever tables held; the tables are their owners' to empty."""
        self._users = [0] * self.num_blocks
        self._blank = list(range(self.num_blocks - 1, -1, -1))
        self._reusable: OrderedDict[int, None] = OrderedDict()
        self._keys: list[bytes | None] = [None] * self.num_blocks
        self._published: dict[bytes, int] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody uses, with and without content."""
        return len(self._blank) + len(self._reusable)

    @property
    def num_reusable_blocks(self) -> int:
        """Free blocks with published content."""
        return len(self._reusable)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def extend(self, block_table: list[int], num_tokens: int) -> bool:
        """Grow `block_table` to hold `num_tokens` positions; False, and nothing changed, when blocks are short."""
        missing = self.blocks_for(num_tokens) - len(block_table)
        if missing > self.num_free_blocks:
            return False
        for _ in range(missing):
            block = self._blank.pop() if self._blank else self._evict()
            self._users[block] = 1
            block_table.append(block)
        return True

    def share(self, block_table: list[int], blocks: Iterable[int]) -> None:
        """Append blocks with published content to `block_table`; who else uses them keeps them."""
        for block in blocks:
            if not self._users[block]:
                del self._reusable[block]
            self._users[block] += 1
            block_table.append(block)

    def free(self, block_table: list[int]) -> None:
        """Stop using all blocks of `block_table`, and empty it.

        Raises:
            ValueError: a block is free already, which means that a table was freed twice.
        """
        # A chain of blocks is of use from its beginning only, so its end is given up first.
        for block in reversed(block_table):
            if not self._users[block]:
                raise ValueError(f"KV block {block} is freed twice")
            self._users[block] -= 1
            if self._users[block]:
                continue
            if self._keys[block] is None:
                self._blank.append(block)
            else:
                self._reusable[block] = None
        block_table.clear()

    def publish(self, block: int, key: bytes) -> None:
        """Let others find a used block by its content's key. Content that another block has already stays that one's.

        The block must be written to its end, and must not be written again while it has users.
        """
        if key not in self._published:
            self._published[key] = block
            self._keys[block] = key

    def find(self, key: bytes) -> int | None:
        """The block with this content, used or free; None if there is none."""
        return self._published.get(key)

    def _evict(self) -> int:
        block, _ = self._reusable.popitem(last=False)
        key = self._keys[block]
        assert key is not None
        del self._published[key]
        self._keys[block] = None
        return block
