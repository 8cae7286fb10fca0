"""Slices that are as slow as an emulated compute device (``lamina.utils.emulated_device``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from lamina.converter import SlicedProgram
from lamina.converter.explain import send_shares
from lamina.utils.emulated_device import DeviceTimes, EmulatedDevice
from lamina.workers.cuda_graphs import GraphedProgram

from .compute_worker import BufferedSends, Program


class EmulatedProgram:
    """A program whose slices each take the emulated time, and send each message at its part of that time."""

    def __init__(
        self, program: Program, call_s: Sequence[float], row_s: float, shares: Sequence[Sequence[float]]
    ) -> None:
        """``call_s``: seconds of a call, one value for each slice or one for all. ``row_s``: seconds more for each row.
        ``shares``: for each slice and message, the part of the slice's time after which the message is sent.
        Raises ValueError for another number of times.
        """
        count, given = len(program.slices), len(call_s)
        if given not in (1, count):
            raise ValueError(f"LAMINA_EMULATE: slice_s has {given} times for {count} slices: give one, or one for each")
        device, each = EmulatedDevice(), [*call_s] * (count // given)
        self.slices: Sequence[Any] = [
            EmulatedSlice(inner, seconds, row_s, device, sent)
            for inner, seconds, sent in zip(program.slices, each, shares, strict=True)
        ]
        self._inner = program

    def begin_epoch(self) -> None:
        """Discard graphs of channels that are gone, if the real program records them."""
        if isinstance(self._inner, GraphedProgram):
            self._inner.begin_epoch()


class EmulatedSlice:
    """A slice with the arguments and results of ``inner``. Each message is sent when the emulated device has done its
    share of the slice.
    """

    def __init__(
        self, inner: Any, call_s: float, row_s: float, device: EmulatedDevice, shares: Sequence[float]
    ) -> None:
        self._inner = inner
        self._call_s, self._row_s = call_s, row_s
        self._device, self._shares = device, shares

    def __call__(self, *args: Any) -> tuple[Tensor, ...]:
        rows = args[0].shape[0]
        seconds = self._call_s + rows * self._row_s
        self._device.begin(seconds)
        *inputs, last = args
        if isinstance(last, Tensor):  # nothing to send
            out: tuple[Tensor, ...] = self._inner(*args)
            self._device.finish()
            return out
        held = BufferedSends()
        out = self._inner(*inputs, held)
        for share, (kind, message) in zip(self._shares, held.messages(rows), strict=True):
            self._device.finish(but_s=seconds * (1.0 - share))
            getattr(last, kind)(*message)
        self._device.finish()
        return out


def emulation_of(cut: SlicedProgram, *, prefill: bool = False) -> Callable[[Program], Program] | None:
    """Return what puts a program on the device that the environment describes; None if it describes none. ``cut``: the
    program before any pass, which shows when each message can leave. Raises ValueError for times that do not fit.
    """
    times = DeviceTimes.from_environment()
    if times is None:
        return None
    shares = [() if piece is None else send_shares(piece) for piece in cut.slices]
    if prefill:
        return partial(EmulatedProgram, call_s=[times.prefill_s], row_s=times.prefill_row_s, shares=shares)
    return partial(EmulatedProgram, call_s=times.slice_s, row_s=times.slice_row_s, shares=shares)
