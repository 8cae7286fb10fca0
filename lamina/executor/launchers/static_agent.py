"""The node agent of the launcher ``static``: a user starts it by hand, on the host of one worker.

It connects to the driver, names its worker, and waits for its order. The messages of the two are below, in their order.
Their link is a control link of its own, in addition to the worker's.
"""

from __future__ import annotations

import os
import socket
import threading
import time

import msgspec

from lamina import __version__
from lamina.config.engine_config import MOST_THREADS
from lamina.netstack import ChannelError, ChannelTimeout, HandshakeError
from lamina.observe.log_lines import say
from lamina.protocol.control import ControlLink, LinkClosedError
from lamina.protocol.encrypted_socket import EncryptedSocket
from lamina.workers.worker_process import ORPHAN_EXIT_S

from .local import spawn_supervised
from .process import SpawnedProcess, exit_status_text
from .remote_links import connect_inheritable, host_port

AGENT_NAME = "warden"  # the name of its end of the link; the command line names the driver's end
ANY = -1
ROLES = ("compute", "memory", "prefill")
REACH_S = 10.0
AGAIN_S = 0.2  # between tries to reach a driver that is not up yet


class AgentHello(msgspec.Struct, frozen=True, kw_only=True, tag="came"):
    """Node agent -> driver, first. Once all have connected, the reply is StartWorker, WorkerRefused or KillWorker."""

    role: str
    index: int = ANY
    host: str  # IP, where the worker will listen
    cores: int
    version: str


class StartWorker(msgspec.Struct, frozen=True, kw_only=True, tag="begin"):
    """Driver -> node agent: start the worker; ``name``: of its end of the control link. The reply is WorkerStarted."""

    role: str
    index: int
    threads: int
    name: str


class WorkerRefused(msgspec.Struct, frozen=True, tag="refused"):
    """Driver -> node agent: there is no use for it; ``text``: why."""

    text: str


class WorkerStarted(msgspec.Struct, frozen=True, tag="began"):
    """Node agent -> driver: the worker runs."""

    pid: int


class WorkerExited(msgspec.Struct, frozen=True, tag="ended"):
    """Node agent -> driver, last message: how the worker ended."""

    exit_reason: str


class KillWorker(msgspec.Struct, frozen=True, tag="end"):
    """Driver -> node agent: kill the worker, if there is one."""


class StaticWorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as the command line names it."""

    role: str
    index: int = ANY  # the driver chooses
    driver: tuple[str, int]
    driver_name: str  # unique among drivers with the same key
    host: str = ""  # IP of this host; "" = the one from which the driver is reached

    @property
    def label(self) -> str:
        return self.role if self.index == ANY else f"{self.role}-{self.index}"


def run_agent(worker: StaticWorkerSpec, key: bytes, wait_s: float) -> int:
    """Watch one worker until its end. Exit status: 0: it ended in order, or none was needed; 1: it or the driver was
    lost. Raises ValueError if the driver refuses it, OSError if no driver is reached within ``wait_s``.
    """
    sock, keys = _reach(worker, key, wait_s)
    host = worker.host or sock.getsockname()[0]
    link = ControlLink(EncryptedSocket(sock.detach(), keys), StartWorker | WorkerRefused | KillWorker)
    at = host_port(*worker.driver)
    try:
        cores = len(os.sched_getaffinity(0))
        link.send(AgentHello(role=worker.role, index=worker.index, host=host, cores=cores, version=__version__))
        say(f"{worker.label} has come to {at} from {host}")
        order = link.recv()
        if isinstance(order, StartWorker):
            return _serve(link, order, worker, key)
    except LinkClosedError:
        say(f"the driver at {at} is gone")
        return 1
    finally:
        link.close()
    if isinstance(order, WorkerRefused):
        raise ValueError(f"{worker.label} is refused by the driver at {at}: {order.text}")
    say(f"the driver at {at} has ended")
    return 0


def _serve(link: ControlLink, order: StartWorker, worker: StaticWorkerSpec, key: bytes) -> int:
    if order.role != worker.role or not 1 <= order.threads <= MOST_THREADS:
        raise ValueError(f"the driver asks {worker.label} for {order.role}-{order.index}, threads {order.threads}")
    try:
        sock, keys = connect_inheritable(*worker.driver, key, REACH_S, name=order.name, peer=worker.driver_name)
    except ChannelError as error:
        raise OSError(f"no control link for {order.role}-{order.index}: {error}") from error
    with sock:
        process, life_line = spawn_supervised(order.role, sock, keys, order.threads)
    link.send(WorkerStarted(pid=process.pid))
    say(f"{order.role}-{order.index} runs with pid {process.pid}")
    threading.Thread(target=_obey, args=(link, process), name="lamina-warden", daemon=True).start()
    status = process.wait()
    os.close(life_line)
    fate = exit_status_text(status)
    say(f"{order.role}-{order.index} {fate}")
    link.send(WorkerExited(exit_reason=fate))
    return 0 if status == 0 else 1


def _obey(link: ControlLink, process: SpawnedProcess) -> None:
    """End the worker when the driver orders it, or when the driver is gone and the worker does not notice."""
    try:
        link.recv()
    except LinkClosedError:
        process.has_ended(2 * ORPHAN_EXIT_S)
    process.kill()


def _reach(worker: StaticWorkerSpec, key: bytes, wait_s: float) -> tuple[socket.socket, bytes]:
    """Connect to the driver, which may start later than this process."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return connect_inheritable(
                *worker.driver, key, min(REACH_S, wait_s), name=AGENT_NAME, peer=worker.driver_name
            )
        except HandshakeError as error:
            raise ValueError(f"{error}: are the cluster's key and the name of --driver here the driver's?") from error
        except (OSError, ChannelTimeout) as error:
            if time.monotonic() > deadline:
                raise OSError(
                    f"no driver at {host_port(*worker.driver)} within {wait_s:g} s (--wait-s): {error}"
                ) from error
        threading.Event().wait(AGAIN_S)
