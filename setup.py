"""Build of the native parts; everything else is declared in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "lamina.netstack._native",
            sources=["csrc/netstack/native.cpp"],
            depends=["csrc/netstack/ring.h"],
            extra_compile_args=["-std=c++17", "-O3", "-Wall", "-Wextra", "-fvisibility=hidden"],
            optional=True,  # without a compiler the install goes on; selecting shm then raises with the cause
        )
    ]
)
