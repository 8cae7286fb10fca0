"""Requests with values at every edge and beyond, made from what a server's own /openapi.json says of its routes; and
exported sessions in which one value is another one. So a new field is tried without a word here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy[Any]], Any]
FEW = 3  # fields of a body that are drawn
ENDS = [0, 1, 2**7, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1]
WHOLE = [*ENDS, 2**64, 10**400]
FLOATS = [0.0, -0.0, 5e-324, 1e-9, 0.5, 1.5, 1e308, -1e308, float("inf"), float("-inf"), float("nan")]
WORDS = [
    "", "a", "\0", "a\0b", " ", "\n", "../..", "/etc/passwd", "\U0001f600", "\ufffe", "\u202e", "e\u0301", "%s%n",
    "{{ 1 }}", "<|text|>", "a" * 300, "\u00e9" * 5000, "1" * 20, "-1", "NaN", "\ud800", "a\udfff",
]  # fmt: skip
KEYS = st.sampled_from(["0", "-1", "2047", "2048", "9" * 20, "1e3", *WORDS])
INTEGERS = st.sampled_from([*WHOLE, *(-n for n in WHOLE)])
NUMBERS = st.sampled_from(FLOATS)
TEXTS = st.sampled_from([*WORDS, "a" * 70_000]) | st.text(max_size=8)
SCALARS = st.none() | st.booleans() | INTEGERS | NUMBERS | TEXTS
TREES = st.recursive(SCALARS, lambda x: st.lists(x, max_size=3) | st.dictionaries(TEXTS, x, max_size=3), max_leaves=6)


DEEPER = b"\x91" * 3000 + b"\x01"  # lists in lists, in msgpack


class Asked(NamedTuple):
    """One HTTP request."""

    method: str
    path: str
    body: bytes | None = None


def nested(depth: int, leaf: Any, in_lists: bool) -> Any:
    for _ in range(depth):
        leaf = [leaf] if in_lists else {"a": leaf}
    return leaf


DEEP = st.builds(nested, st.sampled_from([2, 63, 64, 65, 400]), SCALARS, st.booleans())
ANYTHING = TREES | DEEP | SCALARS.map(lambda one: [one] * 400)


def values(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Values for a JSON schema: allowed ones, its bounds, and values beyond them."""
    kind = schema.get("type")
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    if "anyOf" in schema:
        return st.one_of(*map(values, schema["anyOf"]))
    if kind == "integer":
        return st.sampled_from(ends(schema, 1)) | INTEGERS
    if kind == "number":
        return st.sampled_from(ends(schema, 1e-6)) | NUMBERS | INTEGERS
    if kind == "array":
        each = values(schema.get("items", {}))
        return st.lists(each, max_size=4) | each.map(lambda one: [one] * 400)
    if kind == "object" and "properties" in schema:
        return bodies(schema)
    if kind == "object":
        inner = schema.get("additionalProperties")
        return st.dictionaries(KEYS, values(inner if isinstance(inner, dict) else {}), max_size=3)
    return {"string": lengths(schema), "boolean": st.booleans(), "null": st.none()}.get(kind or "", ANYTHING)


def ends(schema: Mapping[str, Any], step: float) -> list[Any]:
    given = [schema[name] for name in ("minimum", "maximum") if name in schema]
    return [1, 2, *(end + by * step for end in given for by in (-1, 0, 1))]


def lengths(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    longest = schema.get("maxLength", 0)
    return TEXTS | st.sampled_from(["x" * longest, "x" * (longest + 1)]) if longest < 1 << 16 else TEXTS


@st.composite
def bodies(draw: Draw, schema: Mapping[str, Any], plain: Mapping[str, Any] = {}) -> dict[str, Any]:
    """An object with a few fields that are drawn, and all that it must have. ``plain``: fields that are served so."""
    fields = schema["properties"]
    drawn = {*draw(st.lists(st.sampled_from(sorted(fields)), max_size=FEW, unique=True))}
    drawn |= {*schema.get("required", ())} - plain.keys()
    strange = draw(st.integers(0, 9)) == 0
    return {**plain, **{name: draw(ANYTHING if strange else values(fields[name])) for name in sorted(drawn)}}


def requests(openapi: Mapping[str, Any], plain: Mapping[str, dict[str, Any]]) -> st.SearchStrategy[Asked]:
    """Requests to every route. ``plain``: by path, fields of a body that is served."""
    return st.one_of(*_of_each_route(openapi, plain))


def _of_each_route(openapi: Mapping[str, Any], plain: Mapping[str, Any]) -> Iterator[st.SearchStrategy[Asked]]:
    for path, operations in openapi["paths"].items():
        for method, operation in operations.items():
            if "requestBody" in operation:
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                yield st.builds(partial(_sent, method, path), bodies(schema, plain.get(path, {})), st.booleans())
            elif "{" in path:
                named = TEXTS.filter(lambda text: len(text) < 1 << 14 and sendable(text))
                yield named.map(partial(_named, method, path))
            else:
                yield st.just(Asked(method, path, b"" if method == "post" else None))


def _sent(method: str, path: str, body: Any, in_ascii: bool) -> Asked:
    return Asked(method, path, json.dumps(body, ensure_ascii=in_ascii).encode(errors="surrogatepass"))


def _named(method: str, path: str, name: str) -> Asked:
    before, _, rest = path.partition("{")
    return Asked(method, before + quote(name or " ", safe="") + rest.partition("}")[2])


def sendable(text: str) -> bool:
    """True if UTF-8 can encode ``text``."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def others(value: Any) -> Iterator[Any]:
    """``value``, of an export that was unpacked, with each of its parts replaced by each of many others."""
    data = [b"", b"\0", b"\xff" * 4, b"x" * 5, b"\xff" * 64, b"\0" * 4096]
    numbers = [*ENDS, *(-n for n in ENDS if n <= 2**63), *FLOATS]
    for place in _places(value, ()):
        for new in [*numbers, *data, *filter(sendable, WORDS), None, True, [], {}, msgspec.Raw(DEEPER)]:
            yield _replaced(value, place, new)


def _places(value: Any, at: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in inner:
        yield from _places(each, (*at, name))


def _replaced(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    if not place:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[place[0]] = _replaced(copy[place[0]], place[1:], new)
    return copy
