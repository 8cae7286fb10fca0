"""Mooncake's transfer engine over tcp, in an environment of its own: reads memory of another process of this host."""

from __future__ import annotations

import ctypes
import multiprocessing
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from peers.child import Fields, serve

HOST, FILLED = "127.0.0.1", 7


def _engine() -> Any:
    from mooncake.engine import TransferEngine  # type: ignore[import-not-found]

    engine = TransferEngine()
    if engine.initialize(HOST, "P2PHANDSHAKE", "tcp", ""):
        raise RuntimeError("the transfer engine does not start over tcp")
    return engine


def _memory(engine: Any, size: int) -> tuple[Any, int]:
    """So many bytes that others may read, and their address."""
    held = (ctypes.c_char * size)()
    if engine.register_memory(at := ctypes.addressof(held), size):
        raise RuntimeError(f"{size} bytes cannot be registered")
    return held, at


def _hold(pipe: Connection, size: int) -> None:
    engine = _engine()
    held, at = _memory(engine, size)
    ctypes.memset(at, FILLED, size)
    pipe.send((engine.get_rpc_port(), at))
    with suppress(EOFError):  # at the end of the other process
        pipe.recv()
    del held


def _begin() -> Callable[[Fields], Fields]:
    size, engine, context = int(sys.argv[1]), _engine(), multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    context.Process(target=_hold, args=(there, size), daemon=True).start()
    if not here.poll(60.0):
        raise RuntimeError("the process that holds what is read does not start")
    port, source = here.recv()
    held, target = _memory(engine, size)

    def read(asked: Fields) -> Fields:
        if here.poll():
            return {"error": "the process that holds what is read has ended"}
        begun = time.perf_counter()
        failed = engine.transfer_sync_read(f"{HOST}:{port}", target, source, asked["nbytes"])
        took = time.perf_counter() - begun
        if failed or held[asked["nbytes"] - 1] != bytes([FILLED]):
            return {"error": f"a read of {asked['nbytes']} bytes failed"}
        return {"seconds": took}

    return read


if __name__ == "__main__":
    serve(_begin)
