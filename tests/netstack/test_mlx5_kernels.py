"""The CUDA kernels compile for every architecture we support, and their instructions are the ones that order memory.

Nothing is run: that needs a GPU, and for the NIC's part a ConnectX."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
SOURCE = CSRC / "netstack" / "mlx5_kernels.cu"
ARCHITECTURES = (80, 90, 100)
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc: install the CUDA toolkit")


def nvcc(architecture: int, kind: str, output: Path) -> None:
    flags = [f"-arch=sm_{architecture}", "-std=c++17", "-Werror", "all-warnings", f"-I{CSRC}"]
    done = subprocess.run(
        [str(NVCC), *flags, kind, str(SOURCE), "-o", str(output)], capture_output=True, text=True, timeout=110,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def kernels(ptx: str) -> dict[str, str]:
    """Name -> body."""
    parts = re.split(r"\.visible \.entry (\w+)\(", ptx)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@needs_nvcc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_assemble(architecture: int, tmp_path: Path) -> None:
    nvcc(architecture, "-cubin", tmp_path / "kernels.cubin")
    assert (tmp_path / "kernels.cubin").stat().st_size > 0


@needs_nvcc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_memory_order_of_the_instructions(architecture: int, tmp_path: Path) -> None:
    nvcc(architecture, "-ptx", tmp_path / "kernels.ptx")
    bodies = kernels((tmp_path / "kernels.ptx").read_text())
    assert set(bodies) == {"lamina_mlx5_send", "lamina_mlx5_receive"}
    for body in bodies.values():
        assert "ld.acquire.sys.global.u64" in body, "signals and completions"
        assert "nanosleep.u32" in body
        assert "globaltimer" in body
        assert "trap" not in body
        assert "ld.global.nc" not in body, "the read-only cache does not see a NIC's writes"
        fence = r"(?:membar\.sys|fence\.(?:sc|acq_rel)\.sys)"
        for doorbell in re.finditer(r"st\.mmio\.relaxed\.sys\.global\.u64", body):
            before = body[: doorbell.start()]
            fences = [m.end() for m in re.finditer(fence, before)]
            record = before[fences[-2] : fences[-1]]
            assert re.search(r"\bst\.(?:volatile\.|relaxed\.\w+\.)?(?:global\.)?[bu]32", record), "fence, record, fence"
            assert not re.search(r"\bst\.(?:global\.)?(?:v4\.)?[bu]", before[fences[-1] :]), "nothing behind the fence"
        assert body.count("st.mmio.relaxed.sys.global.u64") >= 1
