"""Large checkpoints: how much memory loading takes, and how long."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from checkpoints import llama_config, write_checkpoint

from lamina import LLM

pytestmark = pytest.mark.usefixtures("no_child_left")
SAMPLE_S = 0.2  # looking at gigabytes takes a good part of that, and keeps the workers from mapping meanwhile
READ_BYTES = 16 << 20
OPTIONS: dict[str, Any] = {"memory_workers": 2, "kv_memory": "64MiB", "max_model_len": 256, "max_num_seqs": 2}
SIZES = [
    pytest.param({"hidden": 1024, "layers": 8}, 4, id="0.2 GB", marks=pytest.mark.timeout(200)),
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


class Pss:
    """The most that the workers of this process have together, page by page: one that n have mapped counts 1/n each.

    So a file that two replicas share counts once, as it should; VmHWM would count it twice. The kernel keeps no peak of
    it, hence samples. For ranks, which share nothing but libraries, that is the sum of their peaks but for those.
    """

    def __init__(self) -> None:
        self.most = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Pss:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._sample()
        self._stop.set()
        self._thread.join(10.0)

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self._sample()

    def _sample(self) -> None:
        self.most = max(self.most, sum(pss(pid) for pid in compute_workers()))


def compute_workers() -> Iterator[int]:
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            try:
                if b"serve_compute" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    yield int(pid)
            except OSError:
                continue


def pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)


def load(path: Path, spread: dict[str, Any]) -> Loaded:
    with Pss() as memory, LLM(str(path), **OPTIONS, **spread) as llm:
        memory._sample()
        load_s = float(llm.engine.info.summary["load_s"])
    return Loaded(memory.most, load_s)


def read_all(path: Path) -> float:
    """Seconds to read all weights from the page cache."""
    buffer, start = bytearray(READ_BYTES), time.perf_counter()
    for file in path.glob("*.safetensors"):
        with open(file, "rb", buffering=0) as f:
            while f.readinto(buffer):
                pass
    return time.perf_counter() - start


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for file in tmp_path.rglob("*.safetensors"):
        file.unlink()


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize(("shape", "num_files"), SIZES)
def test_loading_takes_the_weights_once(
    shape: dict[str, Any], num_files: int, spread: dict[str, Any], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At most 1.15 times the weights beside what the same workers take for a model of next to no weights; files that
    replicas share count once.
    """
    config = llama_config(dtype="bfloat16", **shape)
    weights = write_checkpoint(place / "model", config, dtype="BF16", num_files=num_files)
    few = llama_config(dtype="bfloat16", hidden=64, layers=shape["layers"], vocab_size=64)
    write_checkpoint(place / "few", few, dtype="BF16")
    assert len(list((place / "model").glob("*.safetensors"))) == num_files
    base = load(place / "few", spread)
    read_all(place / "model")
    found = load(place / "model", spread)
    cached_s = min(read_all(place / "model") for _ in range(2))
    with capsys.disabled():
        print(
            f"\n{weights / 1e9:.2f} GB, {spread}: peak {found.nbytes / 1e9:.2f} GB, {base.nbytes / 1e9:.2f} GB of them "
            f"without weights: {(found.nbytes - base.nbytes) / weights:.3f} of the weights; loaded in "
            f"{found.load_s:.2f} s ({base.load_s:.2f} s without weights), read from the page cache in {cached_s:.2f} s"
        )
    assert weights < found.nbytes - base.nbytes + 0.05 * weights, "the weights are there"
    assert found.nbytes - base.nbytes < 1.15 * weights
    assert found.load_s - base.load_s < 3 * cached_s + 10.0
