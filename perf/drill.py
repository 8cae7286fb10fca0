"""A row of `lamina-launch drill`: hits of a server's processes while streams are read, as many as a time allows.

Prints what the drill says as JSON; --write appends it to perf/results/drill.jsonl. Ends with the drill's exit status.

    python perf/drill.py examples/tiny_lm/model --faults kill-memory,kill-compute --per-reading 4 --minutes 5 --write
"""

from __future__ import annotations

import io
import json
import signal
import sys
import time
from contextlib import redirect_stdout

from common import cpu_pressure, parser_of, record

from lamina.tools.drill import FAULTS, add_arguments, parse_arguments
from lamina.tools.drill.drill_report import report
from lamina.tools.drill.injections import Drill
from lamina.tools.drill.target import Target


def main() -> int:
    parser = parser_of(__doc__)
    add_arguments(parser)
    parser.set_defaults(count=10_000, json=True)
    parser.add_argument("--minutes", type=float, default=5.0, help="after which no hit begins (5)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the server ends, too
    try:
        faults, flags = parse_arguments(args)
    except ValueError as error:
        parser.error(str(error))
    until = time.perf_counter() + 60 * args.minutes
    target = Target(args.model, flags, journal=True)
    try:
        drill = Drill(target, args, FAULTS)
        calm = drill.run_undisturbed()
        blows = drill.inject_all(faults, args.count, until)
        well = target.is_healthy(1.0)
    finally:
        left = target.stop()
    args.count = len(blows) + (not well)
    told = io.StringIO()
    with redirect_stdout(told):
        status = report(args, blows, calm, left)
    names = "model", "faults", "streams", "tokens", "per_reading", "seed", "flags"
    settings = {name: getattr(args, name) for name in names}
    results = {"results": json.loads(told.getvalue()), "status": status, "cpu_pressure": cpu_pressure()}
    print(record("drill", settings, results, write=args.write))
    return status


if __name__ == "__main__":
    sys.exit(main())
