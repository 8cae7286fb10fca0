"""The mlx5 headers against the software NIC: the proof itself, and that it notices when the headers are wrong."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from pathlib import Path

import mlx5_mutants
import pytest
from compiled import made_by
from mlx5_mutants import CSRC, FLAGS, INCLUDES, MODEL, Mutant, Proof

MUTANTS = mlx5_mutants.mutants()
FENCES = [m for m in MUTANTS if m.after == "" and ("order(" in m.before or "fence" in m.before)]
NEARER = r"bus\.(fence|release)\("  # or as far again
SCOPES = [m for m in MUTANTS if re.sub(NEARER, r"bus.\1_near(", m.before) == m.after != m.before]
SCOPES += [m for m in MUTANTS if re.sub(NEARER, r"bus.\1_near(", m.after) == m.before != m.after]
ACQUIRES = [m for m in MUTANTS if "bus.acquire(" in m.before and "bus.load(" in m.after]
NEAR = [m for m in MUTANTS if "_near(" in m.before and re.search(r"bus\.(load|put)\(", m.after)]
RELEASES = [m for m in MUTANTS if "bus.release(" in m.before and "bus.put(" in m.after]
UNARGUED = [m for m in MUTANTS if m.name not in mlx5_mutants.argued()]
CHOSEN = [*FENCES, *(m for m in ACQUIRES if m.function in ("wait_signal", "poll_cq")), *RELEASES, *NEAR, *SCOPES]
SAMPLE = list(dict.fromkeys([*CHOSEN, *random.Random(1).sample(UNARGUED, 4)]))
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


class KeptProof(Proof):
    """Its programs are kept, by content."""

    def __init__(self) -> None:
        model = made_by(["g++", *FLAGS, *INCLUDES, "-c", str(MODEL / "nic.cpp")], "-o", "{}/nic.o")
        assert model.status == 0, model.said
        self._command, self._model = ["g++", *FLAGS], model.folder / "nic.o"

    def build(self, mutant: Mutant | None) -> Path | None:
        files = {} if mutant is None else {mutant.header: mutant.source()}
        ours = [*INCLUDES, str(MODEL / "prove.cpp"), str(self._model)]
        made = made_by(self._command, "-I{}", *ours, "-o", "{}/prove", files=files)
        return None if made.status else made.folder / "prove"


@pytest.fixture(scope="module")
def proof() -> Proof:
    return KeptProof()


@pytest.fixture(scope="module")
def program() -> Path:
    """The proof program as it is, with warnings as errors."""
    sources = [str(MODEL / "prove.cpp"), str(MODEL / "nic.cpp")]
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", *INCLUDES]
    made = made_by(["g++", *flags, *sources], "-o", "{}/prove")
    assert made.status == 0, made.said
    return made.folder / "prove"


def prove(program: Path, posts: int, seed: int) -> str:
    run = subprocess.run([str(program), str(posts), str(seed)], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout
    return run.stdout


@pytest.mark.long
@needs_compiler
def test_a_million_posts_with_every_wrap(program: Path) -> None:
    assert int(prove(program, 1_000_000, 1).split()[2]) >= 1_000_000


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("seed", range(2, 8))
def test_other_schedules(program: Path, seed: int) -> None:
    prove(program, 50_000, seed)


def test_every_header_of_the_device_side_has_mutants() -> None:
    places = [*(CSRC / "netstack").glob("*.h"), *(CSRC / "netstack" / "proxy").glob("*.h")]
    headers = {str(path.relative_to(CSRC)) for path in places if "LAMINA_HD" in path.read_text()}
    assert headers == {m.header for m in MUTANTS}


def test_there_are_mutants_of_every_kind() -> None:
    assert len(MUTANTS) >= 150
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)
    assert [m.function for m in FENCES] == ["order", "order", "commit", "commit"], "before the record and the doorbell"
    assert [m.function for m in ACQUIRES] == ["wait_signal", "poll_cq", "wait_slot_or_tell", "ring_on"], "all words"
    assert [m.function for m in RELEASES] == ["tell"], "all that publishes our memory without a fence"
    assert [m.function for m in NEAR] == ["give_back", "released_of", "released_of", "report_due", "tell"], (
        "what kernels of a GPU tell others"
    )
    assert [m.function for m in SCOPES] == ["order", "tell", "give_back", "order", "tell"], (
        "one less is wrong, one more counted"
    )
    assert set(mlx5_mutants.argued()) <= {m.name for m in MUTANTS}, "an argument about a mutant that is not made"


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("mutant", SAMPLE, ids=lambda m: f"{m.header.split('/')[1]}-{m.line}")
def test_a_mutant_is_noticed(proof: Proof, mutant: Mutant) -> None:
    assert proof.fate(mutant).startswith(("killed", "did not compile")), mutant.name


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_mutant_is_noticed_or_argued() -> None:
    assert mlx5_mutants.main([]) == 0
