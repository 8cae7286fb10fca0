"""What a step has brought may be more than a frame holds, such as the log-probabilities of a long prompt: it goes in
parts, one message after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import structs

from lamina.protocol import control

from .messages import Delta, Logprobs, Outputs

_DELTA_BYTES, _TOKEN_BYTES, _CHAR_BYTES, _SCORE_BYTES = 256, 5, 4, 20  # as encoded, at most


def parted(outputs: Outputs, most: int | None = None) -> Iterator[Outputs]:
    """Messages that are ``outputs`` together, each of about ``most`` bytes unless the log-probabilities of one token
    take more; None = a quarter of a frame.
    """
    most = control.MAX_FRAME // 4 if most is None else most
    part, size = list[Delta](), 0
    for delta in (piece for whole in outputs.deltas for piece in _pieces(whole, most)):
        taken = _size(delta)
        if part and size + taken > most:
            yield Outputs(part, more=True)
            part, size = [], 0
        part.append(delta)
        size += taken
    yield structs.replace(outputs, deltas=part)


def _pieces(delta: Delta, most: int) -> Iterator[Delta]:
    """A delta, and what it lacks of the log-probabilities of its prompt."""
    if delta.prompt_logprobs is None or _size(delta) <= most:
        yield delta
        return
    head, rest = structs.replace(delta, prompt_logprobs=[]), list[Logprobs | None]()
    yield head
    size = 0
    for entry in delta.prompt_logprobs:
        taken = _size_of([entry])
        if rest and size + taken > most:
            yield _more_of(delta, rest)
            rest, size = [], 0
        rest.append(entry)
        size += taken
    yield _more_of(delta, rest)


def _more_of(delta: Delta, scores: list[Logprobs | None]) -> Delta:
    return Delta(key=delta.key, index=delta.index, tokens=[], text="", prompt_logprobs=scores)


def _size(delta: Delta) -> int:
    scores = _size_of(delta.logprobs or ()) + _size_of(delta.prompt_logprobs or ())
    return _DELTA_BYTES + _TOKEN_BYTES * len(delta.tokens) + _CHAR_BYTES * len(delta.text) + scores


def _size_of(entries: Sequence[Logprobs | None]) -> int:
    return sum(_TOKEN_BYTES + _SCORE_BYTES * len(entry or ()) for entry in entries)


class OutputParts:
    """Puts together what a step has brought from its parts, which one engine sends one behind the other."""

    def __init__(self) -> None:
        self._held: list[Delta] = []

    def add(self, part: Outputs) -> Outputs | None:
        """All of it; None while more is to come."""
        if not (part.more or self._held):
            return part
        for delta in part.deltas:
            last = self._held[-1] if self._held else None
            if last is not None and (last.key, last.index) == (delta.key, delta.index):
                last.prompt_logprobs = last.prompt_logprobs or []
                last.prompt_logprobs += delta.prompt_logprobs or ()
            else:
                self._held.append(delta)
        if part.more:
            return None
        whole, self._held = structs.replace(part, deltas=self._held), []
        return whole
