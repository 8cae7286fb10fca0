"""libmlx5 itself, over a stand-in of its kernel, is the oracle of work requests, doorbells and completions."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import mlx5_mutants
import mlx5_stand_in
import pytest
from compiled import made_by
from mlx5_mutants import CSRC, Mutant

SOURCE = Path(__file__).with_name("mlx5_oracle.cpp")
# (function, what its line begins with, what is made of it): errors that the software NIC could share with our code.
WRONG = [
    ("write_head", "wqe.word[1]", "queue >> 8"),
    ("write_words_wqe", "wqe.word[9 + 2 * i]", ""),
    ("write_words_wqe", "wqe.word[10 + 2 * i]", ""),
    ("commit", "bus.put(q.record", ", (u32("),
    ("poll_cq", "bus.put(q.seen", ""),
]


def compiled(folder: Path | None = None) -> tuple[int, Path, str]:
    """(status, program, the compiler's output); ``folder`` holds headers to take in place of ours."""
    library = mlx5_stand_in.kernel()
    flags = [*mlx5_stand_in.FLAGS, str(SOURCE), str(library), f"-Wl,-rpath,{library.parent}", "-ldl"]
    if folder is None:
        made = made_by(["g++", *flags], "-o", "{}/oracle")
        return made.status, made.folder / "oracle", made.said
    command = ["g++", f"-I{folder}", *flags, "-o", str(folder / "oracle")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    return done.returncode, folder / "oracle", done.stderr


def asked(program: Path, requests: int, folder: Path) -> str:
    environment = {"SYSFS_PATH": str(mlx5_stand_in.files(folder)), "MLX5_SHUT_UP_BF": "1"}
    run = subprocess.run(
        [str(program), str(requests)], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    return run.stdout + run.stderr


@pytest.mark.long
def test_libmlx5_posts_and_polls_the_same(tmp_path: Path) -> None:
    """70,000 requests, beyond the end of the 16-bit indices, with full rings and two kinds of failure."""
    status, program, said = compiled()
    assert status == 0, said
    assert asked(program, 70_000, tmp_path) == "equal\n"


@pytest.mark.long(but=["poll_cq-bus.put(q.seen-"])
@pytest.mark.parametrize(("function", "line", "change"), WRONG)
def test_an_error_is_noticed(function: str, line: str, change: str, tmp_path: Path) -> None:
    made = (m for m in mlx5_mutants.mutants() if m.function == function and m.before.strip().startswith(line))
    mutant: Mutant = next(m for m in made if (change in m.after if change else not m.after))
    for folder in ("netstack", "netstack/verbs"):
        (tmp_path / folder).mkdir()
    for path in (CSRC / "netstack" / "verbs").glob("*.h"):  # they include each other by their own folder
        shutil.copy(path, tmp_path / "netstack" / "verbs")
    (tmp_path / mutant.header).write_text(mutant.source())
    status, program, said = compiled(tmp_path)
    assert status == 0, said
    assert "not true" in asked(program, 200, tmp_path)
