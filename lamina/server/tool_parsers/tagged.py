"""Calls between two marks in free text, the form of most models."""

from __future__ import annotations

from collections.abc import Callable

from lamina.models.tokenizer import find_stop, num_held_back

from .contract import CallBegin, Event, Text
from .json_text import CallBody


class TaggedCalls:
    """A parser of calls that stand between marks. Content lies before the first one, without spaces at its end."""

    def __init__(self, begin: str, end: str, make_body: Callable[[], CallBody], around: tuple[str, ...] = ()) -> None:
        """``end``: "" where the body alone shows it. ``around``: marks around all calls, which are left out."""
        self._begin, self._end, self._make_body = begin, end, make_body
        self._marks = (begin, *around)
        self._text = ""  # not yet read
        self._body: CallBody | None = None
        self._raw = ""  # the call so far, as the model wrote it
        self._is_closing = False  # a call has ended, and its end mark is still to come
        self._has_calls = False

    def push(self, text: str) -> list[Event]:
        events = list[Event]()
        self._text += text
        while self._text and self._step(events):
            pass
        return _joined(events)

    def finish(self, *, cut: bool = False) -> list[Event]:
        if self._body is not None:
            shown = "" if cut or self._body.has_begun else self._raw
        else:
            shown = "" if self._is_closing or (cut and self._begins_call()) else self._text
        shown = shown.rstrip() if self._has_calls else shown
        self._text, self._body, self._raw = "", None, ""
        return [Text(shown)] if shown else []

    def _begins_call(self) -> bool:
        return num_held_back(self._text, self._marks) > (0 if self._has_calls else 2)  # a < alone is text

    def _step(self, events: list[Event]) -> bool:
        """Read a part of the text. Return False if more must come first."""
        if self._body is not None:
            return self._step_body(self._body, events)
        if self._is_closing:
            return self._step_end()
        if (match := find_stop(self._text, self._marks)) is None:
            certain = self._text[: len(self._text) - num_held_back(self._text, self._marks)].rstrip()
            if certain:
                events.append(Text(certain))
            self._text = self._text[len(certain) :]
            return False
        at, mark = match
        if before := self._text[:at].rstrip():
            events.append(Text(before))
        spaces, self._text = self._text[len(before) : at], self._text[at + len(mark) :]
        if mark == self._begin:
            self._body, self._raw = self._make_body(), spaces + mark
        else:
            self._has_calls = True
        return True

    def _step_body(self, body: CallBody, events: list[Event]) -> bool:
        given, self._text = self._text, ""
        rest = body.push(given, events)
        self._has_calls = self._has_calls or body.has_begun
        if rest is None:
            self._raw += "" if body.has_begun else given
            return False
        self._text, self._body = rest, None
        if body.is_broken and not body.has_begun:
            events.append(Text(self._raw + given[: len(given) - len(rest)]))
        else:
            self._is_closing = bool(self._end)
        self._raw = ""
        return True

    def _step_end(self) -> bool:
        marks = (self._end, self._begin)
        if (match := find_stop(self._text, marks)) is None:
            self._text = self._text[len(self._text) - num_held_back(self._text, marks) :]
            return False
        at, mark = match
        self._text, self._is_closing = self._text[at + (len(mark) if mark == self._end else 0) :], False
        return True


def _joined(events: list[Event]) -> list[Event]:
    """Return the events, with neighbours of one kind as one."""
    joined = list[Event]()
    for event in events:
        if joined and type(joined[-1]) is type(event) and not isinstance(event, CallBegin):
            last: Event = joined[-1]
            joined[-1] = type(event)(last[0] + event[0])
        else:
            joined.append(event)
    return joined
