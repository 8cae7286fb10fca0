"""perf/pingpong.py: who takes part, what is said of those who cannot, and the plots."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from wiring import ROOT, open_or_skip

SCRIPT = ROOT / "perf" / "pingpong.py"


def run(*flags: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    env = os.environ | ({"PATH": path} if path else {})
    return subprocess.run(
        [sys.executable, str(SCRIPT), *flags], capture_output=True, text=True, check=False, timeout=100, env=env
    )


def script(name: str) -> ModuleType:
    """A module of perf/."""
    spec = importlib.util.spec_from_file_location(Path(name).stem, ROOT / "perf" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_what_is_missing_is_named_and_left_out(tmp_path: Path) -> None:
    done = run("--dry-run", path=str(tmp_path))
    assert done.returncode == 0
    for what in ("mpirun, mpicxx", "ucx_perftest", "g++"):
        assert f"left out: needs {what}" in done.stderr
    assert "Open MPI" not in done.stdout
    assert "lamina shm put" in done.stdout


@pytest.mark.slow
def test_a_turn_of_three() -> None:
    open_or_skip("shm")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores")
    flags = [
        "--only",
        "lamina tcp copy",
        "--only",
        "TCP socket, Python",
        "--sizes",
        "64,5000",
        "--rounds",
        "1",
        "--count",
        "20",
    ]
    done = run(*flags, "--cores", f"{cores[0]},{cores[1]}")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout[done.stdout.index("{") :])
    assert all(row["us"] > 0 and row["ratio"] == pytest.approx(row["us"] / row["other_us"]) for row in figures.values())
    assert "lamina tcp copy, Python, 64 B, against TCP socket, Python" in figures


def test_nobody_is_one_line() -> None:
    done = run("--only", "pigeon")
    assert done.returncode == 2
    assert done.stderr.startswith("error: --only 'pigeon' names nobody")


def test_a_plot_is_well_formed_and_in_its_frame() -> None:
    module = script("transports/loglog")
    lines = [module.Curve("a < b", [(8, 0.5), (1 << 20, 300.0)], True), module.Curve("c", [(8, 2.0)])]
    tree = ElementTree.fromstring(module.draw("title", "x", "y", lines))
    assert [e.text for e in tree.iter() if e.text in ("a < b", "c", "title")] == ["title", "a < b", "c"]
    axis = module._Axis([8, 1 << 20], 2, 100, 500)
    assert (axis.place(8), axis.place(1 << 20)) == pytest.approx((100, 500))
    assert axis.ticks(4) == [16.0, 256.0, 4096.0, 65536.0, 1048576.0]
    with pytest.raises(ValueError, match="nothing"):
        module.draw("t", "x", "y", [])


LATE = """
import pathlib, socket, sys, time
mark = pathlib.Path(sys.argv[1])
if not mark.exists():
    mark.write_text(sys.argv[-1])
    sys.exit("the port is taken")
with socket.create_server(("127.0.0.1", int(sys.argv[-1]))):
    time.sleep(60)
"""


def test_a_server_whose_port_was_taken_gets_another(tmp_path: Path) -> None:
    mark = tmp_path / "first"
    with script("transports/competitors").ucx_server([sys.executable, "-c", LATE, str(mark)], dict(os.environ)) as port:
        socket.create_connection(("127.0.0.1", port), 10.0).close()
    assert mark.exists()


def test_a_server_that_somebody_else_stands_in_for_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    competitors = script("transports/competitors")
    monkeypatch.setattr(competitors, "LISTEN_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as other, subprocess.Popen(["sleep", "60"]) as idle:
        try:
            assert not competitors._listens(idle, other.getsockname()[1])
        finally:
            idle.kill()
