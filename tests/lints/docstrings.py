"""Finds docstrings whose first word makes the reader wait for the subject: they begin with a noun phrase or a verb."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from faults import Fault, main
from texts import pieces

FIRST = frozenset(
    {
        "Of", "What", "How", "Where", "For", "By", "As", "Behind", "Beside", "Whether", "Which", "Who", "Whoever",
        "Why", "Until", "That", "Those",
    }
)  # fmt: skip


def lint(path: str, text: str) -> Iterator[Fault]:
    """Yields a fault for each docstring of a Python file that begins with one of ``FIRST``."""
    for piece in pieces(".py", text) if path.endswith(".py") else ():
        words = piece.text.split()
        if piece.kind == "docstring" and words and words[0].rstrip(",:") in FIRST:
            yield Fault(path, piece.line, f"docstring begins with {words[0]}", " ".join(words[:12]))


if __name__ == "__main__":
    sys.exit(main(lint))
