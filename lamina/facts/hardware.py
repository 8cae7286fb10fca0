"""The devices that a plan can name, with the sources of their numbers: ``data/devices.toml``, and files like it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from lamina.config.option import parse_size

_T = TypeVar("_T")
Above0 = Annotated[float, Meta(gt=0, le=1e18)]
Words = Annotated[str, Meta(min_length=1)]


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    title: Words
    tflops: Above0
    memory: Words
    bandwidth: Above0
    source: Words
    network: Above0 | None = None
    interconnect: Above0 | None = None
    cpu: bool = False


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator: the peak rates of its data sheet, which no program reaches.

    tflops: dense bf16, in 10^12 FLOP/s. memory_gb, bandwidth_gbs, network_gbs: 10^9 bytes (per second). ``network_gbs``
    is one direction of its own network card; ``interconnect_gbs`` is one direction to other devices of its host. None:
    not stated. ``memory``: as the source writes it. ``is_cpu``: it multiplies by packed weights.
    """

    name: str
    title: str
    tflops: float
    memory: str
    memory_gb: float
    bandwidth_gbs: float
    network_gbs: float | None
    interconnect_gbs: float | None = None
    is_cpu: bool = False
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


def entry_of(entry: Mapping[str, Any], kind: type[_T], where: str) -> _T:
    """Return ``entry`` as a struct. Raises ValueError, prefixed by ``where``, for a field that it cannot have."""
    try:
        return msgspec.convert(entry, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {error}") from None


def _device(name: str, table: dict[str, Any], path: Path) -> Device:
    where = f"{path}: [{name}]"
    entry = entry_of(table, _Entry, where)
    memory = entry.memory.strip()
    if memory.rstrip("Bb") == memory:
        raise ValueError(f"{where}: memory {memory} has no unit: write GB (10^9 bytes) or GiB (2^30)")
    return Device(
        name=name, title=entry.title, tflops=entry.tflops, memory=memory,
        memory_gb=parse_size(memory, f"{where}: memory") / 1e9, bandwidth_gbs=entry.bandwidth,
        network_gbs=entry.network, interconnect_gbs=entry.interconnect, is_cpu=entry.cpu, source=entry.source,
    )  # fmt: skip


DEVICES: Mapping[str, Device] = MappingProxyType(read_devices(Path(__file__).parent / "data" / "devices.toml"))


def device(name: str, flag: str, known: Mapping[str, Device] = DEVICES) -> Device:
    """Return the device of that name, in any case. Raises ValueError that names ``flag`` and the known devices."""
    named = known.get(name.lower())
    if named is None:
        raise ValueError(f"{flag} {name} is not one of {', '.join(known)}")
    return named
