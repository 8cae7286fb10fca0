"""A tokenizer that never loads, on a file system that has gone away: given up at --start-timeout-s, in one line."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from forked import ForkedProgram
from running import MODEL, ROOT

from lamina import LLM
from lamina.api import frontend
from lamina.cli.launch import main
from lamina.config.engine_config import EngineConfig
from lamina.config.flat_options import flat_options, make_config
from lamina.protocol.control import ControlLink
from lamina.scheduler.slo_admission import SloAdmission
from lamina.server.engine_client import engine_process
from lamina.server.engine_client.messages import StartEngine

GIVEN_UP = "loading the tokenizer (--start-timeout-s) is not done after"


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[str]:
    """A model whose tokenizer_config.json is a pipe without a writer."""
    shutil.copytree(ROOT / MODEL, tmp_path / "model")
    pipe = tmp_path / "model" / "tokenizer_config.json"
    pipe.unlink()
    os.mkfifo(pipe)
    yield str(tmp_path / "model")
    with suppress(OSError):  # it has no reader any more
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))  # who reads is at the end of the file now


def test_a_server_gives_up(stuck: str, tmp_path: Path) -> None:
    """All of it; with workers that are threads, which wait for the tokenizer, so that it is all that can be late."""
    words = ["serve", MODEL, "--tokenizer", stuck, "--port", "0", "--transport", "loopback", "--start-timeout-s", "2"]
    log = tmp_path / "log"
    with log.open("wb") as stderr:
        server = ForkedProgram(words, stderr=stderr)
    assert server.stdout is not None
    with server.stdout:
        assert not server.stdout.read()
    said = log.read_text()
    assert server.wait(110) == 2, said
    assert [line for line in said.splitlines() if line.startswith("lamina-launch")] == [
        f"lamina-launch serve: {GIVEN_UP} 2 s"
    ]
    assert "Traceback" not in said


class NoExecutor:
    """Workers that have started already."""

    closed = 0
    tracer = SimpleNamespace(recorder=None)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    engine_features = ()

    def close(self) -> None:
        NoExecutor.closed += 1


@pytest.mark.no_retry
@pytest.mark.parametrize("module", [frontend, engine_process], ids=lambda m: m.__name__)
@pytest.mark.parametrize("transport", ["loopback", "shm"])
def test_it_is_given_up_and_workers_end(
    module: ModuleType, transport: str, stuck: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WorkerExecutor", NoExecutor)
    before, config = NoExecutor.closed, make_config({"transport": transport, "start_timeout_s": 0.2})
    monkeypatch.setattr(
        module,
        "Engine",
        lambda *_, **__: SimpleNamespace(config=config, feature=lambda kind: None, slo_admission=SloAdmission()),
    )
    with pytest.raises(TimeoutError) as error:
        start_up(module, stuck, config)
    assert str(error.value) == f"{GIVEN_UP} 0.2 s"
    assert NoExecutor.closed - before == (transport == "shm"), "threads are not started before it is there"


def start_up(module: ModuleType, model: str, config: EngineConfig) -> None:
    if module is frontend:
        LLM(model, **flat_options(config))
    else:
        start = StartEngine(model=model, tokenizer="", config=config)
        engine_process.serve_link(ControlLink(socket.socket(), StartEngine), start)


def test_generate_gives_up(stuck: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", stuck, "--prompt", "x", "--start-timeout-s", "0.2"]) == 2
    assert capsys.readouterr().err == f"lamina-launch generate: {GIVEN_UP} 0.2 s\n"
