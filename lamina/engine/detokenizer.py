"""The text of one completion as a reader may see it: never more than is certain, cut at the first stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from lamina.models.tokenizer import MAX_PENDING_BYTES as MAX_PENDING_BYTES
from lamina.models.tokenizer import find_stop, num_held_back
from lamina.request import Logprob, SamplingParams, Score

DecodeToken = Callable[[int, Sequence[int]], str]  # the text of a token behind others


class IncrementalDetokenizer(Protocol):
    """Turns tokens into text; models.tokenizer.Detokenizer is one."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The new text that later tokens cannot change."""
        ...

    def finish(self) -> str:
        """The text that was held back."""
        ...


def decoded_logprobs(scores: list[Score], before: Sequence[int], spell: DecodeToken | None) -> dict[int, Logprob]:
    """By token. Without ``spell`` they have no texts."""
    return {t: Logprob(value, rank, None if spell is None else spell(t, before)) for t, value, rank in scores}


class TextStream:
    """``text`` only grows: what might turn out to be the beginning of a stop string is kept back until it is not."""

    def __init__(self, pieces: IncrementalDetokenizer, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """``include_stop``: whether the text ends behind the stop string and not before it."""
        self._pieces = pieces
        self._stops = stops
        self._include_stop = include_stop
        self._longest = max((len(s) for s in stops), default=0)
        self._raw = ""
        self._ended = False

    @property
    def text(self) -> str:
        """The text that can be shown."""
        return self._raw if self._ended else self._raw[: len(self._raw) - num_held_back(self._raw, self._stops)]

    def push(self, token: int, *, search: bool) -> str | None:
        """Take a token; the stop string that it completes, if ``search``. The text then ends before that string."""
        start = max(0, len(self._raw) - self._longest + 1)
        self._raw += self._pieces.push([token])
        return self._cut(start) if search else None

    def finish(self, *, search: bool) -> str | None:
        """The completion has ended: show everything, unless what was held back completes a stop string."""
        if self._ended:
            return None
        start = max(0, len(self._raw) - self._longest + 1)
        self._raw += self._pieces.finish()
        self._ended = True
        return self._cut(start) if search else None

    def _cut(self, start: int) -> str | None:
        stop = find_stop(self._raw, self._stops, start)
        if stop is None:
            return None
        self._raw = self._raw[: stop[0] + (len(stop[1]) if self._include_stop else 0)]
        self._ended = True
        return stop[1]


def build_text_streams(
    params: SamplingParams, make_pieces: Callable[[], IncrementalDetokenizer] | None
) -> list[TextStream | None]:
    """Of each completion of a request; None where nobody reads text."""
    stops, include = params.stop_strings, params.include_stop_str_in_output
    return [TextStream(make_pieces(), stops, include_stop=include) if make_pieces else None for _ in range(params.n)]
