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
    values, and ``after_call`` follows a call.
    """

    name_ends: tuple[str, ...]
    key_begin: str
    key_end: str
    value_end: str
    call_end: str
    kept: tuple[str, ...] = ()
    closes_key: str = ""
    on_lines: bool = False
    after_call: str = ""


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
        key, separator, rest = self._text[begin + len(form.key_begin) :].partition(form.key_end)
        if begin < 0 or not separator or 0 <= end < len(self._text) - len(rest):
            return False
        if form.on_lines and rest in ("", "\r"):  # a line break that follows is no part of the value
            return False
        self._key = key.rstrip().removesuffix(form.closes_key).strip(" \t\r\n\"'")
        self._text = rest.removeprefix("\n") if form.on_lines else rest
        schema = self._schemas.get(self._key)
        self._streams = isinstance(schema, Mapping) and schema.get("type") == "string"
        self._has_text = False
        return True

    def _step_value(self, events: list[Event]) -> bool:
        """Read a part of a value. Return whether it has ended."""
        end, rest = self._end_of_value()
        if rest is None:
            if self._streams and end:
                self._add_text(self._text[:end], events)
                self._text = self._text[end:]
            return False
        value, self._text = self._text[:end], rest
        if self._streams:
            self._add_text(value, events)
            events.append(Arguments('"'))
        else:
            events.append(Arguments(self._head() + self._converted(value)))
        self._key = None
        self._count += 1
        return True

    def _end_of_value(self) -> tuple[int, str | None]:
        """Return the length of the value, and the text after it; None while it may go on after that length.

        A model may forget a value's end tag. So a value on lines also ends before a line that begins another parameter
        of the function, and before one that ends the call, if ``after_call`` follows.
        """
        form, text = self._form, self._text
        marks = ("\n" + form.value_end, form.value_end) if form.on_lines else (form.value_end,)
        at, mark = find_stop(text, marks) or (len(text), "")
        for line in re.finditer("^", text[:at], re.MULTILINE) if form.on_lines else ():
            start = max(0, line.start() - 1)
            if (self._has_text and line.start() == 0) or not (ends := self._ends_without_tag(text[line.start() :])):
                continue
            return start, text[start:] if ends == "ends" else None
        if mark:
            return at, text[at + len(mark) :]
        opens = ("\n" + form.key_begin, "\n" + form.call_end) if form.on_lines else ()
        if not self._has_text and any(tag[1:].startswith(text) for tag in opens):
            return 0, None
        return len(text) - num_held_back(text, (*marks, *opens)), None

    def _ends_without_tag(self, line: str) -> str:
        """Return "ends" if the value has ended before this text, "may" if more text decides, "" if it goes on."""
        form = self._form
        if line.startswith(form.key_begin):
            key, separator, _ = line[len(form.key_begin) :].partition(form.key_end)
            if "\n" in key:
                return ""
            return ("ends" if key.strip() in self._schemas else "") if separator else "may"
        if line.startswith(form.call_end):
            rest = line[len(form.call_end) :].lstrip()
            if rest.startswith(form.after_call):
                return "ends"
            return "may" if form.after_call.startswith(rest) else ""
        return ""

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
