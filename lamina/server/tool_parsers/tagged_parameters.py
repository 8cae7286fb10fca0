"""Calls whose parameters lie between tags. Their values become JSON by the schema of the function."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lamina.models.tokenizer import find_stop, num_held_back

from .contract import Arguments, CallBegin, Event, Tools
from .json_text import loaded

_WORDS = {"True": "true", "False": "false", "None": "null"}  # as templates write them
_NAME = re.compile(r"[\w.:/-]+")


@dataclass(frozen=True)
class Form:
    """The tags of a format. ``name_ends``: texts that end the function's name; those of ``kept`` belong to what
    follows. ``key_end``: the text after a key; ``closes_key``: a tag before it. ``on_lines``: line breaks stand around
    values.
    """

    name_ends: tuple[str, ...]
    key_begin: str
    key_end: str
    value_end: str
    call_end: str
    kept: tuple[str, ...] = ()
    closes_key: str = ""
    on_lines: bool = False


class TaggedParameters:
    """Reads one call. A parameter that must be text streams; others are converted when they are whole."""

    def __init__(self, form: Form, tools: Tools) -> None:
        self.has_begun = self.is_broken = False
        self._form, self._tools = form, tools
        self._text = ""
        self._schemas: Mapping[str, Any] = {}
        self._key: str | None = None  # of the value that is read
        self._streams = self._has_text = False
        self._count = 0  # parameters so far

    def push(self, text: str, events: list[Event]) -> str | None:
        self._text += text
        if not self.has_begun and not self._begin(events):
            return self._text if self.is_broken else None
        while self._step_value(events) if self._key is not None else self._step_key():
            pass
        at = self._text.find(self._form.call_end)
        if self._key is not None or at < 0:
            return None
        events.append(Arguments("}"))
        return self._text[at + len(self._form.call_end) :]

    def _begin(self, events: list[Event]) -> bool:
        """Read the name. Return whether it is there."""
        self._text = self._text.lstrip("\r\n") if self._form.kept else self._text
        if (match := find_stop(self._text, self._form.name_ends)) is None:
            return False
        at, end = match
        name = self._text[:at].strip(" \t\"'")
        if not _NAME.fullmatch(name):
            self.is_broken, self._text = True, self._text[at + len(end) :]
            return False
        self._text = self._text[at + (0 if end in self._form.kept else len(end)) :]
        self.has_begun = True
        properties = self._tools.get(name, {}).get("properties")
        self._schemas = properties if isinstance(properties, Mapping) else {}
        events += [CallBegin(name), Arguments("{")]
        return True

    def _step_key(self) -> bool:
        """Read up to the next value. Return whether one begins."""
        form = self._form
        begin, end = self._text.find(form.key_begin), self._text.find(form.call_end)
        if begin < 0 or 0 <= end < begin:
            return False
        key, separator, rest = self._text[begin + len(form.key_begin) :].partition(form.key_end)
        if not separator or (form.on_lines and rest in ("", "\r")):  # a line break that follows is no part of the value
            return False
        self._key = key.rstrip().removesuffix(form.closes_key).strip(" \t\r\n\"'")
        self._text = rest.removeprefix("\n") if form.on_lines else rest
        schema = self._schemas.get(self._key)
        self._streams = isinstance(schema, Mapping) and schema.get("type") == "string"
        self._has_text = False
        return True

    def _step_value(self, events: list[Event]) -> bool:
        """Read a part of a value. Return whether it has ended. On lines, it also ends before the next parameter, and
        before the end of the call: models forget the tag.
        """
        form = self._form
        marks: tuple[str, ...] = (form.value_end,)
        if form.on_lines:
            marks = ("\n" + form.value_end, *marks, "\n" + form.key_begin, "\n" + form.call_end)
        at, end = find_stop(self._text, marks) or (-1, "")
        if at < 0:
            if self._streams and (keep := num_held_back(self._text, marks)) < len(self._text):
                certain = len(self._text) - keep
                self._add_text(self._text[:certain], events)
                self._text = self._text[certain:]
            return False
        closed = end.endswith(form.value_end)
        value, self._text = self._text[:at], self._text[at + (len(end) if closed else 0) :]
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
