"""The name of an RDMA device, a port of it, and one of its addresses, as an operator writes it."""

from __future__ import annotations

from dataclasses import dataclass

from .base import NAMED_BY

FORM = f"{NAMED_BY} is NAME, NAME:PORT or NAME:PORT:GID_INDEX, as in mlx5_0:1:3"


@dataclass(frozen=True)
class Wanted:
    """The device that ``--rdma-device`` names. ``name`` empty: any; ``port``, ``gid_index`` None: the best."""

    name: str = ""
    port: int | None = None
    gid_index: int | None = None

    @classmethod
    def parse(cls, text: str) -> Wanted:
        """Parse NAME:PORT:GID_INDEX. Raises ValueError, one line with the form."""
        name, *numbers = text.split(":")
        if len(numbers) > 2 or not all(n == "" or (n.isascii() and n.isdigit()) for n in numbers):
            raise ValueError(f"{FORM}, not {text!r}")
        port, gid_index = (int(n) if n else None for n in (*numbers, "", "")[:2])
        if port == 0:
            raise ValueError(f"{FORM}, not {text!r}: ports count from 1")
        return cls(name, port, gid_index)
