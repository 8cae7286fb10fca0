"""lamina-launch kv stat|verify|purge."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import closing
from pathlib import Path

import pytest

from lamina.cli.launch import main
from lamina.kv.disk_store.store_directory import StoreDirectory, begin_era, store_secret
from lamina.kv.page_keys import tenant_tag
from lamina.kv.pages import PAGE, Page, PageFragment, Provenance
from lamina.kv.storage import FragmentLostError, StorageConfig
from lamina.kv.storage.file import FileStorage
from lamina.server.tenants import salt_of

DATA = {PageFragment(layer, head): bytes([layer, head]) * 3000 for layer in range(2) for head in range(2)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with a page each of API key "a" and of a server without keys; that of "a" is not encrypted."""
    path = tmp_path / "kv"
    for number, tenant in enumerate(("a", "")):
        with closing(opened(path, encrypt=tenant != "a")) as medium:
            medium.write(page(path, number, tenant), DATA)
    return path


def opened(path: Path, *, encrypt: bool = True) -> FileStorage:
    return FileStorage(StorageConfig(1 << 20, b"i" * 32, directory=str(path), server="one", encrypt=encrypt))


def page(path: Path, number: int, tenant: str) -> Page:
    return Page(
        bytes([number]) * 32,
        number,
        PAGE,
        tenant_tag(secret_of(path), salt_of(key_id(tenant), None)),
        Provenance("prompt"),
    )


def key_id(api_key: str) -> bytes:
    return hashlib.sha256(api_key.encode()).digest() if api_key else b""


def secret_of(path: Path) -> bytes:
    with closing(StoreDirectory(str(path))) as folder:
        return store_secret(folder)


def there(path: Path) -> list[int]:
    """The pages that can be read."""
    found = []
    with closing(opened(path)) as medium:
        for held in medium.pages():
            into = {fragment: bytearray(6000) for fragment in DATA}
            try:
                medium.read(held.page.key, into)
            except FragmentLostError:
                continue
            assert into == DATA
            found.append(held.page.number)
    return found


def test_stat(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(opened(path)):  # a server may have it open
        assert main(["kv", "stat", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    tags = {page(path, 0, name).tenant.hex() for name in ("a", "")}
    assert {each["tenant"] for each in found["stored"]} == tags
    assert [(each["pages"], each["bytes"], each["model"]) for each in found["stored"]] == [(1, 24_576, "69" * 8)] * 2
    sizes = [file.stat().st_size for file in path.glob("segment-*")]
    assert (found["segments"], found["bytes"]) == (len(sizes), sum(sizes))
    assert main(["kv", "stat", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["model", "tenant", "pages", "on", "disk"]
    assert [line.split()[2:] for line in lines[1:3]] == [["1", "24.6", "kB"]] * 2
    assert lines[3] == f"{len(sizes)} segments, {sum(sizes) / 1000:.1f} kB"


def test_verify(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv", "verify", str(path)]) == 0
    assert capsys.readouterr().out == "2 pages are whole, 0 are damaged\n"
    with min(path.glob("segment-*")).open("r+b") as file:
        file.seek(7000)
        file.write(b"!")
    assert main(["kv", "verify", str(path)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "page 0000000000000000: 1 fragments are damaged, the first: layer 1, head 0",
        "1 pages are whole, 1 are damaged",
    ]  # fmt: skip


def test_purge_of_a_tenant(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = path / f"key-{page(path, 0, 'a').tenant.hex()}"
    assert DATA[PageFragment(1, 1)] in min(path.glob("segment-*")).read_bytes()
    assert main(["kv", "purge", str(path), "--tenant", key_id("a").hex()]) == 0
    assert capsys.readouterr().out == "purged 1 pages of the tenant, and its data key\n"
    assert not key.exists()
    assert not any(DATA[PageFragment(1, 1)] in file.read_bytes() for file in path.iterdir()), (
        "not encrypted: overwritten"
    )
    assert there(path) == [1]
    assert main(["kv", "purge", str(path), "--tenant", key_id("a").hex()]) == 2
    assert "it has nothing of this tenant under this secret" in capsys.readouterr().err
    assert main(["kv", "purge", str(path), "--tenant", "a"]) == 2
    assert "--tenant: give the 64 hex digits of the SHA-256 of an API key" in capsys.readouterr().err
    assert main(["kv", "purge", str(path), "--tenant", ""]) == 0
    assert there(path) == []


def test_dry_runs_change_nothing(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for action in ("verify", "purge"):
        assert main(["kv", action, str(path), "--dry-run"]) == 0
        assert "24.6 kB" in capsys.readouterr().out
    assert there(path) == [0, 1]
    assert main(["kv", "stat", str(path), "--tenant", "a"]) == 2
    assert "--tenant needs kv purge, because " in capsys.readouterr().err


def test_purge(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = secret_of(path)
    with closing(opened(path)):
        assert main(["kv", "purge", str(path)]) == 2
    assert "another server has it open" in capsys.readouterr().err
    (path / "index.db").write_bytes(b"damaged" * 1000)
    with closing(StoreDirectory(str(path))) as folder:
        begin_era(folder)
    assert main(["kv", "purge", str(path)]) == 0
    assert [file.name for file in path.iterdir()] == ["lock"]
    assert there(path) == []
    assert secret_of(path) != secret


def test_what_is_no_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir(0o700)
    (tmp_path / "open").mkdir(0o755)
    for action, path, text in (
        ("stat", "empty", "no KV store is there"), ("verify", "empty", "no KV store is there"),
        ("stat", "none", "No such file or directory"), ("purge", "none", "No such file or directory"),
        ("stat", "open", "no KV store is there"), ("verify", "open", "no KV store is there"),
    ):  # fmt: skip
        assert main(["kv", action, str(tmp_path / path)]) == 2
        err = capsys.readouterr().err
        assert f"DIR {tmp_path / path}: {text}" in err
        assert "kv DIR" not in err
        assert "chmod" not in err
        assert err.count("\n") == 1
    assert os.listdir(tmp_path / "empty") == []
    (tmp_path / "empty" / "mine.txt").touch()
    assert main(["kv", "purge", str(tmp_path / "empty")]) == 2
    assert "no KV store is there" in capsys.readouterr().err
    assert os.listdir(tmp_path / "empty") == ["mine.txt"]
