"""Workers whose processes have a GPU that a CPU stands in for, with graphs."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "devices")]
from stand_in_gpu import stand_in_gpus

from lamina.workers.compute import main as compute_main
from lamina.workers.memory import main as memory_main


def serve_memory(sock: socket.socket) -> None:
    with stand_in_gpus(graphs=True):
        memory_main.serve_memory(sock)


def serve_compute(sock: socket.socket) -> None:
    with stand_in_gpus(graphs=True):
        compute_main.serve_compute(sock)
