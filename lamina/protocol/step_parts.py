"""Splitting of a StepDone that is larger than a frame of a control link, such as one with the logits of many rows."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from . import control
from .control import SampledToken, StepDone

_DRAWN_BYTES, _SCORE_BYTES = 64, 20  # encoded sizes, at most


def split_step_done(done: StepDone, most: int | None = None) -> Iterator[StepDone]:
    """Yield messages that together are ``done``. ``most``: the bytes of each, unless one token takes more. The default
    is a quarter of a frame.
    """
    most = control.MAX_FRAME // 4 if most is None else most
    part, size = list[SampledToken](), 0
    for drawn in done.sampled_tokens:
        taken = _DRAWN_BYTES + len(drawn.logits) + _SCORE_BYTES * len(drawn.logprobs)
        if part and size + taken > most:
            yield msgspec.structs.replace(done, sampled_tokens=part, has_more=True)
            part, size = [], 0
        part.append(drawn)
        size += taken
    yield done if len(part) == len(done.sampled_tokens) else msgspec.structs.replace(done, sampled_tokens=part)


class StepDoneAssembler:
    """Joins the parts of a step, which one worker sends one after the other."""

    def __init__(self) -> None:
        self._held: StepDone | None = None

    def add(self, part: StepDone) -> StepDone | None:
        """Return the whole step, or None while parts are missing. Parts of another, unfinished step are dropped."""
        held, self._held = self._held, None
        if held is not None and (held.epoch, held.batch, held.step) == (part.epoch, part.batch, part.step):
            part = msgspec.structs.replace(part, sampled_tokens=[*held.sampled_tokens, *part.sampled_tokens])
        if part.has_more:
            self._held = part
            return None
        return part
