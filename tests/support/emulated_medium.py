"""Host memory with a script of delays and faults: for tests of the users of a medium, and as a slower medium.

``environment`` has it take the place of ``host``. The script is JSON in the variable LAMINA_EMULATE_MEDIUM, a list of
events, each with the calls that it befalls:

    [{"call": "read", "after": 2, "times": 1, "fault": "lost"}, {"call": "write", "delay_s": 0.01}]

The first line makes the third read raise FragmentLostError, the second one makes all writes take longer. ``byte_s``:
seconds for each byte that is read or written. Faults: ``lost``
FragmentLostError, ``full`` StorageFullError, ``broken`` StorageError, and ``flip``, which a medium must never do: a
read returns a wrong bit as if it were right.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from lamina.kv.pages import Page, PageFragment
from lamina.kv.storage import (
    PLUGINS,
    Bytes,
    FragmentLostError,
    StorageConfig,
    StorageError,
    StorageFullError,
    StoredPage,
)
from lamina.kv.storage.host import HostStorage

EMULATE_VARIABLE = "LAMINA_EMULATE_MEDIUM"
_QUEUED_S = 0.05  # a call so soon after the previous one counts as queued: a thread that wakes late slows no medium
_ERRORS = {"lost": FragmentLostError, "full": StorageFullError, "broken": StorageError}


def environment(*script: Mapping[str, Any]) -> dict[str, str]:
    """Environment variables by which processes have this medium, with ``script``, in place of ``host``."""
    paths = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), str(Path(__file__).parent)]
    return {
        PLUGINS: f"host={__name__}",
        EMULATE_VARIABLE: json.dumps(script),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
    }


class InjectedFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An event that befalls calls ``after`` .. ``after + times`` of one kind, by their numbers in this worker."""

    call: Literal["reserve", "write", "read", "drop", "pages"]
    after: int = 0
    times: int | None = None  # None = to all from there on
    delay_s: float = 0.0
    byte_s: float = 0.0
    fault: Literal["", "lost", "full", "broken", "flip"] = ""

    def applies_to(self, call: str, number: int) -> bool:
        """True if the event befalls call ``number`` of a kind."""
        return call == self.call and 0 <= number - self.after < (number + 1 if self.times is None else self.times)


class EmulatedStorage:
    """A medium in host memory that does what the script says."""

    def __init__(self, place: StorageConfig, script: list[InjectedFault]) -> None:
        self._inner = HostStorage(place)
        self._script = script
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()
        self._free = 0.0  # when what is being moved has been

    def reserve(self, nbytes: int) -> list[bytes]:
        """Make room in host memory, if the script lets it; keys of pages that were given up."""
        self._happen("reserve")
        return self._inner.reserve(nbytes)

    def write(self, page: Page, fragments: Mapping[PageFragment, Bytes]) -> None:
        """Write to host memory, late or not at all where the script says so."""
        self._happen("write", sum(memoryview(data).nbytes for data in fragments.values()))
        self._inner.write(page, fragments)

    def read(self, key: bytes, into: Mapping[PageFragment, bytearray | memoryview]) -> None:
        """Read from host memory; the script may delay it, let it fail or flip one bit."""
        flip = self._happen("read", sum(memoryview(buffer).nbytes for buffer in into.values()))
        self._inner.read(key, into)
        if flip and into:
            memoryview(next(iter(into.values()))).cast("B")[0] ^= 1

    def read_page(
        self, key: bytes, fragments: frozenset[PageFragment] | None = None
    ) -> tuple[Page, dict[PageFragment, bytes]]:
        """A page and its bytes: of ``fragments``, or all. It is no use of the page. Raises FragmentLostError."""
        self._happen("read")
        return self._inner.read_page(key, fragments)

    def lookup(self, key: bytes) -> StoredPage | None:
        """A page with its fragments that are here; None where there are none."""
        self._happen("pages")
        return self._inner.lookup(key)

    def hint(self, turn: int, keys: Sequence[bytes]) -> None:
        """Waiting turn ``turn`` needs these pages too; without any, it needs none any more."""
        self._inner.hint(turn, keys)

    def mark_copied(self, key: bytes, *, yes: bool) -> None:
        """Note that another place has all that is here of a page, which is evicted first then."""
        self._inner.mark_copied(key, yes=yes)

    def set_retention(self, keys: Iterable[bytes], seconds: float) -> None:
        """Keep these pages longer than others for so many seconds."""
        self._inner.set_retention(keys, seconds)

    def set_last_use(self, keys: Iterable[bytes], seconds_ago: float) -> None:
        """Note that these pages were last used so many seconds ago."""
        self._inner.set_last_use(keys, seconds_ago)

    def expire(self) -> list[bytes]:
        """Delete pages that were not used for long; their keys."""
        return self._inner.expire()

    def prefetch_next(self, fragments: frozenset[PageFragment]) -> list[bytes] | None:
        """Bring a page nearer, as the medium within does; None: there is none."""
        return self._inner.prefetch_next(fragments)

    def delete(self, keys: Iterable[bytes]) -> None:
        """Give up pages of host memory."""
        self._happen("drop")
        self._inner.delete(keys)

    def set_num_workers(self, workers: int) -> list[bytes]:
        """Have the part of one of so many."""
        return self._inner.set_num_workers(workers)

    def pages(self) -> list[StoredPage]:
        """Pages in host memory; the most recently used last."""
        self._happen("pages")
        return self._inner.pages()

    def keys(self, fragments: frozenset[PageFragment], most: int) -> list[bytes]:
        """Keys of the last used pages that have all of ``fragments``; the most recently used last."""
        self._happen("pages")
        return self._inner.keys(fragments, most)

    def close(self) -> None:
        """Give up the host memory."""
        self._inner.close()

    def _happen(self, call: str, nbytes: int = 0) -> bool:
        """Delay and raise as the script says; returns whether a bit is to be flipped."""
        with self._lock:
            number = self._calls[call]
            self._calls[call] += 1
        met = [each for each in self._script if each.applies_to(call, number)]
        if delay_s := sum(each.delay_s for each in met):
            time.sleep(delay_s)
        if moves_s := nbytes * sum(each.byte_s for each in met):
            self._move(moves_s)
        faults = [each.fault for each in met if each.fault]
        if faults and faults[0] in _ERRORS:
            raise _ERRORS[faults[0]](f"{EMULATE_VARIABLE}: {call} {number} is {faults[0]}")
        return bool(faults)

    def _move(self, seconds: float) -> None:
        """One after the other, each in its time."""
        with self._lock:
            now = time.perf_counter()
            self._free = (self._free if now < self._free + _QUEUED_S else now) + seconds
            left = self._free - now
        time.sleep(max(0.0, left))


def open_storage(place: StorageConfig) -> EmulatedStorage:
    """An empty one. Raises ValueError, also for a script that cannot be read."""
    try:
        script = msgspec.json.decode(os.environ.get(EMULATE_VARIABLE) or "[]", type=list[InjectedFault])
    except msgspec.MsgspecError as e:
        raise ValueError(f"{EMULATE_VARIABLE}: {e}") from None
    return EmulatedStorage(place, script)
