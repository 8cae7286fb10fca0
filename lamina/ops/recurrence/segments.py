"""The rows of a step as sequences see them: where each one's rows are, and which versions of its state they join."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lamina.protocol.blocks.state_versions import ZEROS as ZEROS
from lamina.protocol.blocks.state_versions import Segment as Segment

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Segments:
    """The segments of a step, made once for all layers: int64 [segments, 5], a line for each ``Segment``."""

    table: Ints

    @staticmethod
    def of(segments: Iterable[Segment]) -> Segments:
        """Make the table. A slot is written once, and read only as it was before the step, except that a segment may
        read what the segment before it in the list writes. Raises ValueError for anything else.
        """
        made = Segments(np.array([*segments], dtype=np.int64).reshape(-1, len(Segment._fields)))
        made._check()
        return made

    @property
    def first(self) -> Ints:
        return self.table[:, 0]

    @property
    def rows(self) -> Ints:
        return self.table[:, 1]

    @property
    def prompt(self) -> Ints:
        return self.table[:, 2]

    @property
    def read(self) -> Ints:
        return self.table[:, 3]

    @property
    def write(self) -> Ints:
        return self.table[:, 4]

    @cached_property
    def address(self) -> int:
        """The place of the table, which has no gaps."""
        return int(self.table.ctypes.data)

    def __len__(self) -> int:
        return len(self.table)

    @cached_property
    def rows_end(self) -> int:
        """The number of rows that the step has at least."""
        return int((self.first + self.rows).max(initial=0))

    @cached_property
    def slots_end(self) -> int:
        """The number of slots that there are at least."""
        return int(max(self.read.max(initial=-1), self.write.max(initial=-1))) + 1

    @cached_property
    def continues(self) -> NDArray[np.bool_]:
        """True for segments that read what the segment before them writes."""
        after = np.zeros(len(self), dtype=bool)
        after[1:] = self.read[1:] == self.write[:-1]
        return after

    @cached_property
    def waves(self) -> list[Ints]:
        """The numbers of segments that can be computed at once, in the order in which they must be."""
        depth = np.zeros(len(self), dtype=np.int64)
        for i in np.flatnonzero(self.continues):
            depth[i] = depth[i - 1] + 1
        return [np.flatnonzero(depth == d) for d in range(int(depth.max(initial=-1)) + 1)]

    def _check(self) -> None:
        bad = (self.first < 0) | (self.rows < 1) | (self.prompt < 0) | (self.prompt > self.rows)
        bad |= (self.read < ZEROS) | (self.write < 0)
        early = set(self.read[~self.continues].tolist())
        written = self.write.tolist()
        if bad.any() or len(set(written)) < len(written) or early.intersection(written):
            raise ValueError(f"segments of a step do not fit together: {self}")
