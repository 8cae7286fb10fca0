"""Whose KV a checkpoint's is: any other byte of its files is another model."""

from __future__ import annotations

import os
from pathlib import Path

from lamina.utils.build_info import digest_of
from lamina.workers.compute.kv_identity import files_digest


def test_another_byte_anywhere_is_another_model_and_another_time_is_not(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(3 << 20))
    (tmp_path / "config.json").write_text("{}")
    first = files_digest(tmp_path)
    os.utime(weights, ns=(5, 5))
    assert files_digest(tmp_path) == first, "a copy is the same model"
    for at in (0, (1 << 20) + 77, (3 << 20) - 1):
        with weights.open("r+b") as file:
            file.seek(at)
            file.write(b"\x01")
        os.utime(weights, ns=(5, 5))
        changed = files_digest(tmp_path)
        assert changed != first
        first = changed
    (tmp_path / "modeling.py").write_text("x = 1")
    assert files_digest(tmp_path) != first, "code of its own is a part of it"


def test_another_byte_of_the_code_or_another_instruction_is_another_build(tmp_path: Path) -> None:
    room = tmp_path / "elsewhere"
    room.mkdir()
    package = tmp_path / "package"
    package.mkdir()
    (package / "room").symlink_to(room)
    (room / "_native.so").write_bytes(bytes(100))
    (package / "a.py").write_text("x = 1")
    found = [digest_of(package, "avx2")]
    (package / "notes.txt").write_text("nobody runs it")
    assert digest_of(package, "avx2") == found[0]
    (room / "_native.so").write_bytes(bytes(99) + b"\x01")
    found.append(digest_of(package, "avx2"))
    (package / "a.py").write_text("x = 2")
    found.append(digest_of(package, "avx2"))
    (package / "a.py").rename(package / "b.py")
    found.append(digest_of(package, "avx2"))
    found.append(digest_of(package, "avx2 fma"))
    assert len(set(found)) == len(found)


def test_a_gguf_file_is_known_by_its_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    first.write_bytes(b"GGUF one")
    second.write_bytes(b"GGUF two")
    assert files_digest(first) != files_digest(second)
