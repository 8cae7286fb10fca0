"""An engine with a defect: it fails by a prompt with a certain token, with an error or as native code does."""

from __future__ import annotations

import ctypes
import os
import socket

from lamina.engine.engine import Engine
from lamina.request import RequestOutput
from lamina.server.engine_client import engine_process

HOW, ERROR, CRASH = "PYTEST_FRAGILE", "error", "crash"
FATAL, TOKENS = 1999, 20  # of a prompt; of its completion by then


class FragileEngine(Engine):
    def step(self) -> list[RequestOutput]:
        outputs = super().step()
        for output in outputs:
            if FATAL in output.prompt_token_ids and len(output.outputs[0].token_ids) >= TOKENS:
                if os.environ[HOW] == CRASH:
                    ctypes.string_at(0)
                raise KeyError("a defect")
        return outputs


def serve_engine(sock: socket.socket) -> None:
    engine_process.Engine = FragileEngine  # type: ignore[misc]
    engine_process.serve_engine(sock)
