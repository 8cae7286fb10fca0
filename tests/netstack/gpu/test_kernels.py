"""The CUDA kernels compile for every architecture we support, and their instructions are the ones that order memory.

Nothing is run: that needs a GPU, and for the NIC's part a ConnectX."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from compiled import made_by

from lamina.netstack.cuda.driver import FLAGS, NVRTC_SIGNATURES, THREADS, compiled, load, nvrtc_names
from lamina.netstack.cuda.kernel_launches import COPY_BLOCKS, KERNELS_AT_ONCE

CSRC = Path(__file__).resolve().parents[3] / "csrc"
SOURCE = CSRC / "netstack" / "kernels" / "kernels.cu"
ARCHITECTURES = (80, 90, 100)
BEGUN = ("send", "receive", "send_all", "receive_all")  # calls of three launches where a message is long
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc: install the CUDA toolkit")


def nvcc(architecture: int) -> tuple[Path, str]:
    """(the machine code, the PTX that it was assembled from)."""
    flags = [f"-arch=sm_{architecture}", *FLAGS, "-Werror", "all-warnings", f"-I{CSRC}", "--keep"]
    made = made_by([str(NVCC), *flags, "-cubin", str(SOURCE)], "--keep-dir", "{}", "-o", "{}/out.cubin")
    assert made.status == 0, made.said
    return made.folder / "out.cubin", (made.folder / "kernels.ptx").read_text()


def kernels(ptx: str) -> dict[str, str]:
    """Name -> body."""
    parts = re.split(r"\.visible \.entry (\w+)\(", ptx)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.long
@needs_nvcc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_assemble_and_order_memory(architecture: int) -> None:
    code, ptx = nvcc(architecture)
    assert code.stat().st_size > 0
    bodies = kernels(ptx)
    names = {*KERNELS_AT_ONCE, "reserve", "put", "take", "release", "rounds"}
    memory, mlx5 = ({f"lamina_{link}_{name}" for name in names} for link in ("memory", "mlx5"))
    assert set(bodies) == {"lamina_mlx5_flush", "lamina_stamp"} | memory | mlx5
    copies = {"send_fill", "receive_drain", "send_all_fill", "receive_all_drain"}
    begins = {"reserve", "take", "due_begin", *(f"{call}_begin" for call in BEGUN)}
    for name in (f"lamina_memory_{name}" for name in names - copies - begins):
        for scope in ("sys", "gpu"):  # by where the peer's kernels are
            assert f"st.release.{scope}.global.u64" in bodies[name], "behind all stores and loads of the block"
    for body in bodies.values():
        assert "trap" not in body
        assert "ld.global.nc" not in body, "the read-only cache does not see a NIC's writes"
    for name in (
        f"lamina_memory_{name}" for name in names - copies - {"put", "release", *(f"{call}_end" for call in BEGUN)}
    ):
        assert "ld.acquire.sys.global.u64" in bodies[name], "signals and credit"
    for name in copies:
        body = bodies[f"lamina_mlx5_{name}"]
        assert not re.search(r"acquire|nanosleep|st\.(?:mmio|release)", body), "nothing waits"
        assert ("%ctaid.x" if "_all_" in name else "%nctaid.x") in body, "each block has a part"
    for name in (f"lamina_mlx5_{name}" for name in names - copies):
        body = bodies[name]
        assert "ld.acquire.sys.global.u64" in body, "signals and completions"
        assert "nanosleep.u32" in body
        assert "globaltimer" in body
        posts = not name.endswith(("take", "receive_begin", "receive_all_begin", "due_begin"))
        assert ("st.mmio.relaxed.sys.global.u64" in body) == posts
        fence = r"(?:membar|fence\.(?:sc|acq_rel))\.(gl|gpu|sys)\b"
        for doorbell in re.finditer(r"st\.mmio\.relaxed\.sys\.global\.u64", body):
            before = body[: doorbell.start()]
            scopes, fences = zip(*((m[1], m.end()) for m in re.finditer(fence, before)), strict=True)
            assert [scope == "sys" for scope in scopes[-4:]] == [False, True] * 2, "by where the ring lies"
            record = before[fences[-3] : fences[-2]]
            assert re.search(r"\bst\.(?:volatile\.|relaxed\.\w+\.)?(?:global\.)?[bu]32", record), "fence, record, fence"
            assert not re.search(r"\bst\.(?:global\.)?(?:v4\.)?[bu]", before[fences[-1] :]), "nothing behind the fence"


@pytest.mark.long
@needs_nvcc
def test_a_copy_has_64_kib_on_their_way() -> None:
    """The loads of a thread follow one another, and only then come the stores that wait for them."""
    _, ptx = nvcc(90)
    bodies = kernels(ptx)
    assert {int(n) for n in re.findall(r"\.maxntid (\d+)", ptx)} == {THREADS}, "registers for as many as are launched"
    names = "send", "send_two", "receive_due", "send_fill", "receive_drain"
    for name in (f"lamina_{link}_{name}" for link in ("memory", "mlx5") for name in names):
        ahead = longest_run(bodies[name], "v4.u32")
        assert ahead * 16 * THREADS == 1 << 16
        assert longest_run(bodies[name], "[bu]64") == ahead, "where places are aligned to 8 bytes alone"
    assert COPY_BLOCKS << 16 >= 450_000, "at a latency of 1 us, what NVLink 4 takes"


def longest_run(body: str, width: str) -> int:
    """Returns the longest run of loads of that type between which nothing of it is stored."""
    found = re.findall(rf"\b(ld\.global\.cg|st)(?:\.global)?\.{width}\b", body)
    return max(map(len, "".join("l" if x != "st" else "s" for x in found).split("s")))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nvrtc_takes_the_kernels(architecture: int) -> None:
    """The call is the one with which the product compiles them."""
    try:
        load(nvrtc_names(), NVRTC_SIGNATURES)
    except ImportError as error:
        pytest.skip(f"no NVRTC ({error}): pip install nvidia-cuda-nvrtc")
    assert compiled(architecture, tuple(nvrtc_names()))[:4] == b"\x7fELF"
