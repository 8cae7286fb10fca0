"""The pool of threads of native modules: its jobs under a sanitizer, and the cores of its threads, also where OpenMP
binds the thread that starts them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from textwrap import dedent

import pytest
from programs import build, run

pytest.importorskip("lamina.ops.gemm._gemm", reason="lamina.ops.gemm._gemm was not built")
pytest.importorskip("lamina.ops.sampling._sampling", reason="lamina.ops.sampling._sampling was not built")
pytest.importorskip("lamina.ops.attention._attention", reason="lamina.ops.attention._attention was not built")

ROOT = Path(__file__).resolve().parents[2]
CORES = sorted(os.sched_getaffinity(0))
STARTS = {
    "gemm": """
        from lamina.ops.gemm._gemm import Engine
        pool = Engine(3, "")
    """,
    "sampling": """
        from lamina.ops.sampling._sampling import Engine
        pool = Engine(3, "")
    """,
    "attention": """
        from lamina.ops.attention._attention import VARIANTS, Kernels
        memory, pool = torch.empty(64 << 20, dtype=torch.uint8), Kernels(VARIANTS[0], "float32")
        pool.read(memory.data_ptr(), memory.numel(), 3)
    """,
}


CODE = """
import os, torch

def tasks():
    return set(os.listdir("/proc/self/task"))
"""


@cache
def cores_of_helpers(cores: tuple[int, ...], bind: str) -> dict[str, list[list[int]]]:
    """Returns the cores of each thread that each of STARTS starts, one after another, in a process on ``cores``."""
    code = f"import os\nos.sched_setaffinity(0, {cores})\n{CODE}found, pools = {{}}, []\n"
    for name, start in STARTS.items():
        code += f"before = tasks()\n{dedent(start)}\npools.append(pool)\n"
        code += f"found[{name!r}] = [sorted(os.sched_getaffinity(int(t))) for t in sorted(tasks() - before)]\n"
    code += "import json\nprint(json.dumps(found))\n"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_"))}
    environment |= {"OMP_PROC_BIND": bind, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[list[int]]] = json.loads(done.stdout)
    return found


@pytest.mark.long
@pytest.mark.skipif(len(CORES) < 2, reason="one core")
@pytest.mark.parametrize("start", STARTS)
def test_helpers_may_use_all_cores_of_a_process_whose_threads_are_bound(start: str) -> None:
    assert cores_of_helpers(tuple(CORES), "true")[start] == [CORES] * 2


@pytest.mark.long(but=["attention-true"])
@pytest.mark.skipif(len(CORES) < 2, reason="one core")
@pytest.mark.parametrize("bind", ["true", "false"])
@pytest.mark.parametrize("start", STARTS)
def test_helpers_stay_on_the_cores_that_the_process_was_given(start: str, bind: str) -> None:
    assert cores_of_helpers((CORES[0],), bind)[start] == [CORES[:1]] * 2


@pytest.mark.long
@pytest.mark.parametrize("spins", [0, 2000])
def test_every_piece_of_a_job_is_done_once_by_a_thread_of_the_job(tmp_path: Path, spins: int) -> None:
    program = build(tmp_path, Path(__file__).with_name("pool_threads.cpp"), "-fsanitize=thread")
    assert run(program, "4000", str(spins)) == "jobs 4000, threads 4\n"
