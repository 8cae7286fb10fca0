"""Runs predicted by a calibration: the engine's own scheduler, with steps that take the times of the fitted tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from lamina.facts.report import table
from lamina.tools.plan.replay import BLOCK, CHUNK, simulated
from lamina.tools.request_traces import RequestTrace, TracedRequest

from .fit import Calibration
from .load_driver import RunShape, RunSpeed, run_requests

ANSWER = 128  # tokens of each sequence, of a shape
_SEEDS = range(3)  # they decide which round gets which delays


def predict(
    calibration: Calibration,
    requests: Sequence[TracedRequest],
    *,
    batches: int = 1,
    together: bool = False,
    most: int = 0,
) -> RunSpeed:
    """Predict the speed of requests as they come, in a pool that holds all; ``most`` at once, 0 = all. See
    ``run_requests``. Returns the median over several seeds, as the 99th percentile of a short run depends on few
    rounds.
    """
    trace = RequestTrace("predicted", tuple(requests))
    blocks = sum(-(-(r.prompt + r.answer + 1) // BLOCK) + 1 for r in requests)
    where, chunk = replace(calibration.deployment, batches=batches), calibration.chunk or CHUNK
    tempos = list[RunSpeed]()
    for seed in _SEEDS:
        took = calibration.delays.sampler(seed)
        engine, wire = simulated(calibration.costs, where, trace, blocks, most or len(requests), chunk, took)
        tempos.append(run_requests(engine, wire.clock, requests, wire.clock.sleep, together=together))
    return RunSpeed(*(median(each) for each in zip(*tempos, strict=True)))


def predict_shape(calibration: Calibration, shape: RunShape, answer: int) -> RunSpeed:
    """Predict the speed while all of its sequences decode. Prompts come before, one after the other, so replies must be
    long enough.
    """
    rounds = shape.sequences * -(-shape.prompt // (calibration.chunk or CHUNK))
    return predict(calibration, shape.requests(rounds + answer), batches=shape.batches, together=True)


def calibration_text(calibration: Calibration, source: str, predicted: dict[str, RunSpeed]) -> str:
    """Return the tables in short, and the predictions."""
    lines = [f"fitted to {source}: times of this model on that host, while it was as busy as it was then"]
    rows = [["rows of a step", "slices", "steps"]]
    shown = sorted(calibration.by_rows, key=lambda r: -calibration.by_rows[r][1])[:8]
    rows += [
        [f"{r}", f"{calibration.by_rows[r][0] * 1e3:.2f} ms", f"{calibration.by_rows[r][1]}"] for r in sorted(shown)
    ]
    layer_us, bytes_us = calibration.floor_s * 1e6, calibration.byte_s * 1e12
    between_ms, driver_ms = calibration.between_s * 1e3, calibration.driver_s * 1e3
    lines += [
        *table(rows),
        f"  attention of a layer: {layer_us:.1f} us, and {bytes_us:.1f} us for 10^6 bytes",
        f"  the rest of a step: {between_ms:.2f} ms; the driver, in parallel: {driver_ms:.2f} ms",
    ]
    lines.append(f"  by the Conductor's laws:  lamina-launch plan simulate {_law_flags(calibration)} ...")
    if predicted:
        rows_of_table = [["predicted", "tokens/s", "TBT p50", "p99"]]
        rows_of_table += [
            [name, f"{t.tokens_s:.1f}", f"{t.tbt_p50_s * 1e3:.2f} ms", f"{t.tbt_p99_s * 1e3:.2f} ms"]
            for name, t in predicted.items()
        ]
        lines += ["", *table(rows_of_table)]
    return "\n".join(lines) + "\n"


def _law_flags(calibration: Calibration) -> str:
    laws: dict[str, tuple[float, ...]] = {"--decode-law": calibration.decode}
    if calibration.prefill:
        laws["--prefill-law"] = calibration.prefill
    return " ".join(f"{flag} {','.join(f'{x:.4g}' for x in law)}" for flag, law in laws.items())


def calibration_json(calibration: Calibration, source: str, predicted: dict[str, RunSpeed]) -> dict[str, Any]:
    """Return the same as plain data; times in seconds."""
    return {
        "source": source,
        "slices": {str(rows): {"seconds": took, "steps": steps} for rows, (took, steps) in calibration.by_rows.items()},
        "attention": {"layer_s": calibration.floor_s, "byte_s": calibration.byte_s},
        "between_s": calibration.between_s, "driver_s": calibration.driver_s, "chunk": calibration.chunk,
        "decode_law": [*calibration.decode], "prefill_law": calibration.prefill and [*calibration.prefill],
        "predicted": {name: tempo._asdict() for name, tempo in predicted.items()},
    }  # fmt: skip
