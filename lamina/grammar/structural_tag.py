"""Structural tags, xgrammar's way to write structures within free text, as a grammar in Lark. No torch here.

Both forms of vLLM are taken: ``structures`` with ``triggers``, and ``format``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .lark import Specials, anything, sequence, up_to

MAX_DEPTH = 16  # formats within each other
_NAME = "structural_tag"


def rules_of(value: Any, specials: Specials, json_options: Mapping[str, Any], to_lark: Callable[[str], str]) -> str:
    """Return a structural tag as rules of Lark, whose first is ``start``. ``json_options``: the library's, for schemas.
    ``to_lark``: converts an expression. Raises ValueError that names what is wrong.
    """
    if not isinstance(value, dict) or value.get("type", _NAME) != _NAME:
        raise ValueError(f'{_NAME} must be an object of type "{_NAME}"')
    if "structures" in value:
        tags = [{**one, "content": {"type": "json_schema", "json_schema": one.get("schema", {})}}
                for one in _list(value, "structures", dict)]  # fmt: skip
        value = {"format": {"type": "triggered_tags", "tags": tags, "triggers": value.get("triggers")}}
    rules = _Rules(specials, json_options, to_lark)
    start = rules.item(value.get("format"), 0, is_last=True)
    return "\n".join([f"start: {start}", *rules.lines, ""])


class _Rules:
    """Rules so far; each format becomes an item of another one's rule."""

    def __init__(self, specials: Specials, json_options: Mapping[str, Any], to_lark: Callable[[str], str]) -> None:
        self._specials, self._json_options, self._to_lark = specials, json_options, to_lark
        self.lines = list[str]()
        self._count = 0

    def item(self, given: Any, depth: int, *, is_last: bool) -> str:
        """Return an item for a format. ``is_last``: nothing follows it."""
        kind = given.get("type") if isinstance(given, dict) else None
        if depth > MAX_DEPTH:
            raise ValueError(f"{_NAME} is nested deeper than {MAX_DEPTH}")
        if kind == "const_string":
            return self._text(given, "value") or '""'
        if kind == "json_schema":
            return self._rule(
                "%json " + json.dumps({**_object(given, "json_schema"), "x-guidance": self._json_options})
            )
        if kind == "regex":
            return self._rule(f"/{self._to_lark(_string(given, 'pattern'))}/")
        if kind == "any_text":
            if not is_last:
                raise ValueError(f"{_NAME}: any_text must be the content of a tag with an end, or the last format")
            return self._rule(anything(self._specials))
        if kind in ("sequence", "or"):
            parts = _list(given, "elements", dict)
            lasts = [is_last and (kind == "or" or i == len(parts) - 1) for i in range(len(parts))]
            items = [self.item(one, depth + 1, is_last=last) for one, last in zip(parts, lasts, strict=True)]
            return self._rule((" " if kind == "sequence" else " | ").join(items))
        if kind == "tag":
            return self._rule(f"{self._text(given, 'begin')} {self._body(given, depth, is_last=is_last)}")
        if kind == "triggered_tags":
            return self._triggered(given, depth, is_last=is_last)
        if kind == "tags_with_separator":
            return self._separated(given, depth)
        known = "const_string, json_schema, regex, any_text, sequence, or, tag, triggered_tags, tags_with_separator"
        raise ValueError(f"{_NAME} has the format {str(kind)[:64]!r}: take one of {known}")

    def _rule(self, body: str) -> str:
        self._count += 1
        name = f"format_{self._count}"
        self.lines.append(f"{name}: {body}")
        return name

    def _text(self, given: Any, name: str) -> str:
        return sequence(_string(given, name), self._specials)

    def _body(self, tag: Any, depth: int, *, is_last: bool) -> str:
        """Return what follows the beginning of a tag."""
        ends = tag.get("end")
        ends = [_string(tag, "end")] if not isinstance(ends, list) else _list(tag, "end", str)
        content = tag.get("content")
        if isinstance(content, dict) and content.get("type") == "any_text" and len(ends) == 1 and ends[0]:
            self._count += 1
            name = f"format_{self._count}"
            self.lines.append(up_to(name, ends, self._specials).rstrip("\n"))
            return name
        closing = " | ".join(sequence(end, self._specials) or '""' for end in ends)
        return f"{self.item(content, depth + 1, is_last=is_last and ends == [''])} ({closing})"

    def _triggered(self, given: Any, depth: int, *, is_last: bool) -> str:
        if not is_last:
            raise ValueError(f"{_NAME}: triggered_tags must be the last format")
        tags, triggers = _list(given, "tags", dict), _list(given, "triggers", str)
        bodies, whole = dict[str, list[str]](), list[str]()
        for tag in tags:
            begin = _string(tag, "begin")
            trigger = next((one for one in triggers if one and begin.startswith(one)), None)
            if trigger is None:
                raise ValueError(f"{_NAME}: the tag {begin[:64]!r} begins with none of the triggers")
            body = self._rule(self._body(tag, depth, is_last=False))
            bodies.setdefault(trigger, []).append(f"{sequence(begin[len(trigger) :], self._specials)} {body}".strip())
            whole.append(f"{sequence(begin, self._specials)} {body}")
        ways = list[str]()
        for trigger, rests in bodies.items():
            self._count += 1
            self.lines.append(up_to(f"head_{self._count}", [trigger], self._specials).rstrip("\n"))
            ways.append(f"head_{self._count} ({' | '.join(rests)})")
        anywhere, text = self._rule(" | ".join(ways)), self._rule("/(.|\\n)*/")
        first = self._rule(" | ".join(whole)) if given.get("at_least_one") else ""
        if given.get("stop_after_first"):
            return first or self._rule(f"{anywhere} | {text}")
        return self._rule(f"{first} {anywhere}* {text}")

    def _separated(self, given: Any, depth: int) -> str:
        parts = _list(given, "tags", dict)
        tags = self._rule(" | ".join(self.item({**one, "type": "tag"}, depth + 1, is_last=False) for one in parts))
        more = "" if given.get("stop_after_first") else f" ({self._text(given, 'separator')} {tags})*"
        return self._rule(f"{tags}{more}" if given.get("at_least_one") else f"({tags}{more})?")


def _string(given: Any, name: str) -> str:
    if not isinstance(value := given.get(name), str):
        raise ValueError(f"{_NAME}: {name} must be text, not {str(value)[:64]!r}")
    return value


def _object(given: Any, name: str) -> dict[str, Any]:
    if not isinstance(value := given.get(name), dict):
        raise ValueError(f"{_NAME}: {name} must be an object, not {str(value)[:64]!r}")
    return value


def _list(given: Any, name: str, kind: type) -> Sequence[Any]:
    value = given.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(one, kind) for one in value):
        raise ValueError(
            f"{_NAME}: {name} must be a list, of {'texts' if kind is str else 'objects'}, that is not empty"
        )
    return value
