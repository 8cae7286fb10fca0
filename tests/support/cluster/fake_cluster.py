"""A Ray cluster on this machine, in a process of its own: several nodes, tokens, no dashboard.

As a program it makes the nodes of its argument (JSON) and prints the head's address. From each line of stdin it then
takes the number of a node to remove, or the keywords of one to add (JSON). It ends everything at the end of stdin, so
also when a test dies.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
START_S = 90.0
END_S = 30.0
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}


class FakeCluster:
    """``environment`` has what a process needs to join."""

    def __init__(self, folder: Path, *nodes: dict[str, Any], auth: str = "token") -> None:
        """``nodes``: keywords of ray.cluster_utils; the first one is the head. ``auth``: Ray's RAY_AUTH_MODE."""
        self._folder = folder
        token = folder / "token"
        token.write_text("5e" * 32)
        token.chmod(0o600)
        self.environment = {
            "RAY_AUTH_MODE": auth,
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "PYTHONPATH": str(ROOT),
        }
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, json.dumps([NODE | n for n in nodes])],
                env=os.environ | self.environment,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        try:
            self.address = self._answer()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def spread(self) -> str:
        """A file for --cluster, which has workers apart from each other."""
        file = self._folder / "spread.yaml"
        file.write_text(f"address: {self.address}\nplacement: {{policy: spread}}\n")
        return str(file)

    def remove(self, number: int) -> None:
        """Kill the node's own processes, as if its host were gone."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        assert self._answer() == "removed"

    def add(self, **node: Any) -> None:
        """One more node."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(NODE | node) + "\n")
        self._process.stdin.flush()
        assert self._answer() == "added"

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        finally:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()

    def _answer(self) -> str:
        out = self._process.stdout
        assert out is not None
        while select.select([out], [], [], START_S)[0]:
            line = out.readline()
            if not line:
                break
            if line.startswith("> "):
                return line[2:].strip()
        raise AssertionError("the fake cluster did not answer")


def main() -> None:
    from ray.cluster_utils import Cluster

    head, *others = json.loads(sys.argv[1])
    cluster = Cluster(initialize_head=True, head_node_args={**head, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(**other) for other in others]
        print(f"> {cluster.address}", flush=True)
        for line in sys.stdin:
            order = json.loads(line)
            if isinstance(order, dict):
                nodes.append(cluster.add_node(**order))
            else:
                cluster.remove_node(nodes[order - 1], allow_graceful=False)
            print("> added" if isinstance(order, dict) else "> removed", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
