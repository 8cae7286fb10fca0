"""Emulation of devices that are not present: their computing times, and a worker that is as slow as they are.

Results are computed as usual, on whatever is present. Only the time is the other device's, as long as that is the
slower one. So the two pools can be measured, with all their messages and processes, on any machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import msgspec

VARIABLE = "LAMINA_EMULATE"


class DeviceTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The seconds that a compute device and a memory device take. A call is one slice, or one piece of a layer's
    attention on one memory worker.
    """

    slice_s: tuple[float, ...] = (0.0,)  # of a call, by slice; one value holds for all
    slice_row_s: float = 0.0  # for each row of a call
    prefill_s: float = 0.0  # of a slice's call on a prefill worker
    prefill_row_s: float = 0.0  # for each row of such a call
    attention_s: float = 0.0  # of a call
    attention_byte_s: float = 0.0  # for each byte of stored K and V that it reads
    early_q: bool = True  # False: Q waits for K and V, as in the captured program

    def __post_init__(self) -> None:
        each = (self.slice_row_s, self.prefill_s, self.prefill_row_s, self.attention_s, self.attention_byte_s)
        times = [*self.slice_s, *each]
        if not self.slice_s or not all(0.0 <= t < float("inf") for t in times):
            raise ValueError("times must be numbers of at least 0, and slice_s must have one")

    @staticmethod
    def from_environment(environ: Mapping[str, str] = os.environ) -> DeviceTimes | None:
        """Return the times in LAMINA_EMULATE, JSON with the fields' names; None if it is not set. Raises ValueError."""
        text = environ.get(VARIABLE, "")
        if not text:
            return None
        try:
            return msgspec.json.decode(text, type=DeviceTimes)
        except msgspec.MsgspecError as e:
            raise ValueError(f"{VARIABLE}: {e}") from None


def sends_early_q() -> bool:
    """Return False if LAMINA_EMULATE asks for the captured program's order. Raises ValueError."""
    times = DeviceTimes.from_environment()
    return times is None or times.early_q


class EmulatedDevice:
    """Executes one task after the other, each in its time. One thread uses it."""

    def __init__(self) -> None:
        self._free = 0.0

    def begin(self, seconds: float) -> None:
        """Queue a task of ``seconds``."""
        self._free = max(self._free, time.perf_counter()) + seconds

    def finish(self, but_s: float = 0.0) -> None:
        """Sleep until all tasks are done, or all but the last ``but_s`` seconds of them."""
        left = self._free - but_s - time.perf_counter()
        if left > 0.0:
            time.sleep(left)
