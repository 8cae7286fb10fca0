"""Splits the results of a step that exceed a frame, such as log-probabilities of a long prompt, into consecutive
messages.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Raw, structs

from .messages import Delta, Outputs

MOST = 4 << 20  # bytes of a message: the event loop of the server reads one in a few milliseconds
_DELTA_BYTES, _TOKEN_BYTES, _CHAR_BYTES = 256, 5, 4  # as encoded, at most


def split_outputs(outputs: Outputs, most: int | None = None) -> Iterator[Outputs]:
    """Yield messages that together are ``outputs``. Each has about ``most`` bytes (None = MOST), unless the
    log-probabilities of one token take more.
    """
    most = MOST if most is None else most
    part, size = list[Delta](), 0
    for delta in (piece for whole in outputs.deltas for piece in _pieces(whole, most)):
        taken = _size(delta)
        if part and size + taken > most:
            yield Outputs(part, has_more=True)
            part, size = [], 0
        part.append(delta)
        size += taken
    yield structs.replace(outputs, deltas=part)


def _pieces(delta: Delta, most: int) -> Iterator[Delta]:
    """Yield a delta, or the delta without log-probabilities of its prompt and then these in parts."""
    if delta.prompt_logprobs is None or _size(delta) <= most:
        yield delta
        return
    head, rest = structs.replace(delta, prompt_logprobs=[]), list[Raw]()
    yield head
    size = 0
    for entry in delta.prompt_logprobs:
        taken = memoryview(entry).nbytes
        if rest and size + taken > most:
            yield _more_of(delta, rest)
            rest, size = [], 0
        rest.append(entry)
        size += taken
    yield _more_of(delta, rest)


def _more_of(delta: Delta, scores: list[Raw]) -> Delta:
    return Delta(key=delta.key, index=delta.index, token_ids=[], text="", prompt_logprobs=scores)


def _size(delta: Delta) -> int:
    scores = sum(memoryview(entry).nbytes for entry in (*(delta.logprobs or ()), *(delta.prompt_logprobs or ())))
    return _DELTA_BYTES + _TOKEN_BYTES * len(delta.token_ids) + _CHAR_BYTES * len(delta.text) + scores


class OutputAssembler:
    """Joins the consecutive parts of one step's results. There is one assembler for each engine."""

    def __init__(self) -> None:
        self._held: list[Delta] = []

    def add(self, part: Outputs) -> Outputs | None:
        """Add a part. Returns the whole results, or None while more parts follow."""
        if not (part.has_more or self._held):
            return part
        for delta in part.deltas:
            last = self._held[-1] if self._held else None
            if last is not None and (last.key, last.index) == (delta.key, delta.index):
                last.prompt_logprobs = last.prompt_logprobs or []
                last.prompt_logprobs += delta.prompt_logprobs or ()
            else:
                self._held.append(delta)
        if part.has_more:
            return None
        whole, self._held = structs.replace(part, deltas=self._held), []
        return whole
