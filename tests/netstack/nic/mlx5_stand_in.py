"""A machine with a ConnectX that is not there: libibverbs and libmlx5 are the distribution's, fake_mlx5.cpp is their
kernel, and what a kernel says in files is in a folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import cuda_stand_in
import pytest
from compiled import made_by
from wiring import ROOT

from lamina.netstack.host._netstack import mlx5_fault

NODE, DEVICE = "1:5", "mlx5_0"  # of /dev/zero, which stands in for the device's node
FILES = {
    "class/infiniband_verbs/abi_version": "6",
    "class/infiniband_verbs/uverbs0/dev": NODE,
    "class/infiniband_verbs/uverbs0/ibdev": DEVICE,
    "class/infiniband_verbs/uverbs0/abi_version": "1",
    f"class/infiniband/{DEVICE}/node_type": "1: CA",
    f"class/infiniband/{DEVICE}/node_guid": "0000:0000:0000:0001",
    f"class/infiniband/{DEVICE}/device/modalias": "pci:v000015B3d00001021sv000015B3sd00000041bc02sc00i00",
    f"class/infiniband/{DEVICE}/device/vendor": "0x15b3",
    f"class/infiniband/{DEVICE}/ports/1/state": "4: ACTIVE",
    f"class/infiniband/{DEVICE}/ports/1/link_layer": "Ethernet",
    f"class/infiniband/{DEVICE}/ports/1/gids/0": "fe80:0000:0000:0000:0000:0000:0000:0001",
    f"class/infiniband/{DEVICE}/ports/1/gid_attrs/types/0": "RoCE v2",
    f"class/infiniband/{DEVICE}/ports/1/pkeys/0": "0xffff",
}
FLAGS = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests'}"]
LIBRARY = [
    str(Path(__file__).with_name("fake_mlx5.cpp")),
    str(ROOT / "tests/soft_nic/nic.cpp"),
    "-shared",
    "-fPIC",
]


def kernel() -> Path:
    """The library to preload. Skips where the headers or libmlx5 are missing."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    probe = ["g++", "-E", "-x", "c++", "-", "-o", "/dev/null"]
    text = "#include <infiniband/mlx5dv.h>\n#include <rdma/mlx5-abi.h>\n"
    if subprocess.run(probe, input=text, capture_output=True, text=True, timeout=60, check=False).returncode:
        pytest.skip("no infiniband/mlx5dv.h: install libibverbs-dev")
    if not list(Path("/etc/libibverbs.d").glob("mlx5.driver")):
        pytest.skip("no libmlx5: install ibverbs-providers")
    made = made_by(["g++", *FLAGS, *LIBRARY], "-o", "{}/libfake_mlx5.so")
    assert made.status == 0, made.said
    return made.folder / "libfake_mlx5.so"


def files(folder: Path) -> Path:
    """Writes the kernel's files about the machine, below ``folder``/sys."""
    for name, text in FILES.items():
        path = folder / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return folder / "sys"


def environment(folder: Path) -> dict[str, str]:
    """The environment of a process on that machine, whose GPU is a stand-in too.

    Skips where Lamina was built without the headers.
    """
    if "was built where" in mlx5_fault():
        pytest.skip("Lamina was built without infiniband/verbs.h: with libibverbs-dev, build it again")
    places = {
        "LD_PRELOAD": str(kernel()),
        "SYSFS_PATH": str(files(folder)),
        "MLX5_SHUT_UP_BF": "1",
        "FAKE_MLX5_SERVES": "1",
        "FAKE_MLX5_HAS_FIRMWARE": "1",
    }
    return os.environ | places | cuda_stand_in.environment()
