"""A server that promises times: those that a request alone does not keep are refused at its start."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked import ForkedProgram
from running import MODEL, START_S, Running

from lamina.engine.tuning.unloaded_latency import FIRST, STEP


@pytest.mark.long(but=["flags0---slo tbt=0.001ms is below what a step of one completion takes alone, "])
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--slo", "tbt=1us"), f"--slo tbt=0.001ms is below what {STEP} takes alone, "),
        (("--slo", "ttft=1us"), f"--slo ttft=0.001ms is below what {FIRST} takes alone, "),
    ],
)
def test_a_promise_that_nobody_could_keep_is_one_line(flags: tuple[str, ...], said: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as stderr:
        words = ["serve", MODEL, "--port", "0", "--transport", "loopback", *flags]
        program = ForkedProgram(words, stderr=stderr, env={"OMP_NUM_THREADS": "1"})
    assert program.wait(START_S) == 2
    lines = [line for line in log.read_text().splitlines() if "--slo " in line]
    (line,) = lines
    assert said in line
    assert line.endswith("the best of 5: raise it")


def test_one_that_is_kept_is_promised(tmp_path: Path) -> None:
    Running(tmp_path / "log", "--transport", "loopback", "--slo", "ttft=1h,tbt=1h").kill()
