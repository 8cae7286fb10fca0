"""A GPU for tests of layer messages that kernels move: a StandIn with a stream of the stand-in of the CUDA driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from cuda_stand_in import STAND_IN, scheme_of
from stand_in_device import CPU, RecordingCapture, StandIn

from lamina.netstack.cuda.driver import CudaStream, Driver
from lamina.workers import staging
from lamina.workers.staging import Queue


class StandInGpu(StandIn):
    """Kernels on its stream have run when a launch returns, as all that it computes; or they are recorded."""

    def __init__(self, driver: Driver, device: torch.device = CPU, graphs: bool = False) -> None:
        super().__init__(device, graphs)
        self._stream = CudaStream(driver)
        self._recorder: RecordingCapture | None = None
        self.launches = 0  # not in graphs

    def current_queue(self) -> Queue:
        return Queue(0, self._stream.number)

    def graph_capture(self) -> RecordingCapture | None:
        self._recorder = super().graph_capture()
        return self._recorder

    def launch(self, start: Callable[[], None]) -> None:
        def run() -> None:
            start()
            self._stream.synchronize()

        if self._recorder is not None and self._recorder.recording:
            self._recorder.add(run)
        else:
            self.launches += 1
            run()


@contextmanager
def stand_in_gpus(*, graphs: bool = False) -> Iterator[Callable[[], StandInGpu]]:
    """Has all work of the CPU done on a GPU that is not there; makes another one."""
    with pytest.MonkeyPatch.context() as patch, scheme_of(STAND_IN):
        made, driver, launch = dict[int, StandInGpu](), Driver(), Driver.launch

        def make(device: torch.device = CPU) -> StandInGpu:
            gpu = StandInGpu(driver, device, graphs)
            made[gpu.current_queue().stream] = gpu
            return gpu

        def launched(of: Driver, stream: int, kernel: str, *arguments: int, blocks: int = 1) -> None:
            def start() -> None:
                launch(of, stream, kernel, *arguments, blocks=blocks)

            made[stream].launch(start) if stream in made else start()

        patch.setattr(Driver, "launch", launched)
        patch.setitem(staging.KINDS, "cpu", make)
        yield make
