"""The start of the engine process."""

from __future__ import annotations

from lamina.executor.launchers.local import ProcessWorker
from lamina.protocol.control import ControlLink

from .engine_watchdog import EngineHandle
from .messages import EngineReady, StartEngine


def launch_engine(start: StartEngine) -> EngineHandle:
    """Start the engine process and return at once; the engine loads meanwhile."""
    handle = ProcessWorker("engine", 0)
    ControlLink(handle.sock, EngineReady).send(start)
    return handle
