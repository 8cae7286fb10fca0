"""The CUDA kernels with one mistake each: the emulation, or a comparison with fp64, notices every one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import test_attention as contract
import torch
from cuda_emulation import SMALL, EmulatedKernels, needs_gxx

from lamina.ops.attention import get
from lamina.ops.attention.cuda import CudaAttention
from lamina.ops.attention.cuda_geometry import Variant, choose
from lamina.ops.attention.cuda_kernels import CSRC, Argument

USUAL = {stored: choose("BFloat16", 72, 72, 4, stored) for stored in ("", "Fp8")}
MUTANTS = [
    ("tensor.cuh", "wait<kStages - 2>();", "wait<kStages - 1>();"),
    ("tensor.cuh", "sync();  // everybody's part", "// everybody's part"),
    ("tensor.cuh", "stage == 0 ? kStages - 1 : stage - 1", "stage"),
    ("tensor.cuh", "words[i] = 0;", "words[i] = ~0u;"),
    ("tensor.cuh", "at >= view.low && at < view.high", "at >= view.low"),
    ("tensor.cuh", "at >= view.low && at < view.high", "at < view.high"),
    ("tensor.cuh", "a - to_float(W{u16(high)})", "0 * a"),
    (
        "tensor.cuh",
        "lane() / 16 * 8) * kValueRow + lane() / 8 % 2 * 16",
        "lane() / 8 % 2 * 8) * kValueRow + lane() / 16 * 16",
    ),
    ("tensor.cuh", "lane() % 16 * kKeyRow + lane() / 16 * 16", "lane() / 2 * kKeyRow + lane() % 2 * 16"),
    ("tensor.cuh", "transpose(high)", "high"),
    ("tensor.cuh", "mask = 4; mask < kLanes", "mask = 4; mask < 16"),
    ("tensor.cuh", "row_ = row_of(tile + 1);", ""),
    ("tensor.cuh", "const int first = row_ - lane() % kTokens;", "const int first = row_;"),
    ("tensor.cuh", "source + i * kPiece, true", "source, true"),
    ("tensor.cuh", "(tile + 1) * kTokens <= high_", "true"),
    ("tensor.cuh", "tile * kTokens >= low_ && ", ""),
    ("tensor.cuh", "1 << work.call.step.block_shift >= kTokens", "true"),
    ("tensor.cuh", "least((chunk + 1) * kPerChunk, end)", "end"),
    ("tensor.cuh", "node.o[2 * c + j][i] *= factor;", "node.o[2 * c + j][i] *= factor * factor;"),
    ("attend.cuh", "total *= factor;", ""),
    ("attend.cuh", "least(high, v.self + 1)", "high"),
    ("attend.cuh", "end < sequence.high ? int(end)", "end < 0 ? int(end)"),
    ("attend.cuh", "take(call.taken, tasks)", "take(call.taken, tasks + 1)"),
    ("attend.cuh", "take(call.taken, tasks)", "take(call.taken, plan.tasks)"),
    ("attend.cuh", "blocks() + shuffle(next, 0)", "shuffle(next, 0)"),
    ("attend.cuh", "blocks() + shuffle(next, 0)", "blocks() + next"),
    ("attend.cuh", "const i64 first = number - (work.task.node - base);", "const i64 first = number;"),
    ("partial.cuh", ", levels_ ^= 1u << level;", ";"),
    ("partial.cuh", "sibling < n", "sibling > n"),
    ("partial.cuh", "if (!second_to(", "if (second_to("),
    ("partial.cuh", "n << level > base || (n + 1) << level < base + count", "level < 1"),
    ("step.cuh", "position - s.origin", "position - 0 * s.origin"),
    ("step.cuh", "kv_head * group + query % group", "kv_head + query % group"),
]
EIGHT_BITS = [
    ("stored.cuh", "x << 4 & 0x87f087f0", "x << 3 & 0x87f087f0"),
    ("stored.cuh", "x << 4 & 0x87f087f0", "x << 4 & 0x07f007f0"),
    ("stored.cuh", "x << 4 & 0x87f087f0", "x << 4 & 0xfff0fff0"),
    ("stored.cuh", "x << 4 & 0x87f087f0", "x << 4 & 0x87ff87ff"),
    ("stored.cuh", "0x7b807b80", "0x7b007b00"),
    ("stored.cuh", "0x8080 | kFirst << 4 | kSecond << 12", "0x8080 | kFirst << 4 | kFirst << 12"),
    ("stored.cuh", "? signs : zeros", "? zeros : signs"),
    ("tensor.cuh", "i / 2 * 16 + lane() % 4 * 4 + i % 2 * 2", "i * 8 + lane() % 4 * 2"),
    ("tensor.cuh", "i / 2 * 16 + lane() / 4 * 2 + i % 2 :", "i * 8 + lane() / 4 :"),
    ("tensor.cuh", "loaded[2 * half], far = loaded[2 * half + 1]", "loaded[half], far = loaded[2 + half]"),
    ("tensor.cuh", "loaded[half], far = loaded[2 + half]", "loaded[2 * half], far = loaded[2 * half + 1]"),
    ("tensor.cuh", "widen<W, S, 1, 3>(near)", "widen<W, S, 2, 3>(near)"),
    ("tensor.cuh", "lane() < kTokens ? work_.call.k_scale : work_.call.v_scale", "work_.call.k_scale"),
    ("tensor.cuh", "scales[kTokens + lane() / 4 + 8 * h]", "scales[kTokens + lane() / 4]"),
    ("tensor.cuh", "score[2 * h + j] * scales[token]", "score[2 * h + j] * scales[lane() / 4]"),
    ("tensor.cuh", "copy<4>(", "if (lane() < kTokens) copy<4>("),
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
        super().launch(USUAL[variant.stored], name, blocks, arguments)


def verdict(csrc: Path, stored_as: str) -> int:
    """0 if nothing is wrong with the kernels there. It may also end by SIGABRT."""
    store = torch.float8_e4m3fn if stored_as else None
    op = contract.operator(4, 2, 72, window=500, softcap=3.0)
    case = contract.Case(((2900, 1), (900, 1), (5, 3), (0, 1)), op, torch.bfloat16, store=store)
    in_blocks_of_8 = replace(case, block_size=8)  # a tile of tokens lies in two
    first = None
    for processors in (1, 20, 20):
        kernels = OneVariant(replace(SMALL, processors=processors), csrc)
        backend = CudaAttention(kernels, torch.device("cpu"), torch.bfloat16, store)
        for _ in range(2):  # counters are left as they were
            found = contract.run(backend, case)
            first = first or found
            if not contract.same(found, first):
                return 2
    assert first is not None
    smaller = contract.run(
        CudaAttention(OneVariant(SMALL, csrc), torch.device("cpu"), torch.bfloat16, store), in_blocks_of_8
    )
    if not contract.same(smaller, first):
        return 5
    out, stored, _ = first
    if out.isnan().any() or not contract.error(out, contract.oracle(case)) < 1e-2:
        return 3
    want = contract.run(get("reference", torch.device("cpu"), torch.bfloat16, store), case)[1]
    return 0 if float((stored.o - want.o).norm() / want.o.norm()) < 1e-5 else 4


def run(csrc: Path, stored_as: str) -> int:
    command = [sys.executable, __file__, str(csrc), stored_as]
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # of modules that tests share
    return subprocess.run(command, capture_output=True, timeout=110, check=False, env=paths).returncode


@needs_gxx
@pytest.mark.slow
@pytest.mark.parametrize("stored_as", USUAL)
def test_the_kernels_themselves_pass(stored_as: str) -> None:
    assert run(CSRC, stored_as) == 0


@needs_gxx
@pytest.mark.slow
@pytest.mark.parametrize(
    ("stored_as", "file", "old", "new"), [*(("", *m) for m in MUTANTS), *(("Fp8", *m) for m in EIGHT_BITS)]
)
def test_a_mistake_is_noticed(tmp_path: Path, stored_as: str, file: str, old: str, new: str) -> None:
    assert run(mutate(tmp_path, file, old, new), stored_as) in (2, 3, 4, 5, -6, -11)


if __name__ == "__main__":
    sys.exit(verdict(Path(sys.argv[1]), sys.argv[2]))
