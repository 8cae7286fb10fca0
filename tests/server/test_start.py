"""Starting is quick because the server and its engine process do without torch; workers have it.

Covers: lamina/cli/serve.py, lamina/server/server_config.py.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path

import pytest
from running import MODEL, ROOT
from transformers import AutoTokenizer

from lamina.cli.serve import listener, say_ready
from lamina.models.tokenizer import load_tokenizer
from lamina.server.server_config import ServerConfig


@pytest.mark.long
def test_neither_server_nor_engine_process_imports_torch() -> None:
    code = (
        "import sys, lamina.server.run, lamina.server.engine_client.engine_process as e;"
        "from lamina.models.tokenizer import *; from lamina.models.chat_template import render_chat;"
        f"t = load_tokenizer({MODEL!r}); token_ids(t, render_chat(t, [dict(role='user', content='hi')]));"
        "Detokenizer(t).push([5, 6]); print('torch' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100, check=True
    )
    assert out.stdout.split() == ["False"]


@pytest.mark.parametrize(
    ("options", "told"),
    [({}, False), ({"host": "10.0.0.1"}, True), ({"host": "10.0.0.1", "api_key": "k"}, False), ({"uds": "x"}, False)],
)
def test_who_may_use_the_server_is_said(
    options: dict[str, str], told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ServerConfig().host == "127.0.0.1"
    say_ready("m", ServerConfig(**options), "http://there")  # type: ignore[arg-type]
    assert ("anybody who reaches this address" in capsys.readouterr().err) == told


@pytest.mark.parametrize("named", ["TokenizersBackend", "PreTrainedTokenizerFast", "LlamaTokenizer", None])
def test_the_tokenizer_is_the_one_that_transformers_would_load(named: str | None, tmp_path: Path) -> None:
    for path in (ROOT / MODEL).glob("*.js*"):
        (tmp_path / path.name).write_text(path.read_text())
    (tmp_path / "chat_template.jinja").write_text((ROOT / MODEL / "chat_template.jinja").read_text())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": named}))
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert type(ours) is type(theirs)
    assert ours.init_kwargs == theirs.init_kwargs
    assert ours.chat_template == theirs.chat_template is not None
    assert ours.special_tokens_map == theirs.special_tokens_map
    text = "def f(x): return 'é😀'  \n<|user|>"
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours.decode(ours(text)["input_ids"]) == theirs.decode(theirs(text)["input_ids"])


def bound(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    return sock


def test_a_socket_that_was_left_behind_is_replaced_and_goes_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    bound(path).close()
    with listener(ServerConfig(uds=str(path))) as sock:
        sock.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
        assert path.stat().st_mode & 0o777 == 0o600
    assert not path.exists()
    with listener(ServerConfig(uds=str(path))):
        path.unlink()  # by another process: no failure at the end


def test_a_socket_is_claimed_by_a_lock_next_to_it_alone(tmp_path: Path) -> None:
    path, lock = tmp_path / "socket", tmp_path / "socket.lock"
    with socket.socket(socket.AF_UNIX) as stranger:  # a name that any user of the host can take
        stranger.bind(b"\0lamina-uds-" + sha256(os.fsencode(path)).digest())
        with listener(ServerConfig(uds=str(path))):
            assert lock.stat().st_mode & 0o777 == 0o600
    assert not lock.exists()
    lock.touch()  # of a server that was killed
    with listener(ServerConfig(uds=str(path))):
        pass
    lock.symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match=f"{lock} cannot be opened"), listener(ServerConfig(uds=str(path))):
        pass


@pytest.mark.parametrize("kind", ["listens", "starts", "file", "link", "folder"])
def test_what_is_no_such_socket_stays(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with ExitStack() as stack:
        if kind == "listens":
            stack.enter_context(bound(path)).listen()
        elif kind == "starts":
            stack.enter_context(listener(ServerConfig(uds=str(path))))
        elif kind == "file":
            path.write_text("mine")
        elif kind == "link":
            stack.enter_context(bound(tmp_path / "other"))
            path.symlink_to(tmp_path / "other")
        else:
            path.mkdir()
        before = path.lstat().st_ino
        with pytest.raises(OSError, match=f"cannot listen on --uds {path}"), listener(ServerConfig(uds=str(path))):
            pass
        assert path.lstat().st_ino == before
