"""Options: each is declared once, as a field of a struct whose annotation has its range, choices, help and parser."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Any, NamedTuple, get_args, get_origin

import msgspec
from msgspec import Meta, structs

from lamina.utils.cpu_cores import AUTO, parse_cores

from .flag_groups import flag_name, with_value

MEASURED = "measured"
_SIZES = {"": 1, "B": 1} | {f"{x}B": 1000**n for n, x in enumerate("KMGT", 1)}
_SIZES |= {f"{x}IB": 1024**n for n, x in enumerate("KMGT", 1)}
_TYPE_WORDS = {tuple: "list", NoneType: "None"}


class Choices(NamedTuple):
    """The values that an option may have."""

    names: Sequence[str]


class ParsedBy(NamedTuple):
    """The parser of an option's text; other values are left to the check of the option's type."""

    parse: Callable[[Any], Any]


class Option(NamedTuple):
    """One field of a struct of options. Its annotation has, after the type, its range, its choices and its help."""

    name: str
    types: tuple[type, ...]  # of which a value has one exactly
    default: Any
    help: str
    range: Meta = Meta()
    choices: Choices = Choices(())
    read: ParsedBy = ParsedBy(lambda value: value)

    def parse(self, value: Any) -> Any:
        """The option's value of what a user wrote: of a flag's text, or of a Python object. Raises ValueError."""
        return self.read.parse(value)

    def check(self, value: Any) -> None:
        """Raises ValueError, naming the flag, for a value of another type, out of range, or none of the choices."""
        if type(value) not in self.types and not (float in self.types and type(value) is int):
            words = " | ".join(_TYPE_WORDS.get(t, t.__name__) for t in self.types)
            raise ValueError(f"{flag_name(self.name)} must be of type {words}, not {value!r}")
        low, most = self.range.ge, self.range.le
        if self.range.gt == 0 and value <= 0:
            raise ValueError(f"{flag_name(self.name)} must be positive, not {value}")
        if low is not None and value < low:
            raise ValueError(f"{flag_name(self.name)} must be at least {low}, not {value}")
        if most is not None and value > most:
            raise ValueError(f"{flag_name(self.name)} must be at most {most}, not {value}")
        if self.choices.names and value not in self.choices.names:
            known = ", ".join(filter(None, self.choices.names))
            raise ValueError(f"{flag_name(self.name)} must be one of {known}, not {value!r}")


@cache
def options_of(struct: type[Options]) -> dict[str, Option]:
    """The options of a struct, by name, in their order."""
    options, fields = dict[str, Option](), {str: "help", Meta: "range", Choices: "choices", ParsedBy: "read"}
    for field in structs.fields(struct):
        kind, *metadata = get_args(field.type)
        members = get_args(kind) if isinstance(kind, UnionType) else (kind,)
        types = tuple(get_origin(member) or member for member in members)
        options[field.name] = Option(field.name, types, field.default, **{fields[type(x)]: x for x in metadata})
    return options


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """A group of options. Raises ValueError, naming the flag, for a value that an option cannot have."""

    def __post_init__(self) -> None:
        for option in options_of(type(self)).values():
            option.check(getattr(self, option.name))


def strip_torch_prefix(value: Any) -> str:
    return str(value).removeprefix("torch.")


def parse_optional(value: Any) -> Any:
    """The text, "" for None."""
    return "" if value is None else value


def parse_object(value: Any) -> Any:
    """The JSON text, with sorted keys, of an object or of its text; "" for an empty one. Other values are left as they
    are where they are no JSON of an object.
    """
    try:
        given = json.loads(value) if isinstance(value, str) and value.strip() else value or {}
        if isinstance(given, dict):
            return json.dumps(given, sort_keys=True) if given else ""
    except (ValueError, TypeError, RecursionError):
        pass
    return value


def is_object(text: str) -> bool:
    """Return whether a text is what ``parse_object`` makes of an object."""
    return not text or (text.startswith("{") and parse_object(text) == text)


def check_size(value: Any) -> Any:
    return str(value) if type(value) is int else value


def parse_list(value: Any) -> Any:
    """A list of texts, of text with commas or of a list."""
    if isinstance(value, str):
        value = value.split(",") if value else ()
    return tuple(map(str, value)) if isinstance(value, list | tuple) else value


def parse_weights(value: Any) -> Any:
    """Positive numbers, of text with commas or of a list; or "measured". Raises ValueError."""
    texts = value if value == MEASURED else parse_list(value)
    return tuple(_weight(text) for text in texts) if isinstance(texts, tuple) else texts


def _weight(text: Any) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not 0.0 < weight < float("inf"):
        example = "such as 0.7,0.3, or measured"
        raise ValueError(
            f"--memory-weights must be positive numbers separated by commas, {example}, not {str(text).strip()!r}"
        )
    return weight


def parse_core_lists(value: Any) -> Any:
    """The cores of each worker, of text as in --cores, or of a list with text or numbers for each worker."""
    if isinstance(value, str):
        return value if value == AUTO else tuple(parse_cores(value)) if value else ()
    if not isinstance(value, list | tuple):
        return value
    each = (",".join(map(str, cores)) if isinstance(cores, list | tuple) else str(cores) for cores in value)
    return tuple(cores for text in each for cores in parse_cores(text))


def parse_size(text: str | int, name: str) -> int:
    """Bytes of "4GiB", "512MB", "1048576". Raises ValueError that names ``name``."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2].upper() not in _SIZES or float(match[1]) <= 0:
        units = "B, KB to TB, KiB to TiB"
        raise ValueError(f"{name} must be a size such as 512MiB or 4GiB ({units}), not {text!r}")
    return int(float(match[1]) * _SIZES[match[2].upper()])


def size_flag(nbytes: int, *, least: bool = False) -> str:
    """The size for a flag, in tenths of a unit: the next one below ``nbytes``; with ``least``, the next one above."""
    units = enumerate(("B", "KiB", "MiB", "GiB", "TiB"))
    size, unit = max((1024**n, unit) for n, unit in units if not n or 1024**n <= nbytes)
    tenths = -(-10 * nbytes // size) if least else 10 * nbytes // size
    return f"{tenths / 10:.1f}".removesuffix(".0") + unit


def parse_seconds(text: str, name: str) -> float:
    """Seconds of "100ms", "2s", "50us", "7d"; 0.0 of nothing. Raises ValueError that names ``name``."""
    if not text:
        return 0.0
    units = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)({'|'.join(units)})", text.strip())
    value = float(match[1]) * units[match[2]] if match else 0.0
    if not 0 < value < math.inf:
        raise ValueError(f"{with_value(name, text)} is not a time above 0 with its unit, such as 100ms")
    return value
