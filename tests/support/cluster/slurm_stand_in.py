"""`srun` and `scontrol` for one job, as far as examples/slurm uses them. Each step's tasks are processes on their
nodes, with the variables and the home that Slurm would give them.

``SLURM_STAND_IN`` names a folder with ``nodes`` (JSON: node -> the words that enter it), to which ``steps`` is added:
a line of JSON for each task.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

FOLDER = Path(os.environ["SLURM_STAND_IN"])
NODES: dict[str, list[str]] = json.loads((FOLDER / "nodes").read_text())


def hostnames(folded: str) -> list[str]:
    """Returns the hosts of a list as Slurm writes it: node-[a-b] is not folded there, node[1-3,7] is."""
    found = list[str]()
    for name, ranges, rest in re.findall(r"([^,\[]+)(?:\[([^\]]*)\])?([^,\[]*)(?:,|$)", folded):
        if not ranges:
            found.append(name + rest)
        for part in ranges.split(",") if ranges else []:
            first, _, last = part.partition("-")
            found += [f"{name}{n:0{len(first)}}{rest}" for n in range(int(first), int(last or first) + 1)]
    return found


def srun(words: list[str]) -> int:
    parser = argparse.ArgumentParser("srun", allow_abbrev=False)
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--ntasks", type=int, required=True)
    parser.add_argument("--nodelist", required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args(words)
    nodes = args.nodelist.split(",")
    assert len(nodes) == args.nodes == args.ntasks, "the stand-in runs one task on each node"
    assert args.overlap or not (FOLDER / "steps").exists(), "a second step waits for the first one without --overlap"
    tasks = [_task(rank, node, args.command) for rank, node in enumerate(nodes)]

    def end(number: int, frame: object) -> None:
        for task in tasks:
            task.send_signal(number)

    signal.signal(signal.SIGTERM, end)
    return max(task.wait() for task in tasks)


def _task(rank: int, node: str, command: list[str]) -> subprocess.Popen[bytes]:
    home = FOLDER / "home" / node
    home.mkdir(parents=True, exist_ok=True)
    own = {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank), "SLURM_LOCALID": "0", "SLURMD_NODENAME": node}
    process = subprocess.Popen([*NODES[node], *command], env={**os.environ, **own, "HOME": str(home)})
    with (FOLDER / "steps").open("a") as file:
        file.write(json.dumps({"node": node, "command": command, "pid": process.pid}) + "\n")
    return process


def main() -> int:
    program, *words = sys.argv[1:]
    if program == "srun":
        return srun(words)
    assert words[:2] == ["show", "hostnames"], words
    print("\n".join(hostnames(words[2])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
