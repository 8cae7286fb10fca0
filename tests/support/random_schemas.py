"""Random JSON schemas over the keywords that are supported, with bounded lengths, and values that each allows."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

LETTERS = string.ascii_lowercase + ' éß😀"\\/{}[]:,\n'
DEPTH = 3


class Made(NamedTuple):
    """A schema, and a maker of values that it allows."""

    schema: dict[str, Any]
    value: Callable[[Random], Any]


def text_of(dice: Random, least: int, most: int) -> str:
    return "".join(dice.choice(LETTERS) for _ in range(dice.randint(least, most)))


def _plain(dice: Random) -> Made:
    return dice.choice(
        [
            Made({"type": "boolean"}, lambda d: d.random() < 0.5),
            Made({"type": "null"}, lambda d: None),
            Made({"type": ["boolean", "null"]}, lambda d: d.choice([True, False, None])),
        ]
    )


def _integer(dice: Random) -> Made:
    low, step = dice.randint(-2000, 2000), dice.choice([1, 1, 1, 3, 10])
    high = low + dice.randint(2 * step, 3000)
    schema = {"type": "integer", "minimum": low, dice.choice(["maximum", "exclusiveMaximum"]): high}
    schema |= {"multipleOf": step} if step > 1 else {}
    return Made(schema, lambda d: d.randint(-(-low // step), (high - 1) // step) * step)


def _number(dice: Random) -> Made:
    low = dice.randint(-50, 50)
    high = low + dice.randint(2, 90)
    return Made({"type": "number", "minimum": low, "maximum": high}, lambda d: round(d.uniform(low, high), 3))


def _string(dice: Random) -> Made:
    least = dice.randint(0, 4)
    most = least + dice.randint(0, 8)
    return Made({"type": "string", "minLength": least, "maxLength": most}, lambda d: text_of(d, least, most))


def _pattern(dice: Random) -> Made:
    kind = dice.randrange(3)
    if kind == 0:
        return Made({"type": "string", "pattern": "^[a-d]{2,5}-[0-9]{1,3}$"}, lambda d: f"ab-{d.randint(0, 999)}")
    if kind == 1:
        return Made({"type": "string", "pattern": "^(x|yy)+z?$"}, lambda d: "".join(d.choices(["x", "yy"], k=3)) + "z")
    return Made(
        {"type": "string", "format": "date"}, lambda d: f"20{d.randint(10, 99)}-0{d.randint(1, 9)}-1{d.randint(0, 9)}"
    )


def _enum(dice: Random) -> Made:
    values: list[Any] = [text_of(dice, 0, 6), dice.randint(-5, 5), None, True, {"a": [1]}, "é😀"]
    values = dice.sample(values, dice.randint(1, 4))
    if len(values) == 1 and dice.random() < 0.5:
        return Made({"const": values[0]}, lambda d: values[0])
    return Made({"enum": values}, lambda d: d.choice(values))


def _array(dice: Random, depth: int) -> Made:
    item = random_schema(dice, depth + 1)
    least = dice.randint(0, 2)
    most = least + dice.randint(0, 2)
    schema: dict[str, Any] = {"type": "array", "items": item.schema, "minItems": least, "maxItems": most}
    first = [random_schema(dice, depth + 1) for _ in range(dice.randint(0, least))] if dice.random() < 0.3 else []
    schema |= {"prefixItems": [one.schema for one in first]} if first else {}

    def value(d: Random) -> Any:
        count = d.randint(least, most)
        return [one.value(d) for one in first] + [item.value(d) for _ in range(count - len(first))]

    return Made(schema, value)


def _object(dice: Random, depth: int) -> Made:
    names = dice.sample(["a", "name", "x y", "é", "long_name", "b2"], dice.randint(0, 4))
    known = {name: random_schema(dice, depth + 1) for name in names}
    needed = [name for name in names if dice.random() < 0.6]
    more = random_schema(dice, DEPTH) if dice.random() < 0.2 and len(needed) == len(names) else None
    schema: dict[str, Any] = {"type": "object", "properties": {name: one.schema for name, one in known.items()}}
    schema |= {"required": needed, "additionalProperties": False if more is None else more.schema}

    def value(d: Random) -> Any:
        kept = {name: one.value(d) for name, one in known.items() if name in needed or d.random() < 0.5}
        return kept | ({"zz": more.value(d)} if more is not None and d.random() < 0.5 else {})

    return Made(schema, value)


def _any_of(dice: Random, depth: int) -> Made:
    ways = [random_schema(dice, depth + 1) for _ in range(dice.randint(2, 3))]
    return Made({"anyOf": [one.schema for one in ways]}, lambda d: d.choice(ways).value(d))


def random_schema(dice: Random, depth: int = 0) -> Made:
    """Returns a schema of at most ``DEPTH`` levels below ``depth``."""
    simple = (_plain, _integer, _number, _string, _pattern, _enum)
    if depth >= DEPTH or dice.random() < 0.45:
        return dice.choice(simple)(dice)
    return dice.choice((_array, _object, _object, _any_of))(dice, depth)


def root_schema(seed: int) -> Made:
    """Returns the schema of a number. Some name their parts by references."""
    dice = Random(seed)
    made = random_schema(dice)
    if dice.random() < 0.25:
        schema = {"type": "array", "items": {"$ref": "#/$defs/one"}, "minItems": 1, "maxItems": 2}
        return Made(schema | {"$defs": {"one": made.schema}}, lambda d: [made.value(d)])
    return made


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
