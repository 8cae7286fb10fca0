"""Rows of pingpong.py through an RDMA port, where this machine has none: Soft-RoCE in a guest, between two processes.

    python tests/vm/rows.py --write     # minutes where the guest's processors are emulated

perftest and Lamina's verbs, in turns, in one guest. What it says of time is about this guest alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from guest import Guest
from image import ROOT, build, missing

RESULTS = ROOT / "perf" / "results" / "pingpong.jsonl"
WHO = ("ib_write_lat", "ib_write_bw", "lamina verbs put", "lamina verbs copy", "lamina verbs stream")
LIMIT_S = 1500.0


def row(who: Sequence[str], flags: str) -> dict[str, Any]:
    """Raises RuntimeError, with the guest's output, where it gave none."""
    only = " ".join(f"--only '{name}'" for name in who)
    with Guest(build(), processors=2) as guest:
        done = guest.python(f"perf/pingpong.py --json --cores 0,1 --limit-s 300 {only} {flags}", timeout_s=LIMIT_S)
        accelerator = guest.accelerator
    if done.status:
        raise RuntimeError(f"the guest ended with {done.status}: {done.output[-2000:]}")
    print(done.output, file=sys.stderr)
    measured: dict[str, Any] = json.loads(done.output.splitlines()[-1])
    # The guest sees no history of the checkout.
    measured["commit"] = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    return measured | {"guest": {"by": "QEMU", "accelerator": accelerator, "rdma": "Soft-RoCE over veth"}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"append to {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--who", default=",".join(WHO), help="those whose names contain these, separated by commas")
    parser.add_argument("--flags", default="--sizes 8,64,4096,65536 --rounds 3 --count 300 --warm-up 20")
    args = parser.parse_args()
    if lack := missing():
        print(f"error: {lack}", file=sys.stderr)
        return 2
    line = json.dumps(row(args.who.split(","), args.flags))
    print(line)
    if args.write:
        with RESULTS.open("a") as file:
            file.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
