"""The CUDA kernels compile for every architecture we support, by nvcc and NVRTC, to the instructions they are about.

Nothing is run: that needs a GPU (perf/gpu_suite.py)."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from compiled import made_by
from nvrtc import check_nvrtc

from lamina.ops.attention.cuda_geometry import Variant, choose
from lamina.ops.attention.cuda_kernels import SOURCES, options, source

ARCHITECTURES = (80, 90, 100)
OTHERS = (86, 89, 103, 110, 120, 121)  # that the product would compile for too
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc: install the CUDA toolkit")
NAMES = ("plan", "attend", "merge", "close", "append")
USUAL = choose("BFloat16", 128, 128, 4)
QUICK = [USUAL, Variant(element="float"), choose("Half", 128, 128, 64), choose("BFloat16", 128, 128, 4, "Fp8")]


def variants() -> list[Variant]:
    """Returns the variants that ``choose`` has for bf16: heads of many widths, few queries and many; and some of
    everything else.
    """
    stores, both = ("", "Int8", "Fp8"), (4, 64)
    dims = [(d, d) for d in (64, 72, 80, 96, 112, 120, 128, 136, 160, 192, 224, 256)] + [(72, 80), (192, 128)]
    bf16 = [choose("BFloat16", *dim, n, stored) for dim in dims for n in both for stored in stores]
    fp16 = [choose("Half", dim, dim, n, stored) for dim in (64, 128, 256) for n in both for stored in stores]
    plain = [Variant(element=element, stored=stored) for element in ("float", "BFloat16", "Half") for stored in stores]
    return [x for x in dict.fromkeys(bf16 + fp16 + plain) if x not in QUICK]


def nvcc(variant: Variant, architecture: int, name: str) -> tuple[Path, str]:
    """Compile to what the suffix of ``name`` says: the file, and what the compiler prints."""
    flags = [f"-arch=sm_{architecture}", *options(variant), "-Werror", "all-warnings", "-Xptxas", "-v"]
    command = [str(NVCC), *flags, f"-{Path(name).suffix[1:]}", str(SOURCES / "kernels.cu")]
    made = made_by(command, "-o", f"{{}}/{name}")
    assert made.status == 0, made.said
    return made.folder / name, made.said


def bodies(ptx: str) -> dict[str, str]:
    """Kernel -> PTX."""
    parts = re.split(r"\.visible \.entry lamina_(\w+)\(", ptx)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.long
@needs_nvcc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("variant", QUICK, ids=str)
def test_kernels_assemble_and_nothing_spills(variant: Variant, architecture: int) -> None:
    _, said = nvcc(variant, architecture, "kernels.cubin")
    spilled = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert spilled == [("0", "0")] * len(NAMES)


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("variant", variants(), ids=str)
def test_nothing_spills_in_any_variant(variant: Variant, architecture: int) -> None:
    test_kernels_assemble_and_nothing_spills(variant, architecture)


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("architecture", OTHERS)
@pytest.mark.parametrize("variant", QUICK, ids=str)
def test_nothing_spills_on_other_gpus(variant: Variant, architecture: int) -> None:
    test_kernels_assemble_and_nothing_spills(variant, architecture)


@needs_nvcc
def test_instructions() -> None:
    ptx, _ = nvcc(USUAL, 90, "kernels.ptx")
    found = bodies(ptx.read_text())
    assert set(found) == set(NAMES)
    attend = found["attend"]
    assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in attend
    assert "cp.async.cg.shared.global.L2::128B" in attend
    assert "ldmatrix.sync.aligned.m8n8.x4.trans" in attend
    assert "movmatrix.sync.aligned.m8n8.trans" in attend
    copied = re.split(r"cp\.async\.cg", attend)
    between = ["shfl" in part or "ld.global" in part for part in copied]
    assert re.search("0{15}", "".join(str(int(x)) for x in between)), "a tile of a block: one address, 16 copies"
    taken, meeting = (x.start() for x in re.finditer(r"atom\.global\.inc\.u32", attend))
    assert re.search(r"(membar|fence)[\w.]*", attend[taken:meeting]), "what is saved comes before the meeting"
    fence = re.compile(r"(membar|fence)[\w.]*").search(attend, meeting)
    assert fence, "and is read after it"
    read = attend.index("ld.global.cg", fence.end())  # past L1, which may hold what was there before
    assert "bar.warp.sync" in attend[fence.end() : read], "by lanes that the one which met the other warp has told"
    assert "ld.global.nc" not in attend, "nor through the read-only cache"
    assert not any("trap" in body or "bar.sync" in body for body in found.values()), "blocks are single warps"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("variant", [USUAL, Variant(element="Half"), QUICK[-1]], ids=str)
def test_nvrtc_takes_what_cupy_gives_it(variant: Variant, architecture: int) -> None:
    check_nvrtc(source(), architecture, options(variant))


def test_the_source_names_its_headers() -> None:
    """CuPy finds a compiled kernel on disk by its text: a change of a header must change it."""
    text = source()
    assert re.match(r"// with headers [0-9a-f]{64}\n", text)
    assert "lamina_attend" in text
