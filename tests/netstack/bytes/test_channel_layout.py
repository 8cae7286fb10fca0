"""Python fills and reads a channel's struct as the headers lay it out, and follows them where they change."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
from programs import ROOT, build, run

from lamina.netstack.contract.struct_layout import StructLayout

MODULES = {"memory": "lamina.netstack.host._netstack", "mlx5": "soft_nic._native"}
Told = dict[str, tuple[int, dict[str, tuple[int, int]]]]


def told(program: Path) -> Told:
    """Returns the layout that the headers of ``program`` print: the bytes and fields of each struct, as in
    ``channel_layout``.
    """
    found: Told = {}
    for words in map(str.split, run(program).splitlines()):
        if len(words) == 2:
            fields: dict[str, tuple[int, int]] = {}
            found[words[0]] = int(words[1]), fields
        else:
            fields[words[0]] = int(words[1]), int(words[2])
    return found


def changed(to: Path) -> Path:
    """csrc/netstack with the fields of both structs in another order, and new ones between them."""
    shutil.copytree(ROOT / "csrc" / "netstack", to / "netstack")
    for header, moved, behind in (
        ("device.h", r"  u64 zero;.*\n", r"  u64 granted, published, credited;\n"),
        ("device.h", r"  Slots out, in;\n", r"  u64 received, released, reported;\n"),
        ("mlx5.h", r"  u32 number; .*\n", r"  u64 polled; .*\n"),
    ):
        path = to / "netstack" / header
        text = path.read_text()
        (line,) = re.findall(moved, text)
        text = text.replace(line, "", 1)
        text, count = re.subn(f"({behind})", lambda m, line=line: f"{m[1]}  u32 another_{len(line)};\n{line}", text)
        assert count == 1, behind
        path.write_text(text)
    return to


def check(program: Path, layouts: Told) -> None:
    """The program reads from each field the value that Python has put there, and from no other."""
    for name, (nbytes, fields) in layouts.items():
        values = {field: 0x1234567 + 1000003 * n for n, field in enumerate(fields)}
        data = StructLayout(nbytes, fields).pack(values)
        done = subprocess.run([program, name], input=data, capture_output=True, timeout=20, check=True)
        assert {k: int(v) for k, v in map(str.split, done.stdout.decode().splitlines())} == values
        assert StructLayout(nbytes, fields).unpack(data) == values


def test_python_follows_the_headers(tmp_path: Path) -> None:
    source = Path(__file__).with_name("layout_check.cpp")
    (tmp_path / "now").mkdir()
    now = build(tmp_path / "now", source)
    other = build(tmp_path, source, headers=changed(tmp_path))
    assert {name: fields.keys() for name, (_, fields) in told(now).items()} == {
        name: fields.keys() for name, (_, fields) in told(other).items()
    }
    assert all(told(now)[name] != told(other)[name] for name in MODULES)
    for program in (now, other):
        check(program, told(program))


@pytest.mark.parametrize("name", MODULES)
def test_native_modules_tell_every_field(name: str, tmp_path: Path) -> None:
    """Fields fill the struct, but for what aligns them, and are those of the headers."""
    try:
        nbytes, fields = import_module(MODULES[name]).channel_layout()
    except ImportError as error:
        pytest.skip(str(error))
    places = sorted(fields.values())
    for (offset, size), (following, _) in zip(places, [*places[1:], (nbytes, 0)], strict=True):
        assert offset + size <= following < offset + size + 8, f"no field between {offset + size} and {following}"
    assert (nbytes, fields) == told(build(tmp_path, Path(__file__).with_name("layout_check.cpp")))[name]


def test_a_field_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="no field granted; it has zero"):
        StructLayout(8, {"zero": (0, 8)}).pack({"granted": 1})
