"""Commands to a NIC's firmware are those of rdma-core's own tests, bit for bit."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from compiled import made_by

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[2] / "csrc"
RECORDED = [line for line in (HERE / "mlx5_mailbox.txt").read_text().splitlines() if not line.startswith("#")]
FLAGS = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror"]
# Errors that the stand-in of the firmware could share with our code.
WRONG = [
    ("{2112, 32}", "{2144, 32}"), ("{1472, 64}, rings.record", "{1472, 64}, rings.seen"), ("{1573, 3}", "{1572, 3}"),
    ("kToInit = 0x502", "kToInit = 0x501"), ("{1384, 24}, psn", "{1160, 24}, psn"),
    ("traffic_class >> 2", "traffic_class"), ("{673, 3}", "{676, 4}"), ("0x80 >>", "1 <<"),
]  # fmt: skip
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


def commands(program: Path) -> list[str]:
    return subprocess.run([str(program)], capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()


@needs_compiler
def test_commands_are_those_of_rdma_core() -> None:
    made = made_by(["g++", *FLAGS, f"-I{CSRC}", str(HERE / "mlx5_mailbox.cpp")], "-o", "{}/mailbox")
    assert made.status == 0, made.said
    assert [line.split()[0] for line in RECORDED] == [
        "queue", "pair", "init", "receive-ethernet", "receive-infiniband", "send", "error"
    ]  # fmt: skip
    assert commands(made.folder / "mailbox") == RECORDED


@needs_compiler
@pytest.mark.parametrize(("ours", "wrong"), WRONG)
def test_an_error_is_noticed(ours: str, wrong: str, tmp_path: Path) -> None:
    header = tmp_path / "netstack" / "verbs" / "mailbox.h"
    header.parent.mkdir(parents=True)
    text = (CSRC / "netstack" / "verbs" / "mailbox.h").read_text()
    assert ours in text
    header.write_text(text.replace(ours, wrong))
    build = ["g++", "-std=c++17", f"-I{tmp_path}", str(HERE / "mlx5_mailbox.cpp"), "-o", str(tmp_path / "wrong")]
    subprocess.run(build, check=True, capture_output=True, timeout=110)
    assert commands(tmp_path / "wrong") != RECORDED
