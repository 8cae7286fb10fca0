"""Packed weights of worker processes: one copy for the replicas of a host, the tokens of weights as they lie, and
nothing left behind.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import llama_config
from transformers import AutoModelForCausalLM

from lamina import LLM, SamplingParams, gemm
from lamina.engine.wire import WorkerError

native = gemm.get("native", 1)
pytestmark = [
    pytest.mark.usefixtures("no_child_left"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not (native.packing and native.packing.nbytes(torch.ones(1, 1, dtype=torch.bfloat16))),
        reason="this CPU has no order of its own for bf16 weights",
    ),
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
PROMPTS = [[5 + i, 17, 3, 99, 4 * i] for i in range(6)]
OPTIONS: dict[str, Any] = {
    "memory_workers": 1, "kv_memory": "16MiB", "max_num_seqs": 6, "prefill_chunk": 64, "transport": "shm",
    "compute_threads": 1, "memory_threads": 1, "deterministic": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama") / "model"
    torch.manual_seed(0)
    config = llama_config(hidden=256, layers=3, dtype="bfloat16")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def packed_bytes(model: Path) -> int:
    """Of linear layers: q, k, v, o; gate, up, down; lm_head."""
    return 2 * (3 * 256 * (256 + 2 * 128 + 256 + 3 * 704) + 8192 * 256)


def copies(pid: int) -> Iterator[tuple[int, int, int]]:
    """(inode, Rss, Pss), these in bytes, of each mapping of a shared copy; proc_pid_smaps(5)."""
    found = Path(f"/proc/{pid}/smaps").read_text()
    for part in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", found):
        if "memfd:lamina-packed" in part:
            rss, pss = (int(n) << 10 for n in re.findall(r"(?m)^(?:Rss|Pss): +(\d+) kB", part))
            yield int(part.split()[4]), rss, pss


def holders(inode: int) -> list[int]:
    """Processes that have a mapping of it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            maps = (process / "maps").read_text().splitlines()
            if any("memfd:lamina-packed" in row and int(row.split()[4]) == inode for row in maps):
                found.append(int(process.name))
    return found


def compute_pids(llm: LLM) -> list[int]:
    return [pid for name, pid in llm.pools.pids.items() if name.startswith("compute")]


def tokens(llm: LLM) -> list[list[int]]:
    return [list(answer.outputs[0].token_ids) for answer in llm.generate(PROMPTS, GREEDY)]


def test_replicas_share_one_copy_with_the_tokens_of_weights_as_they_lie(model: Path, packed_bytes: int) -> None:
    with LLM(str(model), **{**OPTIONS, "transport": "loopback"}) as llm:
        assert "weights" not in llm.engine.info.summary, "nothing is packed in the caller's process"
        lying = tokens(llm)
    with LLM(str(model), **OPTIONS) as llm:
        assert llm.engine.info.summary["weights"].endswith(", in huge pages")
        assert not [found for pid in compute_pids(llm) for found in copies(pid)]
        assert tokens(llm) == lying
    with LLM(str(model), **OPTIONS, pipeline=3) as llm:
        assert llm.engine.info.summary["weights"].endswith("shared by the replicas of this host")
        (inode, rss, pss), (other, other_rss, other_pss) = [each for pid in compute_pids(llm) for each in copies(pid)]
        near = pytest.approx(packed_bytes, rel=0.01)
        assert inode == other
        assert (rss, other_rss, pss + other_pss) == (near, near, near), "one copy for both"
        assert tokens(llm) == lying
    assert not holders(inode)


@pytest.mark.parametrize("victim", ["compute-0", "compute-1"])
def test_no_copy_is_left_after_a_death(model: Path, victim: str) -> None:
    llm = LLM(str(model), **OPTIONS, pipeline=3)
    ((inode, _, _),) = copies(llm.pools.pids[victim])
    assert sorted(holders(inode)) == sorted(compute_pids(llm))
    stream = llm.stream(PROMPTS, LONG)
    next(stream)
    os.kill(llm.pools.pids[victim], signal.SIGKILL)
    with pytest.raises(WorkerError, match="killed by SIGKILL"):
        for _ in stream:
            pass
    assert not holders(inode)


def test_one_worker_for_each_prompt_packs_nothing(model: Path) -> None:
    """A prefill worker has many rows at a time, and no copy; the compute worker beside it has one of its own."""
    with LLM(str(model), **OPTIONS, prefill_workers=1) as llm:
        assert not [found for pid in llm.pools.pids.values() for found in copies(pid)]
        assert llm.engine.info.summary["weights"].endswith(", in huge pages")
