"""A step that is done may bring more than a frame of a control link holds, such as all logits of many rows: it goes in
parts, one message after the other.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from . import control
from .control import Drawn, StepDone

_DRAWN_BYTES, _SCORE_BYTES = 64, 20  # as encoded, at most


def parted(done: StepDone, most: int | None = None) -> Iterator[StepDone]:
    """Messages that are ``done`` together, each of about ``most`` bytes unless one token takes more; None = a quarter
    of a frame.
    """
    most = control.MAX_FRAME // 4 if most is None else most
    part, size = list[Drawn](), 0
    for drawn in done.drawn:
        taken = _DRAWN_BYTES + len(drawn.logits) + _SCORE_BYTES * len(drawn.logprobs)
        if part and size + taken > most:
            yield msgspec.structs.replace(done, drawn=part, more=True)
            part, size = [], 0
        part.append(drawn)
        size += taken
    yield done if len(part) == len(done.drawn) else msgspec.structs.replace(done, drawn=part)


class StepParts:
    """Puts a step together from its parts, which one worker sends one behind the other."""

    def __init__(self) -> None:
        self._held: StepDone | None = None

    def add(self, part: StepDone) -> StepDone | None:
        """The whole step; None while more of it is to come. What came of another one is forgotten."""
        held, self._held = self._held, None
        if held is not None and (held.view, held.batch, held.step) == (part.view, part.batch, part.step):
            part = msgspec.structs.replace(part, drawn=[*held.drawn, *part.drawn])
        if part.more:
            self._held = part
            return None
        return part
