"""How far off predictions of `lamina-launch plan --calibrate` are: real runs of other shapes, and their predictions.

One engine is recorded at 8 x 512, another runs 8 x 2048, 32 x 512 and a mixed replay, a third has n = 2. All take
turns, so that noise of the machine hits them alike. The recorded run is then fitted, and the others are predicted.
Of the real numbers medians over the turns count. Prints one JSON line; --write appends it to
perf/results/bench_calibrate.jsonl.

    python perf/bench_calibrate.py --write
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from common import cpu_pressure, record
from reference_model import make

from lamina import LLM
from lamina.observe.perfetto import read
from lamina.planner import tables
from lamina.planner.calibrate.drive import RunShape, Tempo, drive
from lamina.planner.calibrate.fit import calibrate
from lamina.planner.calibrate.predict import ANSWER, predict, predict_shape
from lamina.planner.calibrate.recorded import steps_of
from lamina.planner.model_facts import model_facts
from lamina.planner.traces import TracedRequest

SHAPE = {
    "num_hidden_layers": 8, "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 4096,
}  # fmt: skip
CHUNK = 96
OPTIONS: dict[str, Any] = {
    "transport": "shm", "compute_threads": 1, "memory_threads": 1, "memory_workers": 1, "prefill_chunk": CHUNK,
    "max_num_seqs": 32, "max_model_len": 2560, "enable_prefix_caching": False, "kv_memory": "1GiB",
}  # fmt: skip
RECORDED = RunShape(8, 512)
SHAPES = (RunShape(8, 2048), RunShape(32, 512), RunShape(8, 512, 2))
MIXED = "mixed"


def mixed(seed: int, count: int = 40) -> list[TracedRequest]:
    """Requests of many lengths that come by chance, 4 a second on average."""
    rng, at, found = random.Random(seed), 0.0, []
    for _ in range(count):
        at += rng.expovariate(4.0)
        found.append(TracedRequest(at, rng.randint(32, 512), rng.randint(16, 96)))
    return found


def run_shape(llm: LLM, shape: RunShape) -> Tempo:
    rounds = shape.sequences * -(-shape.prompt // CHUNK)
    return drive(llm.engine, time.monotonic, shape.requests(rounds + ANSWER), time.sleep, together=True)


def record_run(llm: LLM) -> None:
    """Answers of several lengths: so steps of 8 down to 1 rows are recorded, too."""
    rounds = RECORDED.sequences * -(-RECORDED.prompt // CHUNK)
    asks = [TracedRequest(0.0, RECORDED.prompt, rounds + 64 + 8 * i) for i in range(RECORDED.sequences)]
    drive(llm.engine, time.monotonic, asks, time.sleep, together=True)


def measure(path: Path, trace: Path, turns: int) -> dict[str, Any]:
    """Real and predicted, by run; the error in parts of the real number."""
    real, asks = defaultdict[str, list[Tempo]](list), mixed(1)
    with (
        LLM(str(path), trace=str(trace), **OPTIONS) as recorded,
        LLM(str(path), **OPTIONS) as one,
        LLM(str(path), pipeline=2, **OPTIONS) as two,
    ):
        for _ in range(turns):
            record_run(recorded)
            real[RECORDED.label].append(run_shape(one, RECORDED))
            for shape in SHAPES:
                real[shape.label].append(run_shape(two if shape.batches == 2 else one, shape))
            real[MIXED].append(drive(one.engine, time.monotonic, asks, time.sleep, together=False))
    run = steps_of(read(str(trace)), str(trace))
    found = calibrate(run, model_facts(str(path)), tables.constants(), "8 x 512")
    predicted = {shape.label: predict_shape(found, shape, ANSWER) for shape in (RECORDED, *SHAPES)}
    predicted[MIXED] = predict(found, asks, most=OPTIONS["max_num_seqs"])
    return {"steps": len(run.steps), "runs": {name: compare(real[name], predicted[name]) for name in real}}


def compare(real: list[Tempo], predicted: Tempo) -> dict[str, Any]:
    middle = {name: median(getattr(tempo, name) for tempo in real) for name in Tempo._fields}
    each = predicted._asdict()
    error = {name: round(each[name] / middle[name] - 1, 4) for name in middle}
    return {"real": middle, "turns": [tempo._asdict() for tempo in real], "predicted": each, "error": error}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="append to perf/results")
    args = parser.parse_args()
    before = cpu_pressure()
    with tempfile.TemporaryDirectory() as folder:
        path = make(Path(folder) / "model", "bfloat16", SHAPE)
        found = measure(path, Path(folder) / "run.json", args.turns)
    settings = {**OPTIONS, "shape": SHAPE, "turns": args.turns}
    found["cpu_pressure"] = [before, cpu_pressure()]
    print(record("bench_calibrate", settings, found, write=args.write))


if __name__ == "__main__":
    main()
