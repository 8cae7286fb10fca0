"""Loads model directories, each in a child of its own, and prints what an audit hook saw them do. A program.

``python audited.py SECRET DIRECTORY...``: SECRET is a path that nothing may open; +DIRECTORY is loaded with
trust_remote_code. Prints one JSON object: by name, {"events": what it did beyond reading its own files, "error": the
refusal, or null}.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

LIMIT_S = 20
MEMORY = 6 << 30
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
PROCESSES = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "os.startfile")


class Watch:
    """Keeps what this process does that reading a model's files does not need."""

    def __init__(self, directory: str, secret: str) -> None:
        self._directory, self._secret = directory, secret
        self.events: list[str] = []

    def __call__(self, event: str, values: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(values[0], str | bytes):
            path, flags = os.path.realpath(os.fsdecode(values[0])), values[2] or 0
            if path == self._secret:
                self.events.append("opens the secret")
            elif flags & WRITES and not path.startswith(("/dev/", "/proc/")) and "__pycache__" not in path:
                self.events.append(f"writes {path}")
        elif event == "exec" and os.path.realpath(values[0].co_filename).startswith(self._directory):
            self.events.append(f"runs {values[0].co_filename}")
        elif event in ("socket.connect", "socket.getaddrinfo", *PROCESSES):
            self.events.append(f"{event} {values[1:]}")
        elif event == "pickle.find_class":
            self.events.append(f"{event} {values}")


def load_all(directory: str, trusted: bool) -> None:
    """Read everything that a server and its workers read of a model."""
    from lamina.config.engine_config import ModelOptions
    from lamina.models.chat_template import render_chat
    from lamina.models.checkpoint import peek_config
    from lamina.models.generation_defaults import default_sampling_params
    from lamina.models.load import load
    from lamina.models.tokenizer import load_tokenizer

    peek_config(directory, ModelOptions(trust_remote_code=trusted))
    default_sampling_params(directory, trust_remote_code=trusted)
    tokenizer = load_tokenizer(directory, trust_remote_code=trusted)
    for size in (1, 2):
        load(directory, size=size, trust_remote_code=trusted)
    if tokenizer is not None:
        tokenizer("hi there")
        if tokenizer.chat_template:
            render_chat(tokenizer, [{"role": "user", "content": "hi"}])


def child(directory: str, trusted: bool, secret: str, out: int) -> None:
    """Load one directory with the hook, and write the result."""
    from lamina.models.errors import ModelError

    for number in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.alarm(LIMIT_S)
    watch, error = Watch(os.path.realpath(directory), os.path.realpath(secret)), None
    sys.addaudithook(watch)
    try:
        load_all(directory, trusted)
    except ModelError as e:
        error = str(e)
    except BaseException as e:  # noqa: BLE001 - any other class is a fault
        error = "".join(traceback.format_exception_only(e)).strip()
        watch.events.append(f"raises {type(e).__name__}")
    os.write(out, json.dumps({"events": watch.events, "error": error}).encode())


def main(secret: str, directories: list[str]) -> None:
    import transformers.models.auto.tokenization_auto
    import transformers.models.llama.modeling_llama  # noqa: F401

    import lamina.models.load  # noqa: F401

    results = {}
    for directory in directories:
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                child(directory.removeprefix("+"), directory.startswith("+"), secret, write)
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            text = pipe.read()
        _, status = os.waitpid(pid, 0)
        name = "+" * directory.startswith("+") + Path(directory).name
        results[name] = json.loads(text or json.dumps({"events": [f"ends by {status}"], "error": None}))
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
