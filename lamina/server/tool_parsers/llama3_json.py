"""Calls of Llama 3.1 to 3.3: the whole text is one object or more, with semicolons or lines between them."""

from __future__ import annotations

import json

from .contract import Event, Format, Text, Tools
from .json_text import JsonCall

_TAG = "<|python_tag|>"


class _Objects:
    """A text that begins with the tag or with an object is calls, if the object names a function."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._raw = ""  # what is held back
        self._call: JsonCall | None = None
        self._is_text = self._has_calls = False

    def push(self, text: str) -> list[Event]:
        events = list[Event]()
        while text and not self._is_text:
            text = self._step(text, events)
        if self._is_text and text and not self._has_calls:
            events.append(Text(text))
        return events

    def finish(self, *, cut: bool = False) -> list[Event]:
        is_call = self._call is not None or len(self._raw.strip()) > 2  # a part of the tag
        shown = "" if self._has_calls or (cut and is_call) else self._raw
        return [Text(shown)] if shown else []

    def _step(self, text: str, events: list[Event]) -> str:
        """Read a part of the text, and return the rest."""
        if self._call is None:
            self._raw += text
            start = self._raw.lstrip().removeprefix(_TAG).lstrip(" \n\t;")
            if start.startswith("{"):
                self._raw = self._raw[: len(self._raw) - len(start)]
                self._call = JsonCall(self._tools)
                return start
            self._is_text = bool(start) and not _TAG.startswith(start)
            shown, self._raw = (self._raw, "") if self._is_text else ("", self._raw)
            if shown and not self._has_calls:
                events.append(Text(shown))
            return ""
        rest = self._call.push(text, events)
        self._has_calls = self._has_calls or self._call.has_begun
        self._raw += text if rest is None else text[: len(text) - len(rest)]
        if rest is None:
            return ""
        if self._call.is_broken and not self._has_calls:
            self._is_text = True
            events.append(Text(self._raw))
        self._is_text = self._is_text or self._call.is_broken
        self._call, self._raw = None, ""
        return rest


FORMAT = Format(
    ('{"name": function name, "parameters": dictionary of argument name and its value}',),
    True,
    lambda tools: (_TAG, *(f'{{"name": {json.dumps(name)}' for name in tools)),
    _Objects,
)
