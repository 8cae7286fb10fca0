"""A tokenizer that never loads is given up at --start-timeout-s, in one line."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
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

TRUSTED: dict[str, Any] = {"trust_remote_code": True, "start_timeout_s": 0.2}
GIVEN_UP = "loading the tokenizer (--start-timeout-s) is not done after"


# A tokenizer's own code, which waits as long as a file is there.
CODE = """
import time
from pathlib import Path
while Path({lock!r}).exists():
    time.sleep(0.05)
raise OSError("gone")
"""


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[str]:
    """Copy the shipped model; the code of its tokenizer does not end before the test does."""
    model, lock = tmp_path / "model", tmp_path / "lock"
    shutil.copytree(ROOT / MODEL, model)
    lock.touch()
    (model / f"own_{tmp_path.name}.py").write_text(CODE.format(lock=str(lock)))
    names = {"auto_map": {"AutoTokenizer": [f"own_{tmp_path.name}.T", None]}, "tokenizer_class": "T"}
    (model / "tokenizer_config.json").write_text(json.dumps(names))
    yield str(model)
    lock.unlink()


def test_a_server_gives_up(stuck: str, tmp_path: Path) -> None:
    """All of it; with workers that are threads, which wait for the tokenizer, so that it is all that can be late."""
    words = ["serve", MODEL, "--tokenizer", stuck, "--trust-remote-code", "--port", "0", "--transport", "loopback"]
    words += ["--start-timeout-s", "2"]
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
    before, config = NoExecutor.closed, make_config({**TRUSTED, "transport": transport})
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
    assert main(["generate", stuck, "--trust-remote-code", "--prompt", "x", "--start-timeout-s", "0.2"]) == 2
    assert capsys.readouterr().err == f"lamina-launch generate: {GIVEN_UP} 0.2 s\n"
