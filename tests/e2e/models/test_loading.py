"""Large checkpoints: how much memory loading takes, and how long.

Covers: lamina/workers/memory/resident_memory.py.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from checkpoints import llama_config, write_checkpoint
from worker_processes import workers_of

from lamina import LLM
from lamina.models.load import load as load_model
from lamina.workers.memory.resident_memory import resident

pytestmark = pytest.mark.usefixtures("no_child_left")
SAMPLE_S = 0.2  # looking at gigabytes takes a good part of that, and keeps the workers from mapping meanwhile
NOISE_BYTES = 24 << 20  # by which the peak of a worker without weights differs from run to run
READ_BYTES = 16 << 20
WEIGHTS_PSS = re.compile(rb"^[0-9a-f]+-[^\n]*\.safetensors\n(?:[A-Z][^\n]*\n)*?Pss: +([0-9]+) kB", re.MULTILINE)
OPTIONS: dict[str, Any] = {
    "memory_workers": 2,
    "kv_memory": "64MiB",
    "max_model_len": 256,
    "max_num_seqs": 2,
    "gemm": "torch",
}
NUM_COMPUTE = 2  # of each spread; by torch none keeps packed copies of the files' weights
SIZES = [
    pytest.param({"hidden": 2048, "layers": 2}, 4, id="0.2 GB", marks=pytest.mark.timeout(200)),
    pytest.param({"hidden": 4096, "layers": 11}, 6, id="4 GB", marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
]
SPREADS = [
    pytest.param({"tensor_parallel_size": 2}, id="two ranks"),
    pytest.param({"pipeline": 3}, id="two replicas"),
]


class Loaded(NamedTuple):
    """nbytes: the peak over all compute workers, together; load_s: of the first one."""

    nbytes: int
    load_s: float


class Held:
    """The most that the workers of this process hold together: memory of their own, and the pages of weights, which n
    that have mapped them have 1/n each. The kernel keeps no peak of that, hence samples.

    Files of libraries are left out: what a worker is given of those depends on who else runs.
    """

    def __init__(self) -> None:
        self.most = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Held:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(10.0)

    def sample(self) -> None:
        """Shares of mapped weights are read twice. A worker that maps pages between two readings halves the other
        worker's share that was just read, and the sum would count half of the weights once more.
        """
        pids = list(compute_workers())
        first = [mapped_weights(pid) for pid in pids]
        again = [mapped_weights(pid) for pid in pids]
        self.most = max(self.most, sum(map(own, pids)) + sum(map(min, first, again)))

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self.sample()


def compute_workers() -> Iterator[int]:
    yield from (pid for pid, command in workers_of(os.getpid()) if "serve_compute" in command)


def own(pid: int) -> int:
    """RssAnon + RssShmem of proc_pid_status(5); 0 where it has ended."""
    try:
        memory = resident(pid)
    except (OSError, KeyError):
        return 0
    return memory.private + memory.shared


def mapped_weights(pid: int) -> int:
    """Pss of the weights' mappings in proc_pid_smaps(5); 0 where it has ended."""
    try:
        return 1024 * sum(map(int, WEIGHTS_PSS.findall(Path(f"/proc/{pid}/smaps").read_bytes())))
    except OSError:
        return 0


def load(path: Path, spread: dict[str, Any]) -> Loaded:
    with Held() as memory, LLM(str(path), **OPTIONS, **spread) as llm:
        memory.sample()
        load_s = float(llm.engine.worker_info.summary["load_s"])
    return Loaded(memory.most, load_s)


def load_here(path: Path) -> float:
    """CPU seconds of all threads to load a model and map its weights: who else runs hardly changes them."""
    start = time.process_time()
    load_model(path)
    return time.process_time() - start


def read_all(path: Path) -> float:
    """CPU seconds to read all weights from the page cache."""
    buffer, start = bytearray(READ_BYTES), time.process_time()
    for file in path.glob("*.safetensors"):
        with open(file, "rb", buffering=0) as f:
            while f.readinto(buffer):
                pass
    return time.process_time() - start


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for file in tmp_path.rglob("*.safetensors"):
        file.unlink()


@pytest.mark.long
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize(("shape", "num_files"), SIZES)
def test_loading_takes_the_weights_once(
    shape: dict[str, Any], num_files: int, spread: dict[str, Any], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At most 1.15 times the weights, above the memory of the same workers for a model of next to no weights; files
    that replicas share count once.
    """
    config = llama_config(dtype="bfloat16", **shape)
    weights = write_checkpoint(place / "model", config, dtype="BF16", num_files=num_files)
    few = llama_config(dtype="bfloat16", hidden=64, layers=shape["layers"], vocab_size=64)
    write_checkpoint(place / "few", few, dtype="BF16")
    assert len(list((place / "model").glob("*.safetensors"))) == num_files
    base = load(place / "few", spread)
    read_all(place / "model")
    found = load(place / "model", spread)
    grown = found.nbytes - base.nbytes
    with capsys.disabled():
        print(
            f"\n{weights / 1e9:.2f} GB, {spread}: peak {found.nbytes / 1e9:.2f} GB, {base.nbytes / 1e9:.2f} GB of them "
            f"without weights: {grown / weights:.3f} of the weights; loaded in {found.load_s:.2f} s, "
            f"{base.load_s:.2f} s without weights"
        )
    limit = 1.15 * weights + NOISE_BYTES * NUM_COMPUTE
    assert grown > 0.7 * weights, "the weights are there"
    assert grown < limit
    assert grown + weights > limit, "a second copy would be seen"


@pytest.mark.long(but=["0.2 GB"])
@pytest.mark.parametrize(("shape", "num_files"), SIZES)
def test_loading_costs_no_more_than_reading(
    shape: dict[str, Any], num_files: int, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The CPU time counts, above that of a model of next to no weights."""
    config = llama_config(dtype="bfloat16", **shape)
    weights = write_checkpoint(place / "model", config, dtype="BF16", num_files=num_files)
    few = llama_config(dtype="bfloat16", hidden=64, layers=shape["layers"], vocab_size=64)
    write_checkpoint(place / "few", few, dtype="BF16")
    cached_s = min(read_all(place / "model") for _ in range(3))
    load_here(place / "few")  # what is imported
    base_s, found_s = (min(load_here(place / name) for _ in range(3)) for name in ("few", "model"))
    with capsys.disabled():
        print(
            f"\n{weights / 1e9:.2f} GB: {found_s:.2f} s of CPU, {base_s:.2f} s without weights; read {cached_s:.2f} s"
        )
    assert found_s - base_s < 5 * cached_s + 1.0


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_copies_of_replicas_are_seen(place: Path) -> None:
    """A mistake that the test above finds: weights of another dtype, which each replica converts for itself."""
    config = llama_config(dtype="bfloat16", hidden=1024, layers=2)
    weights = write_checkpoint(place / "model", config, dtype="BF16")
    write_checkpoint(place / "few", llama_config(dtype="bfloat16", hidden=64, layers=2, vocab_size=64), dtype="BF16")
    options = {"pipeline": 3, "dtype": "float32"}
    grown = load(place / "model", options).nbytes - load(place / "few", options).nbytes
    assert grown > NUM_COMPUTE * 2 * weights - NOISE_BYTES * NUM_COMPUTE
