"""Captures that are kept: whose they are, who may have written them, and when none are kept."""

from __future__ import annotations

import fcntl
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from lamina.converter import ConversionError
from lamina.models import capture_cache
from lamina.models.attention_routing import WeightShard
from lamina.models.capture_cache import CaptureCache, capture_directory, capture_file
from lamina.models.convert import PROOF_TEXT, convert_model
from lamina.models.errors import UnsupportedModelError
from lamina.models.load import load

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAMINA_CACHE", str(tmp_path))
    return tmp_path / "captures"


def llama(**options: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, **options})).eval()


def place(model: nn.Module, **facts: object) -> Path:
    found = capture_file(model, **facts)
    assert found is not None
    return found.path


@pytest.mark.long
def test_a_model_of_the_same_configuration_finds_the_capture(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    first = convert_model(llama(), max_model_len=64, keep=True)
    assert len(list(folder.iterdir())) == 1
    monkeypatch.setattr(sys.modules["lamina.converter.convert"], "capture", None)  # nothing is traced again
    model = llama()  # of other weights
    again = convert_model(model, max_model_len=64, keep=True)
    assert [s.code for s in again] != []
    assert [list(s.weights) for s in again] == [list(s.weights) for s in first]
    assert again.slices[0].weights["model.model.embed_tokens.weight"] is model.model.embed_tokens.weight


@pytest.mark.long
def test_what_was_shown_with_weights_of_these_files_is_not_shown_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, run = tmp_path / "model", list[str]()
    llama().save_pretrained(path)
    checks = {"check_layers": "lamina.models.convert", "check_rows_by_running": "lamina.converter.convert"}
    for name, module in checks.items():
        right = getattr(sys.modules[module], name)

        def note(*args: Any, name: str = name, right: Callable[..., Any] = right) -> Any:
            run.append(name)
            return right(*args)

        monkeypatch.setattr(sys.modules[module], name, note)

    def shown(**options: Any) -> list[str]:
        run.clear()
        loaded = load(path)
        program = convert_model(loaded.model, **{"max_model_len": 64, "keep": True, "stamps": loaded.stamps, **options})
        assert program.rows == "numeric"
        return list(run)

    both = list(checks)
    assert shown() == both
    assert shown() == []
    assert shown(stamps=()) == both, "a module may have other weights"
    assert shown(max_model_len=32) == both
    assert shown(deterministic=True) == both
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    assert shown() == both, "who has written to a file has changed it"
    assert shown() == []


@pytest.mark.long
def test_what_could_not_be_shown_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama().save_pretrained(tmp_path / "model")

    def coupled(*args: Any) -> bool:
        raise ConversionError("coupled")

    monkeypatch.setattr(sys.modules["lamina.converter.convert"], "check_rows_by_running", coupled)
    for _ in range(2):
        loaded = load(tmp_path / "model")
        with pytest.raises(UnsupportedModelError, match="coupled"):
            convert_model(loaded.model, max_model_len=64, keep=True, stamps=loaded.stamps)


@contextmanager
def under_way(path: Path) -> Iterator[None]:
    """Acts as if another process made what is to lie there."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with open(path.with_suffix(".turn"), "wb") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield


def test_of_processes_that_lack_a_capture_at_once_one_makes_it(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    path, waits = place(llama(), max_model_len=64, experts="grouped_mm", part=WeightShard()), threading.Event()
    wanted = convert_model(llama(), max_model_len=64, keep=True)
    assert list(folder.iterdir()) == [path], "nobody is made to wait from now on"
    text = path.read_bytes()
    path.unlink()
    slow = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: (waits.set(), time.sleep(seconds)))
    monkeypatch.setattr(capture_cache, "time", slow)
    with ThreadPoolExecutor(1) as beside:
        with under_way(path):
            late = beside.submit(convert_model, llama(), max_model_len=64, keep=True)
            assert waits.wait(60)
            monkeypatch.setattr(sys.modules["lamina.converter.convert"], "capture", None)
            path.write_bytes(text)
            path.chmod(0o600)
        assert [s.code for s in late.result(60)] == [s.code for s in wanted]


def test_so_it_is_with_what_is_shown_of_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama().save_pretrained(tmp_path / "model")
    loaded = load(tmp_path / "model")
    convert_model(loaded.model, max_model_len=64, keep=True)  # of which nothing is shown to others
    of = capture_file(loaded.model, max_model_len=64, experts="grouped_mm", part=WeightShard())
    assert of is not None
    waits, proof = threading.Event(), of.proof_file(loaded.stamps)
    slow = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: (waits.set(), time.sleep(seconds)))
    monkeypatch.setattr(capture_cache, "time", slow)
    with ThreadPoolExecutor(1) as beside:
        with under_way(of.path):
            late = beside.submit(convert_model, loaded.model, max_model_len=64, keep=True, stamps=loaded.stamps)
            assert waits.wait(60)
            monkeypatch.setattr("lamina.models.convert.check_layers", None)
            proof.write(PROOF_TEXT)
        assert late.result(60).rows == "numeric"


def test_whoever_takes_too_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(capture_cache, "LOCK_TIMEOUT_S", 0.05)
    path = place(llama(), max_model_len=64, experts="grouped_mm", part=WeightShard())
    with under_way(path):
        convert_model(llama(), max_model_len=64, keep=True)
    assert path.exists()


def test_a_turn_ends_with_an_error_too(folder: Path) -> None:
    file = CaptureCache(folder / "a.json")
    for _ in range(2):
        with pytest.raises(KeyError), file.lock_for_capture():
            raise KeyError
    assert not list(folder.iterdir())


def test_nothing_is_kept_unless_it_is_asked_for(folder: Path) -> None:
    convert_model(llama(), max_model_len=64)
    assert not folder.exists()


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: llama(num_hidden_layers=2),
    "a number of the configuration": lambda: llama(rms_norm_eps=1e-5),
    "tied weights": lambda: llama(tie_word_embeddings=True),
    "dtype": lambda: llama().to(torch.bfloat16),
    "device": lambda: llama().to("meta"),
    "class": lambda: MistralForCausalLM(MistralConfig(**SHAPE)).eval(),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_model_has_another_place(other: str) -> None:
    assert place(OTHERS[other]()) != place(llama())
    assert place(llama()) == place(llama())


def test_what_else_tracing_depends_on_is_in_the_name() -> None:
    model = llama()
    facts: list[dict[str, object]] = [
        {"max_model_len": 64}, {"max_model_len": 65}, {"experts": "batched_mm"}, {"experts": "grouped_mm"},
        {"part": WeightShard()}, {"part": WeightShard(0, 2, ((4, 2),))}, {"part": WeightShard(1, 2, ((4, 2),))},
    ]  # fmt: skip
    assert len({place(model, **each) for each in facts}) == len(facts)


def test_code_that_differs_is_another_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of Lamina or of a module's class may differ, or the versions of packages."""
    known = place(model := llama())
    digest = capture_cache.file_digest
    for name in ("convert.py", "mincut.py", "spec.py", "mesh.py", "modeling_llama.py"):
        with monkeypatch.context() as patch:
            capture_cache.own_code.cache_clear()
            patch.setattr(
                capture_cache, "file_digest", lambda path, name=name: digest(path) + "*" * (path.name == name)
            )
            assert place(model) != known
    capture_cache.own_code.cache_clear()
    assert place(model) == known
    monkeypatch.setattr("transformers.__version__", "0")
    assert place(model) != known


@pytest.mark.long
def test_convert_asks_with_all_that_it_was_told(folder: Path) -> None:
    for options in ({}, {"deterministic": True}):
        convert_model(llama(), max_model_len=64, keep=True, **options)
    convert_model(llama(), max_model_len=32, keep=True)
    assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ({"LAMINA_CACHE": ""}, None),
        ({"LAMINA_CACHE": "here"}, None),
        ({"LAMINA_CACHE": "/a/b", "XDG_CACHE_HOME": "/c"}, "/a/b/captures"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/lamina/captures"),
        ({"HOME": "/h"}, "/h/.cache/lamina/captures"),
    ],
)
def test_where_captures_are_kept(told: dict[str, str], found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LAMINA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert capture_directory() == (Path(found) if found else None)
    assert (capture_file(llama()) is None) == (found is None)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_what_others_may_have_written_is_not_read(mode: int, tmp_path: Path) -> None:
    file = CaptureCache(tmp_path / "a.json")
    file.write("{}")
    assert file.read() == "{}"
    (tmp_path / "a.json").chmod(mode)
    assert file.read() is None


def test_a_link_a_pipe_and_a_folder_that_others_may_change_are_not_read(tmp_path: Path) -> None:
    real, link, pipe = (tmp_path / name for name in ("a.json", "b.json", "c.json"))
    CaptureCache(real).write("{}")
    link.symlink_to(real)
    os.mkfifo(pipe)
    assert CaptureCache(real).read() == "{}"
    assert CaptureCache(link).read() is None
    assert CaptureCache(pipe).read() is None, "nor waited for"
    tmp_path.chmod(0o777)
    assert CaptureCache(real).read() is None


def test_code_that_has_changed_since_it_was_read_and_code_of_others_keep_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = llama()
    assert capture_file(model) is not None
    model.extra = type("Extra", (torch.nn.Module,), {"__module__": "somebody"})()
    assert capture_file(model) is None
    capture_cache.own_code.cache_clear()
    monkeypatch.setattr(capture_cache, "IMPORTED_S", 0.0)
    assert capture_file(llama()) is None


@pytest.mark.parametrize(
    ("folder", "in_process", "kept"), [("/a", True, True), (None, True, False), (None, False, True)]
)
def test_a_callers_own_process_keeps_captures_where_it_says_so(
    folder: str | None, in_process: bool, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LAMINA_CACHE", raising=False)
    if folder:
        monkeypatch.setenv("LAMINA_CACHE", folder)
    assert capture_cache.can_cache(in_process=in_process) == kept


def test_what_another_user_owns_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = CaptureCache(tmp_path / "a.json")
    file.write("{}")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert file.read() is None


def test_a_file_without_text_or_without_end_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(sha256(b"\xff\xfe").digest() + b"\xff\xfe")
    assert CaptureCache(path).read() is None
    CaptureCache(path).write("{  }")
    assert CaptureCache(path).read() == "{  }"
    monkeypatch.setattr(capture_cache, "MAX_FILE_BYTES", 3)
    assert CaptureCache(path).read() is None
    assert CaptureCache(tmp_path / "no").read() is None


def test_a_damaged_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    CaptureCache(path).write('{"a": 10}')
    data = path.read_bytes()
    flips = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(len(data))]
    for bad in (*flips, *(data[:end] for end in range(len(data))), data + b" "):
        path.write_bytes(bad)
        assert CaptureCache(path).read() is None
    path.write_bytes(data)
    assert CaptureCache(path).read() == '{"a": 10}'


def test_a_folder_that_cannot_be_made_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    CaptureCache(tmp_path / "file" / "folder" / "a.json").write("{}")
    assert CaptureCache(tmp_path / "file" / "folder" / "a.json").read() is None


def test_nobody_else_can_read_or_write_the_folder(folder: Path) -> None:
    CaptureCache(folder / "a.json").write("{}")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "a.json").stat().st_mode & 0o777 == 0o600


def test_those_used_last_stay_and_what_others_have_there_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_cache, "MAX_FILES", 3)
    files = [folder / f"{number:064x}.json" for number in range(4)]
    for number, path in enumerate(files[:3]):
        CaptureCache(path).write("{}")
        os.utime(path, (number, number))
    others = folder / "notes.json"
    others.write_text("mine")
    os.utime(others, (0, 0))
    CaptureCache(files[0]).read()
    CaptureCache(files[3]).write("{}")
    assert sorted(folder.iterdir()) == [files[0], files[2], files[3], others]


def test_writers_at_once_leave_a_whole_file(folder: Path) -> None:
    texts = [str(number) * 100_000 for number in range(4)]
    threads = [threading.Thread(target=CaptureCache(folder / "a.json").write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert CaptureCache(folder / "a.json").read() in texts
    assert [path.name for path in folder.iterdir()] == ["a.json"]
