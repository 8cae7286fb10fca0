"""Work requests are those of others, bit for bit: recorded ones, rdma-core's public header, pyverbs."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[2] / "csrc"
QUEUE = 0x123456
native = pytest.importorskip("soft_nic._native", reason="its native module is not built")


def recorded() -> dict[str, bytes]:
    lines = (line.split() for line in (HERE / "mlx5_wqe.txt").read_text().splitlines() if not line.startswith("#"))
    return {name: bytes.fromhex("".join(words)).ljust(64, b"\0") for name, *words in lines}


def test_recorded_requests() -> None:
    remote, local = (0x7E0000002000, 0xCCDD00), (0x7F0000001000, 0xAABB00)
    assert native.write_wqe(0, QUEUE, remote, local, 4096, 0) == recorded()["write"]
    signal = (0x7E0000002FF8, 0xCCDD00)
    assert native.write_word_wqe(1, QUEUE, signal, 0x1122334455667788, native.SIGNALLED) == recorded()["word"]


def test_a_changed_argument_changes_the_bytes() -> None:
    """The comparison can fail: no argument is ignored."""
    base = (7, QUEUE, (1, 2), (3, 4), 5, 8)
    seen = {native.write_wqe(*base)}
    for changed in (
        (8, *base[1:]), (7, 9, *base[2:]), (7, QUEUE, (9, 2), *base[3:]), (7, QUEUE, (1, 9), *base[3:]),
        (*base[:3], (9, 4), 5, 8), (*base[:3], (3, 9), 5, 8), (*base[:4], 9, 8), (*base[:5], 0),
    ):  # fmt: skip
        seen.add(native.write_wqe(*changed))
    assert len(seen) == 9


def test_the_public_header_of_rdma_core(tmp_path: Path) -> None:
    """Requests, completions, opcodes and syndromes; the program prints what differs."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    found = subprocess.run(
        [compiler, "-E", "-x", "c++", "-", "-o", "/dev/null"], input="#include <infiniband/mlx5dv.h>\n",
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if found.returncode:
        pytest.skip("no infiniband/mlx5dv.h: install libibverbs-dev")
    program = tmp_path / "check"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}", f"-I{HERE.parents[1]}"]
    build = [compiler, *flags, str(HERE / "mlx5dv_check.cpp")]
    subprocess.run([*build, "-o", str(program)], check=True, timeout=110)
    run = subprocess.run([str(program)], capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout) == (0, "equal\n")


PYVERBS = """
import ctypes, sys
from pyverbs.providers.mlx5.mlx5dv import Wqe, WqeCtrlSeg, WqeDataSeg
for line in sys.stdin:
    index, queue, flags, nbytes, key, address = map(int, line.split())
    segments = [WqeCtrlSeg(index & 0xFFFF, 8, 0, queue, flags, 3, 0, 0), WqeDataSeg(nbytes, key, address)]
    wqe = Wqe(segments)
    print(ctypes.string_at(wqe.address, 32).hex())
"""


def test_the_segments_of_pyverbs() -> None:
    """Control and data segment; pyverbs has no class for the remote address between them. It is the distribution's
    package, so it runs under the distribution's Python."""
    python = "/usr/bin/python3"
    probe = [python, "-c", "from pyverbs.providers.mlx5.mlx5dv import Wqe"]
    if not Path(python).exists() or subprocess.run(probe, capture_output=True, timeout=60, check=False).returncode:
        pytest.skip("no pyverbs: install python3-pyverbs")
    rng = random.Random(1)
    cases = [
        (rng.getrandbits(20), rng.getrandbits(24), rng.choice([0, 8]), rng.randint(1, 1 << 30), rng.getrandbits(32),
         rng.getrandbits(64)) for _ in range(100)
    ]  # fmt: skip
    text = "".join(" ".join(map(str, case)) + "\n" for case in cases)
    run = subprocess.run([python, "-c", PYVERBS], input=text, capture_output=True, text=True, timeout=60, check=True)
    ours = [native.write_wqe(i, q, (1, 2), (address, key), n, flags) for i, q, flags, n, key, address in cases]
    assert run.stdout.split() == [(wqe[:16] + wqe[32:48]).hex() for wqe in ours]
