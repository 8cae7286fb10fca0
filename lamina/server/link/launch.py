"""The start of the engine process."""

from __future__ import annotations

from lamina.fleet.launchers.local import ProcessWorker
from lamina.protocol.control import ControlLink

from .engine_watch import EngineHandle
from .messages import Ready, Start


def launch_engine(start: Start) -> EngineHandle:
    """Start the engine process; it loads while its server does other things."""
    handle = ProcessWorker("engine", 0)
    ControlLink(handle.sock, Ready).send(start)
    return handle
