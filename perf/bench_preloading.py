"""Seconds of a turn's prefill whose history is loaded from a slow medium, layer by layer and not: CachedAttention's
figures 18 and 19 (arXiv 2403.19708). Compute worker and medium are emulated, in the ratio of the paper's run. 100 new
tokens are computed in --compute-s, and a history of 1,024 is loaded in .61 / .39 of that. All else is real.

no preloading  the first row waits for the whole load
no buffer      it waits for the first layer alone
gate           it waits for S_buf, by what the engine has measured

Figure 19: 1,024 / 100. Figure 18: from 500 / 500 to 900 / 100, compared with an engine that computes all; whole pages
of 128 are loaded. Competitors take turns. Prints one JSON line; --write appends it to
perf/results/bench_preloading.jsonl.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import BrokenError, cpu_pressure, parser_of, record
from reference_model import make

from lamina import LLM, RequestOutput, SamplingParams
from lamina.scheduler.kv_manager.swap import SwapPolicy

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from emulated_medium import environment

LAYERS, HEADS, DIM = 16, 2, 32
SHAPE = {
    "hidden_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": HEADS,
    "intermediate_size": 256, "vocab_size": 512,
}  # fmt: skip
TOKEN_BYTES = LAYERS * HEADS * DIM * 2 * 4  # K and V in float32
T_LOAD, T_COMPUTE = 0.61, 0.39  # of the prefill time without pre-loading
HISTORY, NEW = 1024, 100
SPLITS = (500, 500), (600, 400), (700, 300), (800, 200), (900, 100)
PAPER = {"no buffer": -0.35, "gate": -0.61}
MODELLED = {"no buffer": -0.37, "gate": -0.61}
WITHIN = 0.05
FOR_EVER = 1e6
LEAST_GAIN = 5  # at 900 / 100
WAYS: dict[str, float | None] = {
    "no preloading": 0.0,
    "no buffer": FOR_EVER,
    "gate": None,
}  # what rows take; None: as measured
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


class TurnTimes:
    """An engine with a slow medium, and histories that it has saved there."""

    def __init__(self, path: Path, **options: Any) -> None:
        self._llm = LLM(str(path), dtype="float32", memory_workers=1, max_model_len=2048, prefill_chunk=1024, **options)
        swaps = self._llm.engine.scheduler.features.get(SwapPolicy)
        self._measured = swaps.prefill_estimate_s if swaps else None

    def ask(self, prompt: list[int], rows_s: float | None = None, *, kept: bool = False) -> RequestOutput:
        """Asks, and leaves the pool empty. ``rows_s``: the time that first rows take, as the engine is to assume; None:
        unknown. ``cacheable``: the medium has its pages from then on.
        """
        engine = self._llm.engine
        if engine.scheduler.features.get(SwapPolicy):
            told = self._measured if rows_s is None else lambda tokens: rows_s
            vars(engine.scheduler.features.get(SwapPolicy))["prefill_estimate_s"] = told
        engine.add(prompt, PARAMS, cacheable=kept)
        outputs = list[RequestOutput]()
        while engine.has_work:
            outputs = engine.step() or outputs
        engine.release_idle_blocks()
        engine.finish_in_flight()
        engine.scheduler.evict_retained()
        return outputs[-1]

    def close(self) -> None:
        """End its workers."""
        self._llm.close()


def first_token(output: RequestOutput) -> tuple[float, float]:
    """Seconds to the first token: from the request's arrival, and from its first row."""
    times = output.times
    assert times.first_token_s is not None
    assert times.scheduled_s is not None
    return times.first_token_s - times.arrival_s, times.first_token_s - times.scheduled_s


def tokens(draw: random.Random, count: int) -> list[int]:
    """So many."""
    return [draw.randrange(1, SHAPE["vocab_size"]) for _ in range(count)]


