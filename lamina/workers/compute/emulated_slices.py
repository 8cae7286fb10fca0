"""Slices that are as slow as an emulated compute device (``lamina.utils.emulated_device``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lamina.utils.emulated_device import DeviceTimes, EmulatedDevice
from lamina.workers.cuda_graphs import GraphedProgram

from .compute_worker import BufferedSends, Program


class EmulatedProgram:
    """A program whose slices each take the emulated time, and then send."""

    def __init__(self, program: Program, call_s: Sequence[float], row_s: float) -> None:
        """``call_s``: seconds of a call, one value for each slice or one for all. ``row_s``: seconds more for each row.
        Raises ValueError for another number of values.
        """
        count, given = len(program.slices), len(call_s)
        if given not in (1, count):
            raise ValueError(f"LAMINA_EMULATE: slice_s has {given} times for {count} slices: give one, or one for each")
        device, each = EmulatedDevice(), [*call_s] * (count // given)
        self.slices: Sequence[Any] = [
            EmulatedSlice(inner, seconds, row_s, device) for inner, seconds in zip(program.slices, each, strict=True)
        ]
        self._inner = program

    def clear_graphs(self) -> None:
        """Discard recorded graphs, if the real program records them."""
        if isinstance(self._inner, GraphedProgram):
            self._inner.clear_graphs()


class EmulatedSlice:
    """A slice with the arguments and results of ``inner``. Its messages are sent when the emulated device is done."""

    def __init__(self, inner: Any, call_s: float, row_s: float, device: EmulatedDevice) -> None:
        self._inner = inner
        self._call_s, self._row_s = call_s, row_s
        self._device = device

    def __call__(self, *args: Any) -> tuple[Tensor, ...]:
        rows = args[0].shape[0]
        self._device.begin(self._call_s + rows * self._row_s)
        *inputs, last = args
        if isinstance(last, Tensor):  # nothing to send
            out: tuple[Tensor, ...] = self._inner(*args)
            self._device.finish()
            return out
        held = BufferedSends()
        out = self._inner(*inputs, held)
        self._device.finish()
        held.forward(last, rows)
        return out


def with_emulated_times(program: Program, *, prefill: bool = False) -> Program:
    """Return the program on the device that the environment describes, or the program itself if there is none."""
    times = DeviceTimes.from_environment()
    if times is None:
        return program
    if prefill:
        return EmulatedProgram(program, [times.prefill_s], times.prefill_row_s)
    return EmulatedProgram(program, times.slice_s, times.slice_row_s)
