"""Measured operators, interpolated; see data/operators.csv, and files like it."""

from __future__ import annotations

import csv
import math
from bisect import bisect_left
from collections.abc import Collection, Iterable
from pathlib import Path

from .tables import DATA

OPERATORS = {
    "linear": ("rows", "ranks", "weights"),
    "elementwise": ("rows", "ranks", "width"),
    "all_reduce": ("bytes", "ranks"),
    "attention": ("bytes", "group"),
}
COLUMNS = ["op", "device", "dtype", "shape", "seconds", "source"]
Point = tuple[float, float, float]  # rows or bytes, seconds, weights or width


class OperatorTables:
    """Seconds of operators on a device. A later file replaces earlier ones, for all points of an operator
    on a device.
    """

    def __init__(self, files: Iterable[Path] = ()) -> None:
        self._curves: dict[tuple[str, str, int], list[Point]] = {}  # op, device, ranks or group
        self._last = set[str]()  # devices of the last file
        for path in (DATA / "operators.csv", *files):
            curves = _read(path)
            replaced = {(op, device) for op, device, _ in curves}
            self._curves = {k: v for k, v in self._curves.items() if k[:2] not in replaced} | curves
            self._last = {device for _, device, _ in curves}

    def check_devices(self, wanted: Collection[str], flag: str) -> None:
        """Raises ValueError if the last file has none of the ``wanted`` devices: it would change nothing."""
        if not self._last & set(wanted):
            there = ", ".join(sorted(self._last)) or "no device"
            raise ValueError(f"{flag} has operators of {there}, and --devices are {', '.join(wanted)}")

    def put(self, op: str, device: str, ranks: int, points: Iterable[Point]) -> None:
        """Replace the points of an operator by measured ones."""
        self._curves[op, device, ranks] = sorted(points)

    def has(self, op: str, device: str, ranks: int) -> bool:
        """Return True if the operator was measured for so many ranks."""
        return (op, device, ranks) in self._curves

    def nearest(self, op: str, device: str, most: int) -> int:
        """Return the largest group up to ``most`` for which it was measured, else the smallest one; 0 for none."""
        known = sorted(group for name, on, group in self._curves if (name, on) == (op, device))
        return max((g for g in known if g <= most), default=known[0] if known else 0)

    def seconds(self, op: str, device: str, ranks: int, size: float) -> tuple[float, float]:
        """Return the seconds of an operator of ``size`` rows (bytes for all_reduce, attention), and the weights or the
        width for which they were measured. Interpolation is linear in both logarithms. Above the last point the rate is
        constant, below the first one the time.
        """
        curve = self._curves[op, device, ranks]
        i = bisect_left(curve, (size,))
        if i == 0:
            return curve[0][1], curve[0][2]
        if i == len(curve):
            return curve[-1][1] * size / curve[-1][0], curve[-1][2]
        (x, s, of), (x2, s2, _) = curve[i - 1], curve[i]
        part = math.log(size / x) / math.log(x2 / x)
        return s * (s2 / s) ** part, of


def _read(path: Path) -> dict[tuple[str, str, int], list[Point]]:
    curves: dict[tuple[str, str, int], list[Point]] = {}
    dtypes: dict[tuple[str, str], str] = {}
    with open(path, newline="") as file:
        lines = [(n, line) for n, line in enumerate(file, 1) if line.strip() and not line.startswith("#")]
    if not lines or next(csv.reader([lines[0][1]])) != COLUMNS:
        raise ValueError(f"--operators {path}: the first line must be {','.join(COLUMNS)}")
    for number, line in lines[1:]:
        where = f"--operators {path}, line {number}"
        row = next(csv.reader([line]))
        if len(row) != len(COLUMNS):
            raise ValueError(f"{where}: {len(row)} fields, not {len(COLUMNS)}")
        op, device, dtype, shape, seconds, source = row
        if op not in OPERATORS:
            raise ValueError(f"{where}: {op} is not one of {', '.join(OPERATORS)}")
        if not source.strip():
            raise ValueError(f"{where}: source is empty: name its origin")
        if (before := dtypes.setdefault((op, device.lower()), dtype)) != dtype:
            raise ValueError(f"{where}: {op} on {device} is of {dtype}, and of {before} before: a file for each")
        sizes = _sizes(shape, OPERATORS[op], where)
        took = _number(seconds, f"{where}: seconds")
        key, ranks, *of = (sizes[name] for name in OPERATORS[op])
        curves.setdefault((op, device.lower(), int(ranks)), []).append((key, took, of[0] if of else 0.0))
    return {k: sorted(v) for k, v in curves.items()}


def _sizes(shape: str, names: Iterable[str], where: str) -> dict[str, float]:
    sizes = {}
    for pair in shape.split():
        name, _, value = pair.partition("=")
        sizes[name] = _number(value, f"{where}: {name}")
    if set(sizes) != set(names):
        raise ValueError(f"{where}: shape {shape!r} must have {' '.join(f'{n}=NUMBER' for n in names)}")
    return sizes


def _number(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{where} must be a number above 0, not {text!r}")
    return value
