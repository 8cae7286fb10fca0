"""The error of predictions of `lamina-launch plan --calibrate`: real runs of other shapes, and their predictions.

One engine is recorded at 8 x 512, others decode 8 x 2048, 32 x 512 and 8 x 512 with n = 2. All take turns of some steps
each, so that noise of the machine hits them alike. A mixed replay comes last; all of this several times. The recorded
run is then fitted, and the others are predicted, after prompts and for answers of the same lengths. The same comes
again on emulated devices, whose times follow laws that the fit has: the control. Prints a JSON line of each, and what
is within its limit; --write appends the lines to perf/results/bench_calibrate.jsonl. It needs a machine without other
work.

    python perf/bench_calibrate.py --write
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from common import cpu_pressure, parser_of, record
from reference_model import make

from lamina import LLM, SamplingParams
from lamina.observe.perfetto import read
from lamina.tools.plan import tables
from lamina.tools.plan.calibrate.fit import calibrate
from lamina.tools.plan.calibrate.load_driver import RunShape, RunSpeed, run_requests
from lamina.tools.plan.calibrate.prediction import predict, predict_shape
from lamina.tools.plan.calibrate.recorded_run import steps_of
from lamina.tools.plan.model_facts import model_facts
from lamina.tools.request_traces import TracedRequest
from lamina.utils.emulated_device import VARIABLE, DeviceTimes

SHAPE = {
    "num_hidden_layers": 8, "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 4096,
}  # fmt: skip
CHUNK, TURN_STEPS, PARTS, TAIL_STEPS = 96, 8, 4, 12
OPTIONS: dict[str, Any] = {
    "transport": "shm", "compute_threads": 1, "memory_threads": 1, "memory_workers": 1, "prefill_chunk": CHUNK,
    "max_num_seqs": 32, "max_model_len": 2560, "enable_prefix_caching": False, "kv_memory": "1GiB",
}  # fmt: skip
EMULATED = DeviceTimes(slice_s=(2e-3,), slice_row_s=2e-5, attention_s=2e-4, attention_byte_s=5e-10)
LIMITS = {"tokens_s": 0.15, "tbt_p50_s": 0.15, "tbt_p99_s": 0.25}  # of the errors
CONTROL = 0.07  # of all errors on emulated devices
RECORDED = RunShape(8, 512)
SHAPES = (RunShape(8, 2048), RunShape(32, 512), RunShape(8, 512, 2))
MIXED = "mixed"


def mixed(seed: int, count: int = 40) -> list[TracedRequest]:
    """Requests of many lengths that come by chance, 4 a second on average."""
    rng, at, requests = random.Random(seed), 0.0, []
    for _ in range(count):
        at += rng.expovariate(4.0)
        requests.append(TracedRequest(at, rng.randint(32, 512), rng.randint(16, 96)))
    return requests


class PausedRun:
    """A shape that decodes in turns of a few steps, on one engine."""

    def __init__(self, llm: LLM, shape: RunShape) -> None:
        self._engine, self._shape = llm.engine, shape
        self._gaps, self._tokens, self._seconds = list[float](), 0, 0.0
        self._asked: list[int] = []

    def begin(self, turns: int) -> None:
        """Bring all sequences to where they decode; so many turns can follow."""
        rounds = self._shape.sequences * -(-self._shape.prompt // CHUNK)
        params = SamplingParams(max_tokens=rounds + 2 * steps_of_turns(turns), ignore_eos=True, temperature=0)
        begun = set[int]()
        self._asked = [self._engine.add([1] * self._shape.prompt, params) for _ in range(self._shape.sequences)]
        while len(begun) < self._shape.sequences:
            begun |= {output.request_id for output in self._engine.step()}

    def turn(self) -> None:
        """A round is always in flight. The first of a turn is therefore not counted, and the last has its time before
        the turn is over, which it would take from others.
        """
        times = defaultdict[int, list[float]](list)
        for _ in range(steps_of_turns(1) * self._shape.batches):
            for output in self._engine.step():
                times[output.request_id].append(time.monotonic())
        for each in times.values():
            self._gaps += [b - a for a, b in pairwise(each[1:])]
            self._tokens += len(each) - 2
        self._seconds += max(t[-1] for t in times.values()) - min(t[1] for t in times.values())
        time.sleep(max(self._gaps[-len(times) :]))

    def end(self) -> None:
        """Nothing runs on the engine any more."""
        for request in self._asked:
            self._engine.cancel(request)
        self._engine.release_idle_blocks()

    @property
    def tempo(self) -> RunSpeed:
        """Returns the step times of all turns."""
        gaps = sorted(self._gaps)
        return RunSpeed(self._tokens / self._seconds, gaps[len(gaps) // 2], gaps[len(gaps) * 99 // 100])


def steps_of_turns(turns: int) -> int:
    """Tokens of a sequence in so many turns."""
    return turns * (TURN_STEPS + 2)


def record_tail(llm: LLM) -> None:
    """Answers of several lengths: so steps of 8 down to 1 rows are recorded, too. Each has so many that the first ones
    after an end, which take longer, are not the median.
    """
    rounds = RECORDED.sequences * -(-RECORDED.prompt // CHUNK)
    asks = [TracedRequest(0.0, RECORDED.prompt, rounds + TAIL_STEPS * (1 + i)) for i in range(RECORDED.sequences)]
    run_requests(llm.engine, time.monotonic, asks, time.sleep, together=True)


def run_all(path: Path, trace: Path, turns: int, more: dict[str, Any]) -> dict[str, list[RunSpeed]]:
    """The real runs, by name; ``trace``: where the recorded one goes. All of them in each of several parts of the
    session, so that whatever the host does meanwhile is in all. ``more``: options of all engines.
    """
    asks, replays = mixed(1), list[RunSpeed]()
    with ExitStack() as stack:
        recorded = stack.enter_context(LLM(str(path), trace=str(trace), **OPTIONS, **more))
        others = {s: stack.enter_context(LLM(str(path), pipeline=s.batches, **OPTIONS, **more)) for s in SHAPES}
        runs = {s: PausedRun(llm, s) for s, llm in ({RECORDED: recorded} | others).items()}
        for _ in range(PARTS):
            record_tail(recorded)
            for each in runs.values():
                each.begin(turns)
            for _ in range(turns):
                for each in runs.values():
                    each.turn()
            for each in runs.values():
                each.end()
            replays.append(run_requests(others[SHAPES[0]].engine, time.monotonic, asks, time.sleep, together=False))
    return {shape.label: [each.tempo] for shape, each in runs.items()} | {MIXED: replays}


def measure(path: Path, folder: Path, turns: int, more: dict[str, Any]) -> dict[str, Any]:
    """Real and predicted, by run; the error in parts of the real number. What ran is kept in ``folder``, and not made
    again where it lies there.
    """
    kind = "emulated" if more else "real"
    trace, kept = folder / f"{kind}-run.json", folder / f"{kind}-tempos.json"
    if not kept.exists():
        kept.write_bytes(msgspec.json.encode(run_all(path, trace, turns, more)))
    real = msgspec.json.decode(kept.read_bytes(), type=dict[str, list[RunSpeed]])
    run = steps_of(read(str(trace)), str(trace))
    fitted = calibrate(run, model_facts(str(path)), tables.constants(), RECORDED.label)
    shapes = (RECORDED, *SHAPES)
    predicted = {shape.label: predict_shape(fitted, shape, steps_of_turns(turns)) for shape in shapes}
    predicted[MIXED] = predict(fitted, mixed(1), most=OPTIONS["max_num_seqs"])
    return {"steps": len(run.steps), "runs": {name: compare(real[name], predicted[name]) for name in real}}


def compare(real: list[RunSpeed], predicted: RunSpeed) -> dict[str, Any]:
    middle = {name: median(getattr(tempo, name) for tempo in real) for name in RunSpeed._fields}
    each = predicted._asdict()
    error = {name: round(each[name] / middle[name] - 1, 4) for name in middle}
    return {"real": middle, "turns": [tempo._asdict() for tempo in real], "predicted": each, "error": error}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--turns", type=int, default=10, help="of each run, in each of four parts of the session")
    parser.add_argument("--keep", type=Path, help="folder in which runs are kept; those that it has are not made again")
    parser.add_argument("--control", action="store_true", help="emulated devices alone")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as own:
        folder, path = args.keep or Path(own), make(Path(own) / "model", "bfloat16", SHAPE)
        folder.mkdir(parents=True, exist_ok=True)
        for emulated in (False, True) if not args.control else (True,):
            more, before = {"attention": "emulate"} if emulated else {}, cpu_pressure()
            if emulated:
                os.environ[VARIABLE] = msgspec.json.encode(EMULATED).decode()
            figures = measure(path, folder, args.turns, more)
            figures["cpu_pressure"] = [before, cpu_pressure()]
            settings = {**OPTIONS, **more, "shape": SHAPE, "turns": args.turns, "emulated": emulated}
            print(record("bench_calibrate", settings, figures, write=args.write))
            print(verdict(figures, emulated=emulated), flush=True)


def verdict(figures: dict[str, Any], *, emulated: bool) -> str:
    """In words, a line for each run but the recorded one, which is the noise of the host."""
    lines = [f"{'emulated devices, the control' if emulated else 'real'}; CPU pressure {figures['cpu_pressure']}"]
    for name, run in figures["runs"].items():
        each = {m: (run["error"][m], CONTROL if emulated else limit) for m, limit in LIMITS.items()}
        words = (
            f"{m} {e:+.1%} ({'holds' if abs(e) <= most else f'above {most:.0%}'})" for m, (e, most) in each.items()
        )
        lines.append(f"  {name}: {', '.join(words)}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
