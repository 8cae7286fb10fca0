"""Kernels take NVRTC eight seconds, and nvcc half a minute: what was compiled is kept, where nothing else can have
written it.

Covers: netstack/cached_file.py, netstack/cuda/kept_kernels.py, netstack/gin/compiler.py.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Callable
from pathlib import Path

import cuda_stand_in
import pytest

from lamina.netstack.cuda import driver
from lamina.netstack.cuda.kept_kernels import MOST_FILES, kept_image
from lamina.netstack.gin import compiler

NVCC = """#!/bin/sh
[ "$1" = --version ] && { cat "$0.version"; exit; }
echo compiled >> "$0.log"
for flag; do case "$flag" in -arch=*) printf 'kernels of %s' "$flag" > "$0.image";; esac; done
while [ "$1" != -o ]; do shift; done
cp "$0.image" "$2"
"""


class Nvcc:
    """A compiler that counts. ``version``: what it tells of itself."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "nvcc"
        self.path.write_text(NVCC)
        self.path.chmod(0o755)
        self.version = "release 13.0"

    @property
    def version(self) -> str:
        return self._version().read_text()

    @version.setter
    def version(self, text: str) -> None:
        self._version().write_text(text)

    @property
    def runs(self) -> int:
        log = self.path.with_name("nvcc.log")
        return len(log.read_text().splitlines()) if log.exists() else 0

    def _version(self) -> Path:
        return self.path.with_name("nvcc.version")


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nvcc:
    for name, value in cuda_stand_in.environment().items():
        monkeypatch.setenv(name, value)
    compiler = Nvcc(tmp_path)
    monkeypatch.setenv("LAMINA_NVCC", str(compiler.path))
    monkeypatch.setenv("LAMINA_CACHE", str(tmp_path / "cache"))
    return compiler


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "kernels").iterdir())


def test_the_second_start_compiles_nothing(nvcc: Nvcc, tmp_path: Path) -> None:
    for _ in range(3):
        assert compiler.build(90) == b"kernels of -arch=sm_90"
    assert nvcc.runs == 1
    (file,) = kept(tmp_path)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def compile_as_a_new_process(architecture: int) -> int:
    """Returns how often NVRTC compiled for it."""
    library = ctypes.CDLL(os.environ["LAMINA_LIBNVRTC"])
    before = int(library.fake_cuda_compilations())
    driver.compiled.cache_clear()
    assert driver.compiled(architecture, tuple(driver.nvrtc_names())) == b"image\0"
    return int(library.fake_cuda_compilations()) - before


def test_a_worker_that_starts_again_compiles_nothing(
    nvcc: Nvcc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fixture ``nvcc`` gives a cache of its own."""
    assert [compile_as_a_new_process(90) for _ in range(3)] == [1, 0, 0]
    assert compile_as_a_new_process(100) == 1, "an architecture has its own"
    assert len(kept(tmp_path)) == 2
    assert nvcc.runs == 0
    monkeypatch.setattr(driver, "FLAGS", (*driver.FLAGS, "-DOTHER"))
    assert compile_as_a_new_process(90) == 1
    monkeypatch.setenv("LAMINA_CACHE", "")
    assert [compile_as_a_new_process(90) for _ in range(2)] == [1, 1]


def _another_compiler(nvcc: Nvcc, patch: pytest.MonkeyPatch, folder: Path) -> None:
    nvcc.version = "release 13.1"


def _other_flags(nvcc: Nvcc, patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setenv("NVCC_APPEND_FLAGS", "-O1")


def _other_sources(nvcc: Nvcc, patch: pytest.MonkeyPatch, folder: Path) -> None:
    """A header of the kernels, not the file that is compiled."""
    (folder / "netstack").mkdir(parents=True)
    header = folder / "netstack" / "device.h"
    header.write_text("// as it was")
    patch.setattr(compiler, "CSRC", folder)
    assert compiler.build(90)
    header.write_text("// changed")


def _another_nccl(nvcc: Nvcc, patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Replaces the package at the same place."""
    headers = Path(os.environ["LAMINA_LIBNCCL"]).parents[1] / "include"
    there = folder / "include"
    there.mkdir(parents=True)
    for path in headers.iterdir():
        (there / path.name).write_bytes(path.read_bytes())
    patch.setattr(compiler, "header_folders", lambda: [there])
    assert compiler.build(90)
    (there / "nccl_device.h").write_text("// another version")


@pytest.mark.parametrize("change", [_another_compiler, _other_flags, _other_sources, _another_nccl])
def test_what_kernels_follow_from_is_their_name(
    change: Callable[[Nvcc, pytest.MonkeyPatch, Path], None],
    nvcc: Nvcc,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler.build(90)
    change(nvcc, monkeypatch, tmp_path / "changed")
    before = nvcc.runs
    compiler.build(90)
    assert nvcc.runs == before + 1
    assert compiler.build(100) == b"kernels of -arch=sm_100", "an architecture has its own"


def _cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _emptied(file: Path) -> None:
    file.write_bytes(b"")


def _one_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def _of_another_name(file: Path) -> None:
    """A whole file, of other kernels."""
    other = kept_image(file.parent, ["others"])
    other.write(b"other kernels")
    other.path.rename(file)


def _others_may_write(file: Path) -> None:
    file.chmod(0o620)


def _others_may_write_its_folder(file: Path) -> None:
    file.parent.chmod(0o770)


def _a_link(file: Path) -> None:
    elsewhere = file.parents[2] / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


def _no_file(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


@pytest.mark.parametrize(
    "spoil",
    [
        _cut_short, _emptied, _one_bit, _of_another_name, _others_may_write, _others_may_write_its_folder, _a_link,
        _no_file,
    ],
)  # fmt: skip
def test_what_is_torn_or_of_somebody_else_is_compiled_again(
    spoil: Callable[[Path], None], nvcc: Nvcc, tmp_path: Path
) -> None:
    compiler.build(90)
    (file,) = kept(tmp_path)
    spoil(file)
    assert compiler.build(90) == b"kernels of -arch=sm_90"
    assert nvcc.runs == 2


def test_a_file_of_another_user_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = kept_image(tmp_path / "kernels", ["facts"])
    place.write(b"image")
    assert place.read() == b"image"
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert place.read() is None


@pytest.mark.parametrize("folder", ["", "here"])
def test_nothing_is_kept_where_the_folder_says_so(folder: str, nvcc: Nvcc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMINA_CACHE", folder)
    compiler.build(90)
    compiler.build(90)
    assert nvcc.runs == 2


def test_a_folder_that_cannot_be_is_none(nvcc: Nvcc, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert compiler.build(90) == compiler.build(90) == b"kernels of -arch=sm_90"
    assert nvcc.runs == 2


def test_those_that_nobody_has_used_for_long_go(tmp_path: Path) -> None:
    places = [kept_image(tmp_path, [str(n)]) for n in range(MOST_FILES + 2)]
    tmp_path.chmod(0o700)
    (tmp_path / "not ours.cubin").touch()
    for n, place in enumerate(places[:-1]):
        place.write(b"image")
        if place.path.exists():
            os.utime(place.path, (n, n))
    assert places[1].read() == b"image", "it is used now"
    places[-1].write(b"image")
    there = [n for n, place in enumerate(places) if place.path.exists()]
    assert there == [1, *range(3, MOST_FILES + 2)]
    assert (tmp_path / "not ours.cubin").exists()
