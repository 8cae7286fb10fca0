"""The command that installs a missing package: with the range of pyproject.toml, and never by Lamina's own name."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import tomllib
from pathlib import Path

import pytest
from shipped import ROOT

from lamina.cli.launch import main
from lamina.cli.serve import NEEDS
from lamina.executor.launchers import zygote_client
from lamina.models.quantization import gguf_file
from lamina.utils.install_command import install_command


def extras() -> dict[str, list[str]]:
    table = tomllib.loads((Path(ROOT) / "pyproject.toml").read_text())
    return dict(table["project"]["optional-dependencies"])


def test_it_has_the_range_of_pyproject() -> None:
    (gguf,), (ray, yaml) = extras()["gguf"], extras()["ray"]
    assert install_command("gguf") == f"pip install '{gguf}'"
    assert install_command("ray", "pyyaml") == f"pip install '{ray}' '{yaml}'"


def test_without_metadata_it_has_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", fail)
    assert install_command("gguf") == "pip install 'gguf'"


def test_no_message_has_a_name_that_may_be_a_strangers() -> None:
    assert [path for path in (Path(ROOT) / "lamina").rglob("*.py") if "lamina[" in path.read_text()] == []


def test_packages_that_serve_needs_are_of_its_extra() -> None:
    assert all(any(text.startswith(f"{name}>=") for text in extras()["serve"]) for name in NEEDS)


def test_a_missing_gguf_is_noticed_before_any_worker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(gguf_file, "find_spec", lambda name: None if name == "gguf" else find(name))
    monkeypatch.setattr(zygote_client, "START", None)
    path = str(Path(ROOT) / "tests/checkpoints/llama_q8_0.gguf")
    for command in (["generate", path, "--prompt", "x"], ["serve", path, "--port", "0"]):
        assert main(command) == 2
        said = f"{path} is GGUF, which needs the package gguf: {install_command('gguf')}"
        assert capsys.readouterr().err == f"lamina-launch {command[0]}: {said}\n"
