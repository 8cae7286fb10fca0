"""The CUDA kernels with one mistake each: the emulation, or a comparison with fp64, notices every one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cuda_emulation import SMALL, EmulatedKernels, needs_gxx

from lamina.attention import get
from lamina.attention.cuda import Cuda
from lamina.attention.cuda_geometry import Variant, choose
from lamina.attention.cuda_kernels import CSRC, Argument

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "contract"))
import test_attention as contract

USUAL = choose("BFloat16", 72, 72, 4)
MUTANTS = [
    ("tensor.cuh", "wait<kStages - 2>();", "wait<kStages - 1>();"),
    ("tensor.cuh", "sync();  // everybody's part", "// everybody's part"),
    ("tensor.cuh", "stage == 0 ? kStages - 1 : stage - 1", "stage"),
    ("tensor.cuh", "words[i] = 0;", "words[i] = ~0u;"),
    ("tensor.cuh", "if (at < view.low || at >= view.high)", "if (at < view.low)"),
    ("tensor.cuh", "if (at < view.low || at >= view.high)", "if (at >= view.high)"),
    ("tensor.cuh", "a - to_float(T{u16(high)})", "0 * a"),
    (
        "tensor.cuh",
        "lane() / 16 * 8) * kValueRow + lane() / 8 % 2 * 8",
        "lane() / 8 % 2 * 8) * kValueRow + lane() / 16 * 8",
    ),
    ("tensor.cuh", "lane() % 16 * kKeyRow + lane() / 16 * 8", "lane() / 2 * kKeyRow + lane() % 2 * 8"),
    ("tensor.cuh", "transpose(high)", "high"),
    ("tensor.cuh", "mask = 4; mask < kLanes", "mask = 4; mask < 16"),
    ("tensor.cuh", "row_ = row_of(tile + 1);", ""),
    ("tensor.cuh", "node.o[2 * c + j][i] *= factor;", "node.o[2 * c + j][i] *= factor * factor;"),
    ("attend.cuh", "total *= factor;", ""),
    ("attend.cuh", "least(high, v.self + 1)", "high"),
    ("attend.cuh", "end < sequence.high ? int(end)", "end < 0 ? int(end)"),
    ("attend.cuh", "const i64 first = number - (work.task.node - base);", "const i64 first = number;"),
    ("partial.cuh", ", levels_ ^= 1u << level;", ";"),
    ("partial.cuh", "sibling < n", "sibling > n"),
    ("partial.cuh", "if (!second_to(", "if (second_to("),
    ("partial.cuh", "n << level > base || (n + 1) << level < base + count", "level < 1"),
    ("step.cuh", "position - s.origin", "position - 0 * s.origin"),
    ("step.cuh", "kv_head * group + query % group", "kv_head + query % group"),
]


def mutate(folder: Path, file: str, old: str, new: str) -> Path:
    """A copy of the sources with the mistake."""
    csrc = folder / "csrc"
    shutil.copytree(CSRC / "attention" / "cuda", csrc / "attention" / "cuda")
    path = csrc / "attention" / "cuda" / file
    text = path.read_text()
    assert old in text, f"{file} has changed: {old}"
    path.write_text(text.replace(old, new, 1))
    return csrc


class OneVariant(EmulatedKernels):
    """All kernels from the library of one variant: there is less to compile."""

    def launch(self, variant: Variant, name: str, blocks: int, arguments: tuple[Argument, ...]) -> None:
        super().launch(USUAL, name, blocks, arguments)


def verdict(csrc: Path) -> int:
    """0 if nothing is wrong with the kernels there. It may also end by SIGABRT."""
    spec = {"window": 500, "softcap": 3.0}
    case = contract.Case(((2900, 1), (900, 1), (5, 3), (0, 1)), contract.operator(4, 2, 72, **spec), torch.bfloat16)
    first = None
    for processors in (1, 20, 20):
        kernels = OneVariant(replace(SMALL, processors=processors), csrc)
        backend = Cuda(kernels, torch.device("cpu"), torch.bfloat16)
        for _ in range(2):  # counters are left as they were
            found = contract.run(backend, case)
            first = first or found
            if not contract.same(found, first):
                return 2
    assert first is not None
    out, stored, _ = first
    if out.isnan().any() or not contract.error(out, contract.oracle(case)) < 1e-2:
        return 3
    want = contract.run(get("reference", torch.device("cpu"), torch.bfloat16), case)[1]
    return 0 if float((stored.o - want.o).norm() / want.o.norm()) < 1e-5 else 4


def run(csrc: Path) -> int:
    command = [sys.executable, __file__, str(csrc)]
    return subprocess.run(command, capture_output=True, timeout=110, check=False).returncode


@needs_gxx
@pytest.mark.slow
def test_the_kernels_themselves_pass() -> None:
    assert run(CSRC) == 0


@needs_gxx
@pytest.mark.slow
@pytest.mark.parametrize(("file", "old", "new"), MUTANTS)
def test_a_mistake_is_noticed(tmp_path: Path, file: str, old: str, new: str) -> None:
    assert run(mutate(tmp_path, file, old, new)) in (2, 3, 4, -6, -11)


if __name__ == "__main__":
    sys.exit(verdict(Path(sys.argv[1])))
