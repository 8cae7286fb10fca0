"""The structure that a completion must have: a JSON schema, an expression, a choice or a grammar. No torch here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 1 << 16  # of a schema, an expression, a grammar, or all choices together
MAX_DEPTH = 64  # objects and arrays within each other, in a schema
FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(kw_only=True)
class StructuredOutputsParams:
    """One form of structured output. Names are vLLM's. Exactly one of the first six fields is set."""

    json: str | dict[str, Any] | None = None  # a JSON schema; it becomes text
    regex: str | None = None  # the whole text matches it
    choice: list[str] | None = None  # the text is one of these
    grammar: str | None = None  # a context-free grammar in Lark's syntax, whose first rule is ``start``
    json_object: bool | None = None  # any JSON object
    structural_tag: str | dict[str, Any] | None = None  # structures within tags in free text; it becomes text
    disable_any_whitespace: bool = False  # JSON without spaces and line breaks between its parts
    # Rules of Lark: ``before`` for what comes before it, with ``lead`` for what comes before calls; ``calls`` for what
    # may come in its place. A server sets them (lamina/grammar/lark.py); "" = nothing.
    before: str = ""
    instead: str = ""
    # The same as the worker's library reads it; None = a front end has not compiled it yet.
    compiled: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            named = ", ".join(given) or "none"
            raise ValueError(f"structured_outputs must have exactly one of {', '.join(FORMS)}, not {named}")
        if self.structural_tag is not None:
            self.structural_tag = _json_text(self.structural_tag, "structured_outputs.structural_tag")
        if self.json is not None:
            self.json = _json_text(self.json, "structured_outputs.json")
        if self.choice is not None:
            if (
                not isinstance(self.choice, list | tuple)
                or not self.choice
                or not all(isinstance(text, str) and text for text in self.choice)
            ):
                raise ValueError("structured_outputs.choice must be a list of texts that are not empty")
            self.choice = list(self.choice)
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(value := getattr(self, name), bool | None):
                raise ValueError(f"structured_outputs.{name} must be true or false, not {value!r}"[:200])
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise ValueError(f"structured_outputs.{name} must be text that is not empty, not {value!r}")
        texts = (self.json, self.structural_tag, self.regex, self.grammar)
        size = sum(len(text.encode(errors="replace")) for text in texts if isinstance(text, str))
        size += sum(len(text.encode(errors="replace")) for text in self.choice or ())
        if size > MAX_BYTES:
            raise ValueError(f"structured_outputs.{given[0]} must have at most {MAX_BYTES} bytes, not {size}")


def _json_text(schema: Any, name: str) -> str:
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise ValueError(f"{name} is nested deeper than {MAX_DEPTH}") from None
    except (TypeError, ValueError) as e:
        raise ValueError(f"{name} is no JSON: {e}") from e
    if value is True:
        return "{}"
    if not isinstance(value, dict):
        what = "a structural tag" if name.endswith("tag") else "a JSON schema"
        raise ValueError(f"{name} must be {what}, which is an object, not {text[:80]}")
    if _depth(value) > MAX_DEPTH:
        raise ValueError(f"{name} is nested deeper than {MAX_DEPTH}")
    return text


def _depth(value: Any) -> int:
    level, depth = [value], 0
    while level:
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        depth += 1
    return depth
