"""``lamina-launch plan MODEL --calibrate RUN``: tables from a recorded run, and other runs predicted from them."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def calibrated(args: argparse.Namespace) -> int:
    """Run the command. Returns exit status 0; raises ValueError for bad input."""
    from lamina.observe.perfetto import read
    from lamina.tools.request_traces import read_trace

    from . import tables
    from .calibrate.fit import calibrate
    from .calibrate.load_driver import shapes_of
    from .calibrate.prediction import ANSWER, calibration_json, calibration_text, predict, predict_shape
    from .calibrate.recorded_run import steps_of
    from .model_facts import model_facts

    shapes = shapes_of(args.predict, "--predict") if args.predict else []
    trace = read_trace(args.trace).first(args.simulate or None) if args.trace else None
    source = Path(args.calibrate).name
    run = steps_of(read(args.calibrate), f"--calibrate {source}")
    facts = model_facts(args.model, dtype=args.dtype, trust_remote_code=args.trust_remote_code)
    if args.dry_run:
        print(f"would fit {len(run.steps)} steps of {args.model} and predict {len(shapes) + bool(trace)} runs")
        return 0
    calibration = calibrate(run, facts, tables.constants(), f"--calibrate {source}")
    predicted = {shape.label: predict_shape(calibration, shape, ANSWER) for shape in shapes}
    if trace:
        predicted[f"{trace.name}, as it came"] = predict(calibration, trace.requests, most=args.max_num_seqs)
    if args.json:
        sys.stdout.write(json.dumps(calibration_json(calibration, source, predicted), indent=2) + "\n")
    else:
        sys.stdout.write(calibration_text(calibration, source, predicted))
    return 0
