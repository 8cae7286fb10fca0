"""What Lamina's driver takes of a round: Engine and Scheduler alone, over a wire that answers at once.

The planner's constants driver_round and driver_row are a line through these numbers. JSON lines.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence

from common import host

from lamina.config import make_config
from lamina.engine.engine import Engine
from lamina.engine.wire import ViewChanged
from lamina.protocol.control import ComputeReady, Drawn, RunRound, StepDone
from lamina.protocol.partition import Lanes
from lamina.protocol.plan import Keep
from lamina.request import SamplingParams

PROMPT, ROUNDS, WARM = 64, 60, 10


class FreeWire:
    """See engine.wire.Wire: every step is done when it is submitted."""

    def __init__(self, rows: int) -> None:
        blocks = (rows + 2) * (PROMPT + ROUNDS + WARM + 64) // 16
        self._done: deque[StepDone] = deque()
        self.ready = ComputeReady(
            view=1, vocab_size=8, num_layers=80, max_model_len=4096, dtype="bfloat16", eos_token_ids=[], windows=[0],
            lanes=[Lanes()], stripe=0, num_blocks=[[blocks]], holders=[[0]], block_size=16, summary={},
        )  # fmt: skip

    def submit(self, new: RunRound) -> None:
        for step in new.steps:
            drawn = [Drawn(d.sequence, 1, []) for d in step.draws]
            self._done.append(StepDone(view=1, batch=step.plan.batch, step=step.plan.step, drawn=drawn))

    def prefill(self, worker: int, new: RunRound) -> None:
        raise AssertionError("there are no prefill workers")

    def wait(self) -> StepDone | ViewChanged:
        return self._done.popleft()

    def look(self) -> ViewChanged | None:
        return None

    def resume(self, keep: Sequence[Keep]) -> ComputeReady | ViewChanged:
        raise AssertionError("nothing is ever lost here")

    def stats(self) -> dict[str, dict[str, float]]:
        return {}

    def close(self) -> None:
        return None


def seconds_of_a_round(rows: int) -> float:
    """Median over rounds in which every sequence takes one token."""
    options = {"transport": "shm", "block_size": 16, "max_num_seqs": rows, "prefill_chunk": rows * PROMPT}
    engine = Engine(FreeWire(rows), make_config(options))
    for _ in range(rows):
        engine.add([0] * PROMPT, SamplingParams(max_tokens=ROUNDS + WARM, ignore_eos=True, temperature=0))
    took = []
    while engine.has_work:
        start = time.perf_counter()
        engine.step()
        took.append(time.perf_counter() - start)
    return statistics.median(took[WARM:-WARM])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 128, 256, 512, 900])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    for rows in args.rows:
        took = [seconds_of_a_round(rows) for _ in range(args.repeats)]
        found = {"what": "driver of a round", "rows": rows, "seconds": min(took), "all": took, "host": host()}
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
