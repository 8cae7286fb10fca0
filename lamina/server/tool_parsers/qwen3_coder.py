"""Calls of Qwen3-Coder and Qwen 3.5: parameters in tags. Their values become JSON by the schema of the function."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from . import Tools
from .contract import Arguments, CallBegin, Event, ToolParser
from .json_text import loaded
from .tagged import TaggedCalls, held_back

MARKS = ("<function=", "<parameter=")
SPECIAL = False
_BEGIN, _END, _CALL_END = "<parameter=", "</parameter>", "</function>"
_WORDS = {"True": "true", "False": "false", "None": "null"}  # as templates write them


class _Parameters:
    """Reads one call. A parameter that must be text streams; others are converted when they are whole."""

    def __init__(self, tools: Tools) -> None:
        self.has_begun = self.is_broken = False
        self._tools = tools
        self._text = ""
        self._schemas: Mapping[str, Any] = {}
        self._key: str | None = None  # of the value that is read
        self._streams = self._has_text = False
        self._count = 0  # parameters so far

    def push(self, text: str, events: list[Event]) -> str | None:
        self._text += text
        if not self.has_begun:
            name, separator, rest = self._text.partition(">")
            if not separator:
                return None
            self.has_begun, self._text = True, rest
            properties = self._tools.get(name.strip(), {}).get("properties")
            self._schemas = properties if isinstance(properties, Mapping) else {}
            events += [CallBegin(name.strip()), Arguments("{")]
        while self._step_value(events) if self._key is not None else self._step_key():
            pass
        at = self._text.find(_CALL_END)
        if self._key is not None or at < 0:
            return None
        events.append(Arguments("}"))
        return self._text[at + len(_CALL_END) :]

    def _step_key(self) -> bool:
        """Read up to the next value. Return whether one begins."""
        begin, end = self._text.find(_BEGIN), self._text.find(_CALL_END)
        if begin < 0 or 0 <= end < begin:
            return False
        key, separator, rest = self._text[begin + len(_BEGIN) :].partition(">")
        if not separator or rest in ("", "\r"):  # a line break that follows is no part of the value
            return False
        self._key, self._text = key.strip(), rest.removeprefix("\n")
        schema = self._schemas.get(self._key)
        self._streams = isinstance(schema, Mapping) and schema.get("type") == "string"
        self._has_text = False
        return True

    def _step_value(self, events: list[Event]) -> bool:
        """Read a part of a value. Return whether it has ended."""
        at = self._text.find(_END)
        if at < 0:
            if self._streams and (keep := held_back(self._text, ("\n" + _END, _END))) < len(self._text):
                certain = len(self._text) - keep
                self._add_text(self._text[:certain], events)
                self._text = self._text[certain:]
            return False
        value, self._text = self._text[:at].removesuffix("\n"), self._text[at + len(_END) :]
        if self._streams:
            self._add_text(value, events)
            events.append(Arguments('"'))
        else:
            events.append(Arguments(self._head() + self._converted(value)))
        self._key = None
        self._count += 1
        return True

    def _head(self) -> str:
        return f"{', ' if self._count else ''}{json.dumps(self._key, ensure_ascii=False)}: "

    def _add_text(self, text: str, events: list[Event]) -> None:
        opening, self._has_text = "" if self._has_text else self._head() + '"', True
        events.append(Arguments(opening + json.dumps(text, ensure_ascii=False)[1:-1]))

    def _converted(self, value: str) -> str:
        word = _WORDS.get(value.strip(), value.strip())
        is_known = self._key in self._schemas  # without a schema, text stays text
        if is_known and (word == "null" or loaded(word) is not None):
            return word
        return json.dumps(value, ensure_ascii=False)


def begins(tools: Tools) -> tuple[str, ...]:
    """Return the texts that begin calls."""
    return ("<tool_call>", "<function=")


def open_parser(tools: Tools) -> ToolParser:
    """Return a parser for one completion."""
    return TaggedCalls("<function=", "", partial(_Parameters, tools), ("<tool_call>", "</tool_call>"))
