"""JSON that arrives in pieces: finds where a value ends, and reads calls that are JSON objects."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any, Protocol

from .contract import Arguments, CallBegin, Event

SPACES = " \t\r\n"
KEYS = ("arguments", "parameters")


class CallBody(Protocol):
    """Reads the text of one call, or of a list of calls."""

    @property
    def has_begun(self) -> bool:
        """True once a CallBegin was returned."""
        ...

    @property
    def is_broken(self) -> bool:
        """True if the text is no call; set when ``push`` has returned the rest."""
        ...

    def push(self, text: str, events: list[Event]) -> str | None:
        """Read text, and append what is certain to ``events``. Return the rest after the end; None before it."""
        ...


class JsonScanner:
    """Finds the end of one JSON value, which need not be valid."""

    def __init__(self) -> None:
        self._depth, self._in_text, self._escaped, self._plain = 0, False, False, False

    def takes(self, char: str) -> bool:
        """Return whether ``char`` is still a part of the value. A < outside texts is not: it begins a mark, after
        brackets that the model did not close.
        """
        return self._in_text or not (char == "<" or (self._plain and (char in ",]}" or char in SPACES)))

    def ends_with(self, char: str) -> bool:
        """Add a character, and return whether the value ends with it. A number ends before the next one."""
        if self._in_text:
            if self._escaped or char == "\\":
                self._escaped = not self._escaped
            elif char == '"':
                self._in_text = False
        elif char == '"':
            self._in_text = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        elif not self._depth:
            self._plain = True
        return not (self._depth > 0 or self._in_text or self._plain)


class JsonCall:
    """A call as an object with a name and arguments, in any order. Arguments stream as soon as the name is known."""

    def __init__(self, names: Collection[str] | None = None) -> None:
        """``names``: of the functions that may be called; None: any."""
        self.has_begun = self.is_broken = False
        self._names = names
        self._state, self._key, self._scanner = "open", "", JsonScanner()
        self._held: list[str] = []  # characters of the key or value
        self._early = ""  # arguments before the name
        self._piece: list[str] = []  # arguments to be returned
        self._has_arguments = False
        self._streams = False  # the value is arguments that need not be held

    def push(self, text: str, events: list[Event]) -> str | None:
        rest = None
        for at, char in enumerate(text):
            self._step(char, events)
            if self._state == "end" or self.is_broken:
                rest = text[at + (not self.is_broken) :]
                break
        self._flush(events)
        return rest

    def _flush(self, events: list[Event]) -> None:
        if self._piece:
            events.append(Arguments("".join(self._piece)))
            self._piece = []

    def _step(self, char: str, events: list[Event]) -> None:
        if self._state in ("key text", "value") and self._scanner.takes(char):
            self._hold(char)
            if self._scanner.ends_with(char):
                self._end_value(events)
            return
        if self._state == "value":  # a number has ended
            self._end_value(events)
        if char in SPACES:
            return
        if self._state == "value begins" or (self._state == "key" and char == '"'):
            self._begin_value(char, events)
        elif (self._state, char) in _NEXT:
            self._state = _NEXT[self._state, char]
        else:
            self.is_broken = True
        if self._state == "end":
            self._end(events)

    def _begin_value(self, char: str, events: list[Event]) -> None:
        self._state = "key text" if self._state == "key" else "value"
        self._scanner, self._held = JsonScanner(), []
        self._streams = self._state == "value" and self.has_begun and self._key in KEYS and char != '"'
        self._hold(char)
        if self._scanner.ends_with(char):
            self.is_broken = True  # a bracket that was never opened

    def _hold(self, char: str) -> None:
        if self._state == "value" and self._streams:
            self._piece.append(char)
            self._has_arguments = True
        else:
            self._held.append(char)

    def _end_value(self, events: list[Event]) -> None:
        text = "".join(self._held)
        if self._state == "key text":
            self._key = str(loaded(text))
            self._state = "colon"
            return
        self._state = "more"
        if self._key == "name":
            self._begin(loaded(text), events)
        elif self._key in KEYS and not self._streams:
            value = loaded(text)
            text = value if isinstance(value, str) else text  # JSON in a text
            if self.has_begun:
                self._piece.append(text)
                self._has_arguments = True
            else:
                self._early = text

    def _begin(self, name: Any, events: list[Event]) -> None:
        if (
            not isinstance(name, str)
            or not name
            or self.has_begun
            or (self._names is not None and name not in self._names)
        ):
            self.is_broken = True
            return
        self.has_begun = True
        events.append(CallBegin(name))
        if self._early:
            self._piece.append(self._early)
            self._has_arguments = True

    def _end(self, events: list[Event]) -> None:
        self.is_broken = not self.has_begun
        if self.has_begun and not self._has_arguments:
            self._piece.append("{}")


_NEXT = {
    ("open", "{"): "key",
    ("key", "}"): "end",
    ("colon", ":"): "value begins",
    ("more", ","): "key",
    ("more", "}"): "end",
}


class JsonCalls:
    """A list of calls as objects."""

    def __init__(self) -> None:
        self.has_begun = self.is_broken = False
        self._call: JsonCall | None = None
        self._is_open = False

    def push(self, text: str, events: list[Event]) -> str | None:
        while text:
            if self._call is not None:
                rest = self._call.push(text, events)
                self.has_begun = self.has_begun or self._call.has_begun
                if rest is None:
                    return None
                self.is_broken, self._call = self._call.is_broken, None
                if self.is_broken:
                    return rest
                text = rest
                continue
            char = text[0]
            if char == "{" and self._is_open:
                self._call = JsonCall()
                continue
            if char == "]" and self._is_open:
                return text[1:]
            if not (char in SPACES or (char == "," and self._is_open) or (char == "[" and not self._is_open)):
                self.is_broken = True
                return text
            self._is_open = self._is_open or char == "["
            text = text[1:]
        return None


class NameAndJson:
    """A name, a separator, and the arguments as JSON."""

    def __init__(
        self, separator: str, name_of: Callable[[str], str], id_of: Callable[[str], str] = lambda head: ""
    ) -> None:
        """``name_of``, ``id_of``: return the name, and the model's own id, in what stands before the separator."""
        self.has_begun = self.is_broken = False
        self._separator, self._name_of, self._id_of = separator, name_of, id_of
        self._head, self._scanner, self._has_value = "", JsonScanner(), False

    def push(self, text: str, events: list[Event]) -> str | None:
        if not self.has_begun:
            self._head += text
            head, at_end, text = self._head.partition(self._separator)
            if not at_end:
                return None
            if not (name := self._name_of(head).strip()):
                self.is_broken = True
                return text
            self.has_begun = True
            events.append(CallBegin(name, self._id_of(head)))
        if not self._has_value and not (text := text.lstrip()):
            return None
        if not self._has_value and text[0] != "{":
            self.is_broken = True
            return text
        self._has_value = True
        for at, char in enumerate(text):
            if not self._scanner.takes(char):
                events.append(Arguments(text[:at]))
                return text[at:]
            if self._scanner.ends_with(char):
                events.append(Arguments(text[: at + 1]))
                return text[at + 1 :]
        events.append(Arguments(text))
        return None


def loaded(text: str) -> Any:
    """Return a JSON value; None for text that is none."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
