"""The KV blocks of one layer group: the free ones, and the number of sequences that hold each other one."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable


class BlockPool:
    """Blocks ``0 .. num_blocks``. A block is free once no sequence holds it."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._free = array("q", range(num_blocks - 1, -1, -1))  # the last one is allocated next
        self._holders: dict[int, int] = {}  # block -> holders, for blocks that several sequences hold
        self.freed: list[int] | None = None  # blocks that have become free; None: not recorded

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def has_shared(self) -> bool:
        """Return whether some block has several holders."""
        return bool(self._holders)

    def allocate(self) -> int:
        """Return a block for one holder. Raises IndexError if none is free."""
        return self._free.pop()

    def allocate_many(self, count: int) -> array[int]:
        """Return ``count`` blocks, in the order of ``allocate``. Raises IndexError if too few are free."""
        left = len(self._free) - count
        if left < 0:
            raise IndexError(f"{count} blocks are needed, and {len(self._free)} are free")
        taken = self._free[: left - 1 if left else None : -1] if count else array("q")
        del self._free[left:]
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add one holder to each of ``blocks``."""
        for block in blocks:
            self._holders[block] = self.num_holders(block) + 1

    def restore(self, blocks: Iterable[int]) -> None:
        """Hold exactly ``blocks``, each as often as it is listed. They belong to this pool."""
        named = Counter(blocks)
        self._free = array("q", (b for b in range(self._num_blocks - 1, -1, -1) if b not in named))
        self._holders = {block: n for block, n in named.items() if n > 1}

    def free(self, blocks: Iterable[int]) -> None:
        """Remove one holder from each of ``blocks``. Of those that become free, the last one is allocated next."""
        if not self._holders and self.freed is None:  # the usual case, in an engine
            self._free.extend(blocks)
            return
        for block in blocks:
            left = self.num_holders(block) - 1
            if not left:
                self._free.append(block)
                if self.freed is not None:
                    self.freed.append(block)
            elif left == 1:
                del self._holders[block]
            else:
                self._holders[block] = left

    def num_holders(self, block: int) -> int:
        """Return how many sequences hold a block that is not free."""
        return self._holders.get(block, 1)

    def check(self, held: Iterable[int]) -> None:
        """Raise RuntimeError unless this pool agrees with the tables, which list the blocks ``held``."""
        named = Counter(held)
        if sorted([*self._free, *named]) != list(range(self._num_blocks)):
            raise RuntimeError("a KV block was lost, or is free and held")
        if any(self.num_holders(block) != n for block, n in named.items()) or not self._holders.keys() <= named.keys():
            raise RuntimeError("a KV block has other holders than the tables that name it")
