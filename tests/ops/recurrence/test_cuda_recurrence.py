"""The CUDA kernel of recurrent layers: it assembles for every architecture we support, and run warp by warp on a CPU it
keeps the contract of tests/contract/test_recurrence.py. Nothing is run on a GPU.

Covers: lamina/ops/recurrence/cuda.py.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from compiled import made_by
from cuda_emulation import BUILD, GXX, HERE, needs_gxx
from cuda_emulation import FLAGS as EMULATION_FLAGS
from nvrtc import check_nvrtc
from recurrent import SPECS, cut, in_float64, make_layer, new_states, whole

from lamina.ops.recurrence.cuda import CSRC, FLAGS, INCLUDED, SOURCE, Argument, CudaRecurrence, open_backend, source
from lamina.ops.recurrence.parts import heads, history
from lamina.ops.recurrence.segments import Segment, Segments

NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
ROWS, PROMPT, BOUND = 11, 7, 1e-5


@cache
def library() -> ctypes.CDLL:
    """The kernel on a CPU. Kept under build/, by content."""
    digest = hashlib.sha256(repr(EMULATION_FLAGS).encode())
    for path in [SOURCE, INCLUDED, *sorted(HERE.glob("*.h")), HERE / "recurrence.cpp"]:
        digest.update(path.read_bytes())
    output = BUILD / f"{digest.hexdigest()[:32]}.so"
    if not output.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        ours = output.with_suffix(f".{os.getpid()}")  # others may build the same
        flags = [flag for flag in EMULATION_FLAGS if flag != "-DLAMINA_FTZ"]
        command = [str(GXX), *flags, f"-I{CSRC}", f"-I{HERE.parent}", str(HERE / "recurrence.cpp"), "-o", str(ours)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
        assert done.returncode == 0, done.stderr
        ours.replace(output)
    return ctypes.CDLL(str(output))


class EmulatedKernel:
    """The kernel, warp by warp."""

    def launch(self, blocks: int, shared_bytes: int, arguments: tuple[Argument, ...]) -> None:
        held = [np.array([x]) for x in arguments]
        library().emulate_recur(blocks, shared_bytes, (ctypes.c_void_p * len(held))(*(x.ctypes.data for x in held)))


def emulated() -> CudaRecurrence:
    return CudaRecurrence(EmulatedKernel(), torch.device("cpu"))


def error(found: torch.Tensor, right: np.ndarray) -> float:
    return float(np.abs(found.double().numpy() - right).max() / max(np.abs(right).max(), 1e-30)) if right.size else 0.0


@needs_gxx
@pytest.mark.parametrize("name", SPECS)
def test_it_computes_the_definition(name: str) -> None:
    layer, states = make_layer(SPECS[name], ROWS), new_states(SPECS[name], 1)
    segments = Segments.of([whole(ROWS, prompt=PROMPT)])
    out = emulated().update(layer.spec, layer.static, layer.inputs, segments, states)
    right = in_float64(layer, PROMPT)
    assert error(out, right.out) < BOUND
    assert error(history(layer.spec, states[0]), right.history) == 0
    assert error(heads(layer.spec, states[0]), right.state) < BOUND


@needs_gxx
@pytest.mark.parametrize("name", SPECS)
def test_chunks_and_other_sequences_change_no_bit(name: str) -> None:
    """A sequence at once, in chunks, and after another one, with a version that the same step continues."""
    spec, backend = SPECS[name], emulated()
    layer, at_once = make_layer(spec, ROWS), new_states(spec, 1)
    out = backend.update(spec, layer.static, layer.inputs, Segments.of([whole(ROWS, prompt=PROMPT)]), at_once)
    chunked, parts = new_states(spec, 2), torch.zeros_like(out)
    for step in cut([3, 1, 5, 2], PROMPT):
        some = backend.update(spec, layer.static, layer.inputs, step, chunked)
        parts[step.first[0] : step.first[0] + step.rows[0]] = some[step.first[0] : step.first[0] + step.rows[0]]
    assert torch.equal(parts, out)
    both = {n: torch.cat([t.flip(0), t]) for n, t in layer.inputs.items()}
    states = new_states(spec, 3)
    mixed = Segments.of([whole(ROWS, write=2), Segment(ROWS, 4, 4, -1, 0), Segment(ROWS + 4, 7, 3, 0, 1)])
    joined = backend.update(spec, layer.static, both, mixed, states)
    assert torch.equal(joined[ROWS:], out)
    for found in (chunked[1], states[1]):
        assert torch.equal(history(spec, found), history(spec, at_once[0]))
        assert torch.equal(heads(spec, found), heads(spec, at_once[0]))


@needs_gxx
def test_outputs_do_not_depend_on_the_default_dtype() -> None:
    layer, segments = make_layer(SPECS["lfm2"], ROWS), Segments.of([whole(ROWS)])
    due = emulated().update(layer.spec, layer.static, layer.inputs, segments, new_states(layer.spec, 1))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        states = torch.zeros(1, layer.spec.state_size, dtype=torch.float32)
        out = emulated().update(layer.spec, layer.static, layer.inputs, segments, states)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(out, due)


@needs_gxx
def test_states_of_other_dtypes_are_refused() -> None:
    layer, states = make_layer(SPECS["lfm2"], ROWS), new_states(SPECS["lfm2"], 1).double()
    with pytest.raises(ValueError, match="states are fp32 without gaps, not torch.float64"):
        emulated().update(layer.spec, layer.static, layer.inputs, Segments.of([whole(ROWS)]), states)


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="recurrence backend 'cuda' computes on NVIDIA GPUs, not on cpu"):
        open_backend(torch.device("cpu"))


def test_the_source_names_its_header() -> None:
    assert hashlib.sha256(INCLUDED.read_bytes()).hexdigest() in source()


@pytest.mark.long
@pytest.mark.skipif(NVCC is None, reason="no nvcc: install the CUDA toolkit")
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_it_assembles_and_nothing_spills(architecture: int) -> None:
    flags = [f"-arch=sm_{architecture}", *FLAGS, "-Werror", "all-warnings", "-Xptxas", "-v", "-cubin"]
    made = made_by([str(NVCC), *flags, str(SOURCE)], "-o", "{}/kernels.cubin")
    assert made.status == 0, made.said
    assert re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", made.said) == [("0", "0")]
    assert (Path(made.folder) / "kernels.cubin").stat().st_size


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_nvrtc_takes_what_cupy_gives_it(architecture: int) -> None:
    check_nvrtc(source(), architecture, FLAGS)