def figure_19(turns: TurnTimes, rounds: int) -> dict[str, Any]:
    """Raises BrokenError where a way is further from the model than WITHIN."""
    draw = random.Random(1)
    history = tokens(draw, HISTORY)
    turns.ask(history + tokens(draw, 1), kept=True)
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in draw.sample(list(WAYS), len(WAYS)):
            output = turns.ask(history + tokens(draw, NEW), WAYS[way])
            if output.num_cached_tokens != HISTORY:
                raise BrokenError(f"{output.num_cached_tokens} tokens of {HISTORY} were loaded")
            seconds[way].append(first_token(output))
            print(way, *first_token(output), file=sys.stderr)
    to_first = {way: statistics.median(a for a, _ in each) for way, each in seconds.items()}
    of_rows = {way: statistics.median(b for _, b in each) for way, each in seconds.items()}
    whole = to_first["no preloading"]
    saved = {"no buffer": to_first["no buffer"] / whole - 1, "gate": of_rows["gate"] / whole - 1}
    for way, change in saved.items():
        if abs(change - MODELLED[way]) > WITHIN:
            raise BrokenError(f"figure 19, {way}: {change:+.3f} of the prefill time, {MODELLED[way]:+.2f} is modelled")
    return {
        "first_token_s": to_first, "from_first_row_s": of_rows, "prefill_time": saved, "paper": PAPER,
        "first_token_to_no_preloading": {way: to_first[way] / whole - 1 for way in ("no buffer", "gate")},
    }  # fmt: skip


def figure_18(turns: TurnTimes, anew: TurnTimes) -> dict[str, Any]:
    """Raises BrokenError where tokens differ, or where 900 / 100 gains less than five times."""
    draw, rows = random.Random(2), dict[str, Any]()
    history = tokens(draw, max(old for old, _ in SPLITS))
    turns.ask(history + tokens(draw, 1), kept=True)
    for old, new in SPLITS:
        prompt, outputs = history[:old] + tokens(draw, new), dict[str, RequestOutput]()
        for way in draw.sample(("computed", "no preloading", "gate"), 3):
            outputs[way] = anew.ask(prompt) if way == "computed" else turns.ask(prompt, WAYS[way])
        if len({tuple(output.outputs[0].token_ids) for output in outputs.values()}) > 1:
            raise BrokenError(f"{old} / {new}: loaded KV gives other tokens than an engine that computes all")
        seconds = {way: first_token(output)[0] for way, output in outputs.items()}
        gains = {way: seconds["computed"] / each for way, each in seconds.items() if way != "computed"}
        loaded = outputs["gate"].num_cached_tokens
        rows[f"{old}/{new}"] = {"loaded": loaded, "first_token_s": seconds, "gain": gains}
        print(old, new, rows[f"{old}/{new}"], file=sys.stderr)
    if (gain := rows["900/100"]["gain"]["gate"]) < LEAST_GAIN:
        raise BrokenError(f"figure 18: 900 / 100 gains {gain:.2f} times, {LEAST_GAIN} are to be")
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--compute-s", type=float, default=4.0, help="of 100 new tokens")
    parser.add_argument("--rounds", type=int, default=3, help="of figure 19")
    args = parser.parse_args()
    row_s = args.compute_s / NEW / (LAYERS + 1)
    byte_s = args.compute_s * T_LOAD / T_COMPUTE / (HISTORY * TOKEN_BYTES)
    os.environ["LAMINA_EMULATE"] = json.dumps({"slice_row_s": row_s})
    os.environ.update(environment({"call": "read", "byte_s": byte_s}))
    with tempfile.TemporaryDirectory() as folder:
        path, pressure = make(Path(folder) / "model", "bfloat16", SHAPE, 2048), cpu_pressure()
        turns, anew = TurnTimes(path, kv_offloading_size="256MiB"), TurnTimes(path, enable_prefix_caching=False)
        try:
            results = {"figure_19": figure_19(turns, args.rounds), "figure_18": figure_18(turns, anew)}
        finally:
            turns.close()
            anew.close()
    results["cpu_pressure_avg10"] = {"before": pressure, "after": cpu_pressure()}
    settings = {"compute_s": args.compute_s, "rounds": args.rounds, "layers": LAYERS, "token_bytes": TOKEN_BYTES}
    print(record("bench_preloading", settings, results, write=args.write))


if __name__ == "__main__":
    main()
