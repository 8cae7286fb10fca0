"""How an option is declared, once, as a field of a struct whose annotation says the rest; and how its value is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin

import msgspec

from lamina.cores import AUTO, parse_cores

MEASURED = "measured"


def about(
    help: str,
    *,
    low: int | None = None,
    most: int | None = None,
    choices: Sequence[str] = (),
    parse: Callable[[Any], Any] | None = None,
) -> msgspec.Meta:
    """What an option's annotation says of it. ``help``: the text of its flag; ``low``, ``most``: its range;
    ``parse``: makes its value of what people write, and leaves anything else to the check of its type.
    """
    return msgspec.Meta(description=help, ge=low, le=most, extra={"choices": tuple(choices), "parse": parse})


class Option(NamedTuple):
    """One field of a struct of options, as its annotation declares it."""

    name: str
    types: tuple[type, ...]  # that a value may have, exactly one of them
    default: Any
    meta: msgspec.Meta

    @property
    def flag(self) -> str:
        return flag(self.name)

    @property
    def help(self) -> str:
        return self.meta.description or ""

    def parse(self, value: Any) -> Any:
        """The option's value of what a user wrote: of a flag's text, or of a Python object. Raises ValueError."""
        parse = (self.meta.extra or {})["parse"]
        return parse(value) if parse else value

    def check(self, value: Any) -> None:
        """Raises ValueError, naming the flag, for a value of another type, out of range, or none of the choices."""
        if type(value) not in self.types and not (float in self.types and type(value) is int):
            words = " | ".join("list" if t is tuple else t.__name__ for t in self.types)
            raise ValueError(f"{self.flag} must be of type {words}, not {value!r}")
        if isinstance(value, int) and self.meta.ge is not None and value < self.meta.ge:
            raise ValueError(f"{self.flag} must be at least {self.meta.ge}, not {value}")
        if isinstance(value, int) and self.meta.le is not None and value > self.meta.le:
            raise ValueError(f"{self.flag} must be at most {self.meta.le}, not {value}")
        choices = (self.meta.extra or {})["choices"]
        if choices and value not in choices:
            raise ValueError(f"{self.flag} must be one of {', '.join(choices)}, not {value!r}")


@cache
def options_of(struct: type[Options]) -> dict[str, Option]:
    """The options of a struct, by name, in their order."""
    options = {}
    for field in msgspec.structs.fields(struct):
        kind, meta = get_args(field.type)
        members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        types = tuple(get_origin(member) or member for member in members)
        options[field.name] = Option(field.name, types, field.default, meta)
    return options


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """A group of options. Raises ValueError, naming the flag, for a value that an option cannot have."""

    def __post_init__(self) -> None:
        for option in options_of(type(self)).values():
            option.check(getattr(self, option.name))


def torch_name(value: Any) -> str:
    return str(value).removeprefix("torch.")


def size_text(value: Any) -> Any:
    return str(value) if type(value) is int else value


def listed(value: Any) -> Any:
    """A list of texts, of text with commas or of a list."""
    if isinstance(value, str):
        value = value.split(",") if value else ()
    return tuple(map(str, value)) if isinstance(value, list | tuple) else value


def parse_weights(value: Any) -> Any:
    """Positive numbers, of text with commas or of a list; or "measured". Raises ValueError."""
    texts = value if value == MEASURED else listed(value)
    return tuple(_weight(text) for text in texts) if isinstance(texts, tuple) else texts


def _weight(text: Any) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not 0.0 < weight < float("inf"):
        example = "such as 0.7,0.3, or measured"
        raise ValueError(f"--memory-weights must be positive numbers by comma, {example}, not {str(text).strip()!r}")
    return weight


def cores_of_each(value: Any) -> Any:
    """The cores of each worker, of text as in --cores, or of a list with text or numbers for each worker."""
    if isinstance(value, str):
        return value if value == AUTO else tuple(parse_cores(value)) if value else ()
    if not isinstance(value, list | tuple):
        return value
    each = (",".join(map(str, cores)) if isinstance(cores, list | tuple) else str(cores) for cores in value)
    return tuple(cores for text in each for cores in parse_cores(text))


def flag(name: str) -> str:
    """The command-line flag of an option."""
    return "--" + name.replace("_", "-")


def parse_size(text: str | int, name: str) -> int:
    """Bytes of "4GiB", "512MB", "1048576". Raises ValueError that names ``name``."""
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2].upper() not in units or float(match[1]) <= 0:
        raise ValueError(f"{name} must be a size such as 512MiB or 4GiB, not {text!r}")
    return int(float(match[1]) * units[match[2].upper()])
