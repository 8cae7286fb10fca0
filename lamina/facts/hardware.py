"""The devices that a plan can name, with the sources of their numbers: ``data/devices.toml``, and files like it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lamina.config.option import parse_size

_RATES = ("tflops", "bandwidth")
_WORDS = ("title", "memory", "source")
_CARDS = ("network", "interconnect")


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator: the peak rates of its data sheet, which no program reaches.

    tflops: dense bf16, in 10^12 FLOP/s. memory_gb, bandwidth_gbs, network_gbs: 10^9 bytes (per second). ``network_gbs``
    is one direction of its own network card; ``interconnect_gbs`` is one direction to other devices of its host. None:
    not stated. ``memory``: as the source writes it.
    """

    name: str
    title: str
    tflops: float
    memory: str
    memory_gb: float
    bandwidth_gbs: float
    network_gbs: float | None
    interconnect_gbs: float | None = None
    source: str


def read_devices(path: Path) -> dict[str, Device]:
    """Return the devices of a file, by name. Raises ValueError, one line with file and entry, for an invalid table."""
    return {name.lower(): _device(name.lower(), entry, path) for name, entry in entries(path)}


def entries(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the tables of a TOML file, with their names. Raises ValueError that names the file."""
    try:
        described = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no TOML file: {error}") from None
    for name, entry in described.items():
        if not isinstance(entry, dict):
            raise ValueError(f"{path}: {name} stands outside of a table such as [{name}]")
        yield name, entry


def check_fields(entry: Mapping[str, Any], known: Mapping[str, type], optional: Mapping[str, type], where: str) -> None:
    """Raise ValueError, prefixed by ``where``, unless ``entry`` has all fields of ``known`` and no others than these
    and ``optional`` ones. Numbers must be positive, and no field empty.
    """
    for field in known.keys() - entry.keys():
        raise ValueError(f"{where}: {field} is missing")
    for field, value in entry.items():
        kind = {**known, **optional}.get(field)
        if kind is None:
            raise ValueError(f"{where}: {field} is not one of {', '.join([*known, *optional])}")
        accepted = isinstance(value, int | float) and not isinstance(value, bool) if kind is float else True
        if not accepted or (kind is str and not isinstance(value, str)):
            raise ValueError(f"{where}: {field} must be a {'number' if kind is float else 'text'}, not {value!r}")
        if not value or (kind is float and not 0 < value < float("inf")):
            raise ValueError(f"{where}: {field} must be {'above 0' if kind is float else 'a text'}, not {value!r}")


def _device(name: str, entry: dict[str, Any], path: Path) -> Device:
    where = f"{path}: [{name}]"
    check_fields(
        entry, {**dict.fromkeys(_WORDS, str), **dict.fromkeys(_RATES, float)}, dict.fromkeys(_CARDS, float), where
    )
    memory = entry["memory"].strip()
    if memory.rstrip("Bb") == memory:
        raise ValueError(f"{where}: memory {memory} has no unit: write GB (10^9 bytes) or GiB (2^30)")
    network, interconnect = (None if entry.get(c) is None else float(entry[c]) for c in _CARDS)
    return Device(
        name=name,
        title=entry["title"],
        tflops=float(entry["tflops"]),
        memory=memory,
        memory_gb=parse_size(memory, f"{where}: memory") / 1e9,
        bandwidth_gbs=float(entry["bandwidth"]),
        network_gbs=network,
        interconnect_gbs=interconnect,
        source=entry["source"],
    )


DEVICES: Mapping[str, Device] = MappingProxyType(read_devices(Path(__file__).parent / "data" / "devices.toml"))


def device(name: str, flag: str, known: Mapping[str, Device] = DEVICES) -> Device:
    """Return the device of that name, in any case. Raises ValueError that names ``flag`` and the known devices."""
    named = known.get(name.lower())
    if named is None:
        raise ValueError(f"{flag} {name} is not one of {', '.join(known)}")
    return named
