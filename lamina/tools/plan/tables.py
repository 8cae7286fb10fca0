"""The planner's data files, read and checked: constants, prices, links, baselines. Each number has an origin."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import msgspec

from lamina.facts.hardware import Above0, Device, Words, entries, entry_of

DATA = Path(__file__).parent / "data"
BOOKS = DATA / "prices"
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(Gbps|Gbit/s|GB/s)(?::(\w+))?")


@dataclass(frozen=True)
class Constants:
    """The constants of the cost model, from data/constants.toml. ``origins``: name -> origin."""

    values: Mapping[str, float]
    origins: Mapping[str, str]

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def moved(self, name: str, factor: float) -> Constants:
        """Return the constants with one of them multiplied by ``factor``, to see its effect."""
        return replace(self, values={**self.values, name: self.values[name] * factor})


class _Book(msgspec.Struct, forbid_unknown_fields=True):
    date: Words
    currency: Words
    source: Words


class _Price(msgspec.Struct, forbid_unknown_fields=True):
    hour: Above0
    source: str = ""


@dataclass(frozen=True)
class PriceBook:
    """US dollars for an hour of one device, by its name."""

    name: str
    date: str
    hours: Mapping[str, float]
    sources: Mapping[str, str]

    def hour(self, device: Device) -> float:
        """Return the price of a device. Raises ValueError that explains how to add one."""
        if device.name not in self.hours:
            raise ValueError(
                f"--prices {self.name} has no price of {device.name}, only of {', '.join(self.hours)}: write a file "
                f"with [book] and [{device.name}] hour = ..., see lamina/tools/plan/data/prices/paper.toml"
            )
        return self.hours[device.name]


def dollars_of(hour: float, tokens_s: float) -> float:
    """Return the cost of 10^6 tokens, for devices at ``hour`` dollars an hour that make ``tokens_s`` a second."""
    return hour / 3600 / tokens_s * 1e6


@dataclass(frozen=True)
class NetworkLink:
    """A network card in one direction. rate: of the line, in bytes per second; share: of it that a stack reaches.
    round_trip_s: without data; cards: factor on the rate of the devices' own cards.
    """

    name: str
    rate: float
    share: float
    round_trip_s: float
    source: str
    cards: float = 1.0

    def bandwidth(self, *devices: Device) -> float:
        """Return the bytes per second of one card between two kinds of devices: no more than a card of either has."""
        slowest = self.slowest(devices)
        return self.share * (min(self.rate, self._card(slowest)) if slowest else self.rate)

    def cut_by(self, *devices: Device) -> str:
        """Return why the line's rate is not reached, in words; "" if a card of each device has it."""
        slowest = self.slowest(devices)
        if slowest is None or self._card(slowest) >= self.rate:
            return ""
        return f"cut to {self._card(slowest) * 8 / 1e9:.0f} Gbps by the card of {slowest.name}"

    @staticmethod
    def slowest(devices: Iterable[Device]) -> Device | None:
        """Return the device with the slowest card; None if none states a card."""
        return min((d for d in devices if d.network_gbs), key=lambda d: d.network_gbs or 0.0, default=None)

    def _card(self, device: Device) -> float:
        return (device.network_gbs or 0.0) * 1e9 * self.cards


@dataclass(frozen=True)
class Baseline:
    """The model of a homogeneous engine. max_sequences: sequences at once, 0 = as many as fit; driver_s: of a step, in
    which devices wait for their host.
    """

    name: str
    max_sequences: int
    driver_s: float
    origin: str


def constants() -> Constants:
    """Read the constants. Raises ValueError for a bad table."""
    values, origins = {}, {}
    for name, entry in entries(DATA / "constants.toml"):
        values[name], origins[name] = float(entry["value"]), f"{entry['origin']} ({entry['unit']})"
    return Constants(values, origins)


def price_book(name: str) -> PriceBook:
    """Read a price book. ``name``: of a shipped book, or a file. Raises ValueError that names --prices."""
    path = BOOKS / f"{name}.toml" if re.fullmatch(r"\w+", name) else Path(name).expanduser()
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in BOOKS.glob("*.toml")))
        raise ValueError(f"--prices {name} is neither a file nor one of {known}")
    tables = dict(entries(path))
    if "book" not in tables:
        raise ValueError(f"--prices {path}: [book] is missing, with date, currency and source")
    head = entry_of(tables.pop("book"), _Book, f"--prices {path}: [book]")
    if head.currency != "USD":
        raise ValueError(f"--prices {path}: currency {head.currency} is not USD, in which all sums are")
    prices = {k.lower(): entry_of(entry, _Price, f"--prices {path}: [{k}]") for k, entry in tables.items()}
    sources = {device: price.source or head.source for device, price in prices.items()}
    return PriceBook(name, head.date, {device: price.hour for device, price in prices.items()}, sources)


def network_link(text: str) -> NetworkLink:
    """Parse 400Gbps, 50GB/s, 400Gbps:nccl. Raises ValueError that names --link."""
    stacks = dict(entries(DATA / "links.toml"))
    match = _RATE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"--link {text} is not a rate such as 400Gbps or 50GB/s, of one network card in one direction")
    stack = match[3] or next(iter(stacks))
    if stack not in stacks:
        raise ValueError(f"--link {text}: {stack} is not one of {', '.join(stacks)}")
    entry = stacks[stack]
    rate = float(match[1]) * 1e9 / (1 if match[2] == "GB/s" else 8)
    return NetworkLink(text, rate, float(entry["share"]), float(entry["round_trip"]) * 1e-6, entry["source"])


def baseline(name: str) -> Baseline:
    """Return a baseline by name. Raises ValueError that names --baseline."""
    known = dict(entries(DATA / "baselines.toml"))
    if name not in known:
        raise ValueError(f"--baseline {name} is not one of {', '.join(known)}")
    entry = known[name]
    return Baseline(name, int(entry["most"]), float(entry["driver"]), str(entry["origin"]))


@cache
def modelling_errors() -> Constants:
    """Return the relative errors of a step's time; see data/errors.toml."""
    sections = dict(entries(DATA / "errors.toml"))
    return Constants(
        {name: float(e["share"]) for name, e in sections.items()}, {name: e["origin"] for name, e in sections.items()}
    )
