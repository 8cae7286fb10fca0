"""The table of memory that a dry run prints, and what is resident then."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import llama_config, write_checkpoint
from forked import launch

from lamina import LLM, SamplingParams

pytestmark = [pytest.mark.usefixtures("no_child_left"), pytest.mark.timeout(300)]
CHUNK = 256
OPTIONS: dict[str, Any] = {
    "memory_workers": 2, "kv_memory": "256MiB", "max_num_seqs": 4, "prefill_chunk": CHUNK, "transport": "shm",
    "compute_threads": 1, "memory_threads": 1,
}  # fmt: skip
PLAN = """
import dataclasses, json, sys
from lamina.cli.common.memory_table import workers_memory
from lamina.config.flat_options import make_config
from lamina.workers.memory.kv_store import available_bytes
rows = workers_memory(sys.argv[1], make_config(json.loads(sys.argv[2])), available_bytes())
print(json.dumps([{**dataclasses.asdict(row), "total": row.resident_bytes} for row in rows]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """680 MB of weights in fp32."""
    path = tmp_path_factory.mktemp("llama") / "model"
    write_checkpoint(path, llama_config(hidden=1280, layers=8), num_files=2)
    yield path
    for file in path.glob("*.safetensors"):
        file.unlink()


def planned(model: Path, options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of the table, by worker, from a process of its own: what this one has imported is no part of it."""
    return {row["name"]: row for row in json.loads(launch(str(model), json.dumps(options), code=PLAN))}


def peak(pid: int) -> int:
    """VmHWM of proc_pid_status(5): RssAnon + RssFile + RssShmem at their highest."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def peaks(model: Path, options: dict[str, Any]) -> dict[str, int]:
    """The most that each worker has resident (VmHWM: RssAnon + RssFile + RssShmem at their highest) from when it is
    ready, through prompts of full chunks and sequences that decode.
    """
    rng = random.Random(1)
    prompts = [[rng.randrange(2, 8192) for _ in range(CHUNK + 8)] for _ in range(4)]
    with LLM(str(model), **options) as llm:
        for pid in llm.pools.pids.values():
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # VmHWM begins anew; proc_pid_clear_refs(5)
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
        return {name: peak(pid) for name, pid in llm.pools.pids.items()}


CASES = [
    pytest.param({}, id="two memory workers"),
    pytest.param({"tensor_parallel_size": 2}, id="two ranks", marks=pytest.mark.slow),
    pytest.param({"pipeline": 3}, id="two replicas", marks=pytest.mark.slow),
    pytest.param({"prefill_workers": 1}, id="a prefill worker", marks=pytest.mark.slow),
    pytest.param({"dtype": "bfloat16", "kv_cache_dtype": "int8"}, id="copied weights", marks=pytest.mark.slow),
    pytest.param({"transport": "tcp", "partition": "token"}, id="tcp", marks=pytest.mark.slow),
]


@pytest.mark.long
@pytest.mark.parametrize("more", CASES)
def test_what_is_resident_is_what_was_planned(more: dict[str, Any], model: Path) -> None:
    """Within 5 % for each worker. Every process counts all pages that it has mapped, also those that it shares.

    Who else runs changes nothing here: peaks are the kernel's, and nothing is timed.
    """
    options = {**OPTIONS, **more}
    rows, found = planned(model, options), peaks(model, options)
    assert rows.keys() == found.keys()
    for name, most in found.items():
        print(f"{name}: planned {rows[name]}, resident {most}, {most / rows[name]['total']:.3f}")
    near: Any = pytest.approx(dict.fromkeys(rows, 1.0), abs=0.05)
    assert {name: found[name] / row["total"] for name, row in rows.items()} == near
    for name, row in rows.items():
        largest = max(row["mapped"], row["copied"], row["kv"])
        assert found[name] / (row["total"] - largest) > 1.3, "a plan that forgets a part would be seen"
