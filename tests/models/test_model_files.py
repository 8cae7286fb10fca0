"""Ordinary directories of models pass the allow-list: in the hub's cache, by a link, and with paths of other hosts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lamina.models.errors import ModelError
from lamina.models.model_files import check_files
from lamina.models.tokenizer import load_tokenizer


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A model in the hub's cache, whose files are links to blobs."""
    place = tmp_path / "models--a--b/snapshots/0a1b"
    place.mkdir(parents=True)
    blobs = tmp_path / "models--a--b/blobs"
    blobs.mkdir()
    for name, content in {
        "config.json": {"model_type": "llama", "quantization_config": None},
        "tokenizer_config.json": {"tokenizer_file": "tokenizer.json", "vocab_file": None},
        "tokenizer.json": {},
    }.items():
        (blobs / name).write_text(json.dumps(content))
        (place / name).symlink_to(f"../../blobs/{name}")
    return place


def test_a_model_in_the_cache_of_the_hub_may_name_its_own_files(snapshot: Path) -> None:
    check_files(snapshot)


def test_a_link_to_a_model_in_the_cache_is_that_model(snapshot: Path, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(snapshot)
    check_files(tmp_path / "model")


def test_a_model_in_the_cache_may_be_the_current_directory(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(snapshot)
    check_files(Path())


def test_files_of_another_model_in_the_cache_are_refused(snapshot: Path, tmp_path: Path) -> None:
    secret = tmp_path / "models--c--d/blobs/secret"
    secret.parent.mkdir(parents=True)
    secret.write_text("{}")
    (snapshot / "vocab.json").symlink_to(secret)
    with pytest.raises(ModelError, match=r"vocab.json is a link to .*secret, outside of the model's directory"):
        check_files(snapshot)


def test_a_path_that_this_user_may_not_follow_is_nowhere(tmp_path: Path) -> None:
    """Tokenizers on hubs name paths of their makers' hosts, such as /root/.cache/tokenizer.json."""
    closed = tmp_path / "closed"
    closed.mkdir()
    (tmp_path / "model").mkdir()
    names = {"tokenizer_file": str(closed / "tokenizer.json"), "vocab_file": "v" * 300}
    (tmp_path / "model/tokenizer_config.json").write_text(json.dumps(names))
    (tmp_path / "model/vocab.json").symlink_to(closed / "vocab.json")
    closed.chmod(0)
    try:
        check_files(tmp_path / "model")
    finally:
        os.chmod(closed, 0o700)


def test_a_tokenizer_without_its_package_is_one(snapshot: Path) -> None:
    """The error names the package."""
    (snapshot / "tokenizer_config.json").unlink()
    (snapshot / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CpmTokenizer"}))
    with pytest.raises(ModelError, match=r"cannot be loaded: (?!.*no tokenizer)"):
        load_tokenizer(snapshot)
