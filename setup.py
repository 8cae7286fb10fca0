"""Build of the native parts; everything else is declared in pyproject.toml."""

from collections.abc import Sequence
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class BuildNative(build_ext):
    """Compiles as many native modules at once as the machine has cores."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or True


def native(name: str, *sources: str, flags: Sequence[str] = ()) -> Extension:
    """A native module. Without a compiler the install goes on; selecting what needs the module raises with the
    cause.
    """
    return Extension(
        name,
        sources=list(sources),
        depends=glob("csrc/**/*.h", recursive=True),
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
        optional=True,
    )


setup(
    cmdclass={"build_ext": BuildNative},
    ext_modules=[
        native("lamina.attention._native", *sorted(glob("csrc/attention/*.cpp"))),
        native("lamina.gemm._native", *sorted(glob("csrc/gemm/*.cpp"))),
        # A product and a sum are rounded one by one, as torch does; loops without errno and traps become vectors.
        native(
            "lamina.rows._native",
            *sorted(glob("csrc/rows/*.cpp")),
            flags=["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"],
        ),
        native("lamina.compute._native", *sorted(glob("csrc/compute/*.cpp"))),
        native("lamina.memory._native", *sorted(glob("csrc/memory/*.cpp"))),
        native("lamina.sampling._native", *sorted(glob("csrc/sampling/*.cpp")), flags=["-ffp-contract=off"]),
        native(
            "lamina.netstack.host._native",
            *sorted(glob("csrc/netstack/native*.cpp")),
            *sorted(glob("csrc/netstack/proxy/native*.cpp")),
            *sorted(glob("csrc/netstack/verbs/native*.cpp")),
        ),
    ],
)
