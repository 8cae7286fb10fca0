"""Build the native module of the software NIC in place: ``python tests/soft_nic/setup.py build_ext --inplace``."""

from __future__ import annotations

import os
from pathlib import Path

from setuptools import Extension, setup

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

os.chdir(HERE.parent)  # sources are named from there, and the module lands next to them
setup(
    name="soft_nic",
    packages=["soft_nic"],
    ext_modules=[
        Extension(
            "soft_nic._native",
            sources=["soft_nic/native.cpp", "soft_nic/nic.cpp"],
            depends=[*map(str, HERE.glob("*.h")), *map(str, (ROOT / "csrc").rglob("*.h"))],
            include_dirs=[str(ROOT / "csrc"), "."],
            extra_compile_args=["-std=c++17", "-O3", "-g0", "-Wall", "-Wextra", "-fvisibility=hidden"],
            optional=True,
        )
    ],
    options={"build": {"build_base": str(ROOT / "build" / "soft_nic")}},
)
