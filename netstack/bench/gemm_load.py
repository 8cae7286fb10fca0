"""Matrix products that run during a measurement, as those of slices do on the cores of a compute worker.

A process of its own multiplies until its standard input ends, and replies to each line there with the number of
products so far.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Sequence
from threading import Event
from time import monotonic, perf_counter
from types import TracebackType
from typing import Any

from lamina.netstack.contract.fabric import ChannelError
from lamina.netstack.own_python import own_python

SIZE = 512  # of square matrices of fp32: a product takes milliseconds and exceeds the nearest cache
FLOPS = 2 * SIZE**3
START_S = 60.0  # for loading the library of products
ANSWER_S = 10.0
ALONE_S = 0.5
THREADS = "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"


class BackgroundGemm:
    """Runs products on ``cores`` during the block. Raises ChannelError if the process does not reply in time."""

    def __init__(self, cores: Sequence[int]) -> None:
        self.cores = sorted(cores)
        self._before: tuple[int, float] = 0, 0.0
        self._alone = 0.0

    def __enter__(self) -> BackgroundGemm:
        threads = dict.fromkeys(THREADS, str(len(self.cores)))
        code = f"from {__name__} import multiply; multiply()"
        command, environment = own_python("-c", code, environ=os.environ | threads)
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            os.sched_setaffinity(self.process.pid, self.cores)  # before it has threads, which inherit this
            self._heard(START_S)
            self._before = self._count(), perf_counter()
            Event().wait(ALONE_S)
            self._alone = self._rate()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def facts(self) -> dict[str, Any]:
        """Return the facts for a row: the rate since the last row, and the rate before the first one."""
        rates = {"gflop/s": round(self._rate(), 2), "gflop/s alone": round(self._alone, 2)}
        return {"gemm": SIZE, "cores": self.cores} | rates

    def close(self) -> None:
        """End the process. Idempotent."""
        self.process.kill()
        self.process.wait()
        for end in (self.process.stdin, self.process.stdout):
            if end:
                end.close()

    def _rate(self) -> float:
        """Return the flop/s * 1e-9 since the last call."""
        (before, start), self._before = self._before, (self._count(), perf_counter())
        products, now = self._before
        return FLOPS * (products - before) / (now - start) / 1e9

    def _count(self) -> int:
        stdin = self.process.stdin
        assert stdin is not None
        try:
            stdin.write(b"\n")
            stdin.flush()
        except OSError as error:
            raise ChannelError(f"the products during the measurement have ended: {error}") from error
        return int(self._heard(ANSWER_S))

    def _heard(self, timeout_s: float) -> bytes:
        stdout, deadline = self.process.stdout, monotonic() + timeout_s
        assert stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([stdout], [], [], max(0.0, deadline - monotonic()))
            more = os.read(stdout.fileno(), 64) if ready else b""
            if not more:
                raise ChannelError("the products during the measurement do not reply; their message is above")
            line += more
        return line


def multiply() -> None:
    """Multiply until standard input ends."""
    import numpy as np

    left, right = (np.random.default_rng(n).random((SIZE, SIZE), np.float32) for n in range(2))
    product, count = np.empty_like(left), 0
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        np.matmul(left, right, out=product)
        count += 1
        if select.select([sys.stdin], [], [], 0.0)[0]:
            if not os.read(sys.stdin.fileno(), 1):
                return
            sys.stdout.write(f"{count}\n")
            sys.stdout.flush()
