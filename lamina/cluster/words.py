"""Words that several sub-commands print."""

from __future__ import annotations


def counted(number: int, one: str, many: str = "") -> str:
    """A number of things, as in "1 batch", "2 batches"; ``many`` where that is not ``one`` and an s."""
    return f"{number} {one if number == 1 else many or one + 's'}"
