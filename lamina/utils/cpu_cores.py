"""The cores on which the workers of one machine run (``--cores``). Policy: no I/O."""

from __future__ import annotations

import re
from collections.abc import Sequence

AUTO = "auto"

Cores = tuple[int, ...]  # empty = any, as the system chooses


def parse_cores(text: str) -> list[Cores]:
    """Parse ``0-3,8/4-7`` to the cores of each worker. Raises ValueError, naming the flag, on anything else."""
    return [_parse(part) for part in text.split("/")]


def _parse(text: str) -> Cores:
    cores: set[int] = set()
    for piece in text.split(","):
        match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", piece)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise ValueError(f"--cores: {text!r} is no list of cores; write one for each worker, such as 0-3,8/4-7")
        cores.update(range(first, last + 1))
    return tuple(sorted(cores))


def assign_cores(
    asked: Sequence[Cores] | str, wanted: Sequence[int], available: Sequence[int], *, at_once: bool
) -> list[list[Cores]]:
    """Return the cores of every worker, pool by pool: compute, memory, prefill workers, ``wanted`` of each.

    ``asked``: the cores of each worker, or ``auto``, or nothing: then the system places them. ``available``: cores that
    this process may use, with neighbours adjacent. ``at_once``: whether pools work at the same time. ``auto`` then
    gives every worker cores of its own. If pools take turns, each pool divides all cores among its workers. With fewer
    cores than workers the system places them. Raises ValueError for lists that do not fit.
    """
    if not asked:
        each = [Cores()] * sum(wanted)
    elif isinstance(asked, str):
        pools = [sum(wanted)] if at_once else wanted
        each = [cores for count in pools for cores in _divide(count, available)]
    else:
        each = list(asked)
        if len(each) != sum(wanted):
            raise ValueError(f"--cores lists cores for {len(each)} workers, there are {_count(wanted)}")
        if missing := sorted(set().union(*each) - set(available)):
            raise ValueError(
                f"--cores: core {missing[0]} is not there; this process may use {core_list_text(available)}"
            )
    ends = [sum(wanted[: i + 1]) for i in range(len(wanted))]
    return [each[end - count : end] for end, count in zip(ends, wanted, strict=True)]


def core_list_text(cores: Sequence[int]) -> str:
    """Return cores as text, such as ``0-3,8``."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _divide(count: int, available: Sequence[int]) -> list[Cores]:
    total = len(available)
    if total < count:
        return [Cores()] * count
    return [tuple(available[i * total // count : (i + 1) * total // count]) for i in range(count)]


def _count(wanted: Sequence[int]) -> str:
    names = "compute", "memory", "prefill"
    return " + ".join(f"{n} {name}" for name, n in zip(names, wanted, strict=True) if n) + " workers"
