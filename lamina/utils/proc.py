"""Facts from the kernel about other processes of this host (proc(5))."""

from __future__ import annotations

from contextlib import suppress
from glob import glob
from pathlib import Path


def stat_fields(pid: int) -> list[str]:
    """Return the fields of a process's ``stat`` after its name, the state first; none if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    """Return whether a process runs or is stopped; False if it has ended and waits for its parent."""
    return stat_fields(pid)[:1] not in ([], ["Z"])


def cpu_ns_if_stopped(pid: int) -> int | None:
    """Return the nanoseconds that all threads of a stopped process have run so far; None if it is not stopped.

    A signal or a debugger stops a process. One that continues for a moment runs for some microseconds at least. 0 if
    the kernel does not count.
    """
    if stat_fields(pid)[:1] not in (["T"], ["t"]):
        return None
    spent = 0
    for path in glob(f"/proc/{pid}/task/*/schedstat"):
        with suppress(OSError):  # the thread has ended
            spent += int(Path(path).read_text().split()[0])
    return spent


class StopProbe:
    """Notices that a process is stopped, unless it has run since the last look, as one slowed by signals has."""

    def __init__(self) -> None:
        self._spent: int | None = None  # CPU time, if it was stopped at the last look

    def is_stopped(self, pid: int) -> bool:
        """Return whether ``pid``, the same at each look, is stopped now and has not run since the last look."""
        before, self._spent = self._spent, cpu_ns_if_stopped(pid)
        return self._spent is not None and before in (None, self._spent)


def voluntary_switches_of(pid: int) -> int | None:
    """Return how often the first thread of a sleeping process has given up its core so far; None if it does not sleep.
    With equal numbers at two looks it has not run meanwhile.
    """
    try:
        status = Path(f"/proc/{pid}/task/{pid}/status").read_text()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if fields["State"].split()[0] != "S":
        return None
    return sum(int(fields[name]) for name in ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches"))


def start_time_of(pid: int) -> str:
    """Return when a process started, in clock ticks since boot; "" if it is not alive."""
    fields = stat_fields(pid)
    return "" if fields[:1] in ([], ["Z"]) else fields[19]


def descendants_of(pid: int) -> list[int]:
    """Return all descendants of a process, whichever thread started them. While processes end, one look may miss living
    ones (proc(5)), so it looks until no new one appears.
    """
    before, seen = None, seen_now(pid)
    while seen != before:
        before, seen = seen, seen | seen_now(pid)
    return sorted(seen)


def seen_now(pid: int) -> set[int]:
    pids = set[int]()
    for path in glob(f"/proc/{pid}/task/*/children"):
        with suppress(OSError):  # the thread has ended
            children = set(map(int, Path(path).read_text().split()))
            pids |= children.union(*map(seen_now, children))
    return pids
