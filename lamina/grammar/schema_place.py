"""Finds the place in a JSON schema that an error of llguidance is about: its errors name no place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_NAMED = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
)  # of schemas by name
_VALUES = frozenset(("const", "enum", "default", "examples"))  # of JSON, in which nothing is a schema
_KEYS = re.compile(r"Unimplemented keys: \[(.*)\]")
_REGEX = re.compile(r"regex parse error: .* error: (.*?)(?: \d+ \| |$)")
_BY_VALUE = (  # error -> keyword, and what its value must be
    (re.compile(r"Invalid type: (\S+)"), "type", "{}"),
    (re.compile(r"Unknown format: (\S+)"), "format", "{}"),
    (re.compile(r"Pointer '(.*)' does not exist"), "$ref", "#{}"),
)


def plain_reason(error: str) -> str:
    """Return an error of llguidance in one line of words, without its drawing of an expression."""
    if match := _REGEX.search(error):
        return f"{error.partition(': ')[0]}: {match[1]}"
    if match := _KEYS.search(error):
        keys = re.findall(r'"([^"]*)"', match[1])
        text = f"{', '.join(keys)} {'is' if len(keys) == 1 else 'are'} not supported"
        return error[: match.start()] + text + error[match.end() :]
    return error


def place_of(error: str, schema: Any) -> str:
    """Return the place, such as ``properties.a.items``, of the first schema that can have caused ``error``; "" if there
    is none, or if it is the whole schema.
    """
    return next((".".join(path) for path, one in _schemas(schema, ()) if _causes(one, error)), "")


def _schemas(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield a schema and all schemas in it, in their order, each with its place."""
    if isinstance(value, list):
        for i, each in enumerate(value):
            yield from _schemas(each, (*path, str(i)))
    if not isinstance(value, dict):
        return
    yield path, value
    for key, each in value.items():
        if key in _NAMED and isinstance(each, dict):
            for name, inner in each.items():
                yield from _schemas(inner, (*path, key, name))
        elif key not in _VALUES:
            yield from _schemas(each, (*path, key))


def _causes(schema: dict[str, Any], error: str) -> bool:
    if match := _KEYS.search(error):
        return set(re.findall(r'"([^"]*)"', match[1])) <= schema.keys()
    for pattern, keyword, form in _BY_VALUE:
        if match := pattern.search(error):
            given, wanted = schema.get(keyword), form.format(match[1])
            return wanted in given if isinstance(given, list) else given == wanted
    pattern_given = schema.get("pattern")
    return "regex parse error" in error and isinstance(pattern_given, str) and " ".join(pattern_given.split()) in error
