"""``RemoteOpenAIServer`` over ``lamina-launch serve``. Servers of the same flags are one; a few stay on."""

from __future__ import annotations

import atexit
import os
import re
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

import pytest

from .models import made
from .offline import BACKENDS, TRAINED

START_S, STOP_S, KEPT = 240.0, 30.0, 2
VALUED, LIST, ALONE = 1, 2, 0
# Flags that the tests give and that are not passed on: (how many values, why).
DROPPED = {
    "--enable-lora": (ALONE, "no adapters here"), "--lora-modules": (LIST, "no adapters here"),
    "--enable-auto-tool-choice": (ALONE, "always on"), "--structured-outputs-config.backend": (VALUED, "one here"),
    "--load-format": (VALUED, "one here"), "--runner": (VALUED, "one here"),
}  # fmt: skip


def flags_here(args: list[str]) -> list[str]:
    """``args`` without what is dropped, by the names here."""
    out, rest = [], [str(a) for a in args]
    while rest:
        flag = rest.pop(0)
        if "lamina_as_vllm.absent" in flag:
            pytest.skip(f"vLLM's internals: {flag}")
        name, equals, value = flag.partition("=")
        value = BACKENDS.get(value, value)
        if name in DROPPED:
            count = 0 if equals else DROPPED[name][0]
            while rest and count and not rest[0].startswith("--"):
                rest.pop(0)
                count -= count == VALUED
        else:
            out.append(name + equals + value)
    return out


class _Process:
    """One server: ``url`` or ``uds`` is where it is."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.log = tempfile.NamedTemporaryFile(prefix="server-", suffix=".log", dir=os.environ["LAMINA_SUITES"])  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lamina.cli.launch", "serve", *command], stdout=subprocess.PIPE, stderr=self.log,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env}, text=True,
        )  # fmt: skip
        out: IO[str] | None = self.process.stdout
        assert out is not None
        readable, _, _ = select.select([out], [], [], START_S)
        line = out.readline() if readable else ""
        if " on " not in line:
            self.stop()
            said = Path(self.log.name).read_text().strip().splitlines()[-1:]
            raise RuntimeError(f"lamina-launch serve {' '.join(command)}: {' '.join(said) or 'no answer in time'}")
        self.url = line.rsplit(" on ", 1)[1].strip()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


_running: dict[tuple[object, ...], _Process] = {}


def _stop_all() -> None:
    for process in _running.values():
        process.stop()
    _running.clear()


atexit.register(_stop_all)


def _start(command: list[str], env: dict[str, str]) -> _Process:
    """With LAMINA_SUITES_LENIENT, flags that the server refuses are left out: to see what comes after them."""
    while True:
        try:
            return _Process(command, env)
        except RuntimeError as e:
            refused = re.search(r"lamina-launch serve: (?:unknown argument )?(--[a-z-]+)", str(e))
            if "LAMINA_SUITES_LENIENT" not in os.environ or refused is None or refused[1] not in command:
                raise
            at = command.index(refused[1])
            print("left out:", refused[1])
            command = command[:at] + command[at + 1 + (not command[at + 1].startswith("--")) :]


def _server(given: list[str], command: list[str], env: dict[str, str]) -> _Process:
    """``given``: flags as the test has them. Where those differ it wants a server of its own, with counters at 0."""
    key = (*map(str, given), *command, *sorted(env.items()))
    found = _running.pop(key, None)
    if found is None or found.process.poll() is not None:
        while len(_running) >= KEPT:
            _running.pop(next(iter(_running))).stop()
        found = _start(command, env)
    _running[key] = found
    return found


class RemoteOpenAIServer:
    """A server with the names of vLLM's: ``url_for``, ``get_client``, ``get_async_client``, and a context manager."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(
        self, model: str, vllm_serve_args: list[str], *, env_dict: dict[str, str] | None = None, seed: int | None = 0,
        auto_port: bool = True, max_wait_seconds: float | None = None,
        override_hf_configs: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        args = flags_here(vllm_serve_args)
        self.uds = args[args.index("--uds") + 1] if "--uds" in args else None
        if "--served-model-name" not in args:
            args += ["--served-model-name", model]
        if not any(a.startswith("--max-model-len") for a in args):
            args += ["--max-model-len", str(TRAINED)]
        if auto_port and not self.uds:
            args += ["--port", "0"]
        env = {**(env_dict or {})}
        if "VLLM_API_KEY" in env:
            env["LAMINA_API_KEY"] = env["VLLM_API_KEY"]
        if env.pop("VLLM_BATCH_INVARIANT", os.environ.get("VLLM_BATCH_INVARIANT")) == "1":
            args += ["--deterministic"]
        if "--enable-request-id-headers" not in args:
            args += ["--no-enable-request-id-headers"]  # their default
        fixed = ["--seed", str(seed or 0), "--metrics-compat", "vllm", "--allow-unknown-fields"]
        calls = {"--tool-call-parser", "--reasoning-parser"} <= {*args}
        self._process = _server(vllm_serve_args, [made(model, calls=calls), *args, *fixed], env)
        self.proc = self._process.process
        if not self.uds:
            host, _, port = self._process.url.rpartition("//")[2].rpartition(":")
            self.host, self.port = host, int(port)
        self.show_hidden_metrics = False

    def _get_process_termination_timeout(self) -> float:
        return STOP_S

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    @property
    def url_root(self) -> str:
        return f"http://{self.uds.split('/')[-1]}" if self.uds else f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return self.url_root + "/" + "/".join(p.strip("/") for p in parts if p)

    def get_client(self, **options: Any) -> Any:
        import openai

        return openai.OpenAI(**self._options(options))

    def get_async_client(self, **options: Any) -> Any:
        import openai

        return openai.AsyncOpenAI(**self._options(options))

    def _options(self, given: dict[str, Any]) -> dict[str, Any]:
        return {
            "timeout": 200, "base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY, "max_retries": 0, **given
        }  # fmt: skip
