"""Build of the native parts; everything else is declared in pyproject.toml."""

from collections.abc import Sequence
from glob import glob
from pathlib import Path
from platform import machine
from re import findall

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError


class BuildNative(build_ext):
    """Compiles as many native modules at once as the machine has cores."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or True

    def build_extensions(self) -> None:
        try:
            super().build_extensions()
        except CCompilerError:  # the compiler's own words are above
            name = self.compiler.compiler_so_cxx[0]
            fix = "install g++, or name another one by CC and CXX"
            raise SystemExit(f"Lamina needs a C++17 compiler, and {name} failed: {fix}") from None


def headers(*sources: str) -> list[str]:
    """Return our headers that ``sources`` include: only modules that use a header are built again with it."""
    found, new = set[Path](), [Path(source) for source in sources]
    while new:
        file = new.pop()
        named = findall(r'#include "(.*)"', file.read_text())
        there = {path for name in named for path in (Path("csrc", name), file.parent / name) if path.exists()}
        new += there - found
        found |= there
    return sorted(map(str, found))


def native(name: str, *sources: str, flags: Sequence[str] = ()) -> Extension:
    """Return a native module."""
    return Extension(
        name,
        sources=list(sources),
        depends=headers(*sources),
        include_dirs=["csrc"],
        # Of Python's own flags, -g takes two fifths of the time, for 16 MB, and -fwrapv 6 % of attention's speed.
        extra_compile_args=[
            "-std=c++17",
            "-O3",
            "-g0",
            "-fno-wrapv",
            "-Wall",
            "-Wextra",
            "-Werror=format-security",  # as Debian's Python has it
            "-fvisibility=hidden",
            *flags,
        ],
        optional=machine() != "x86_64",  # most of them are written for it: elsewhere, torch computes
    )


setup(
    cmdclass={"build_ext": BuildNative},
    ext_modules=[
        native("lamina.ops.attention._attention", *sorted(glob("csrc/attention/*.cpp"))),
        native("lamina.ops.gemm._gemm", *sorted(glob("csrc/gemm/*.cpp")), flags=["-ffp-contract=off"]),
        # A product and a sum are rounded one by one, as torch does; loops without errno and traps become vectors.
        native(
            "lamina.ops.rows._rows",
            *sorted(glob("csrc/rows/*.cpp")),
            flags=["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"],
        ),
        native(
            "lamina.ops.recurrence._recurrence",
            *sorted(glob("csrc/recurrence/*.cpp")),
            flags=["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"],
        ),
        native("lamina.workers.compute._compute", *sorted(glob("csrc/compute/*.cpp"))),
        native("lamina.workers.memory._memory", *sorted(glob("csrc/memory/*.cpp"))),
        native("lamina.ops.sampling._sampling", *sorted(glob("csrc/sampling/*.cpp")), flags=["-ffp-contract=off"]),
        native(
            "lamina.netstack.host._netstack",
            *sorted(glob("csrc/netstack/native*.cpp")),
            *sorted(glob("csrc/netstack/proxy/native*.cpp")),
            *sorted(glob("csrc/netstack/verbs/native*.cpp")),
        ),
    ],
)
