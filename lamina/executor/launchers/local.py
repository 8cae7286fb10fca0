"""The launcher ``local``: workers on this machine, as processes or, for a transport within one process, as threads."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from lamina.config.conflicts import NN_MODULE, conflict_text
from lamina.config.engine_config import EngineConfig
from lamina.env import PACKED
from lamina.facts.host_memory import check_kv_memory_fits, free_bytes
from lamina.netstack.own_python import own_environment, own_python
from lamina.observe.log_lines import json_environment
from lamina.utils import cpu_cores
from lamina.utils.proc import StopProbe

from . import WorkerHandle
from .process import Process, SpawnedProcess, exit_status_text
from .worker_stderr import INHERITED, start_with_stderr
from .zygote_client import START, NoForkError, ZygoteClient, ZygoteLostError

log = logging.getLogger(__name__)

# By these OpenMP binds its threads to cores when it is loaded; the zygote has already done so with its own cores.
BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
# role -> (module, its function that serves one control socket)
ROLES = {
    "memory": ("lamina.workers.memory.main", "serve_memory"),
    "compute": ("lamina.workers.compute.main", "serve_compute"),
    "prefill": ("lamina.workers.prefill.main", "serve_prefill"),
    "engine": ("lamina.server.engine_client.engine_process", "serve_engine"),
    "footprint": ("lamina.workers.memory.resident_memory", "serve_footprint"),
    "template": ("lamina.models.template_process", "serve_templates"),
    "tokenizer": ("lamina.executor.tokenizer_process", "serve_tokenizer"),
}


JOIN_AFTER_KILL_S = 10.0  # for a killed process to be gone
STARTERS = {"engine"}  # roles that start workers of their own
LIGHT = {"template", "tokenizer"}  # roles whose imports take less time than a zygote's


class ProcessWorker:
    """A worker in a process of its own: forked from the zygote, or ``python -m lamina.workers``."""

    host = ""

    def __init__(self, role: str, index: int, threads: int = 0, on: cpu_cores.Cores = (), **env: str) -> None:
        """``threads``: of OpenMP; 0: as the environment says, else all cores. ``on``: its cores; empty: any. ``env``:
        additional environment variables.
        """
        self.role, self.index = role, index
        self._process, self.sock = start(role, threads, on, **env)
        self.pid = self._process.pid
        self._stop_probe = StopProbe()

    def exit_reason(self) -> str | None:
        return exit_status_text(self._process.exit_status) if self._process.has_ended() else None

    @property
    def status(self) -> int | None:
        """The exit status, or minus the signal that ended it; None while it runs, or if unknown."""
        return self._process.exit_status if self._process.has_ended() else None

    @property
    def is_stopped(self) -> bool:
        return self._stop_probe.is_stopped(self.pid)

    def join(self, timeout_s: float) -> None:
        if not self._process.has_ended(timeout_s):
            self._process.kill()
            self._process.has_ended(JOIN_AFTER_KILL_S)


class ThreadWorker:
    """A worker on a thread of the driver's process; ``extra`` goes to its serve function, after the socket."""

    host = ""

    def __init__(self, role: str, index: int, *extra: Any) -> None:
        self.role, self.index, self.pid = role, index, os.getpid()
        self.sock, theirs = socket.socketpair()
        module, function = ROLES[role]
        serve: Callable[..., None] = getattr(import_module(module), function)
        self._thread = threading.Thread(target=serve, args=(theirs, *extra), name=f"lamina-{role}-{index}", daemon=True)
        self._thread.start()

    is_stopped = False  # if this process were stopped, no code here would run

    def exit_reason(self) -> str | None:
        return None if self._thread.is_alive() else "ended"

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)


class LocalLauncher:
    """The launcher of workers on this machine; they end by their control links alone."""

    def __init__(self, key: bytes, wanted: Mapping[str, int], on: Mapping[str, Sequence[cpu_cores.Cores]]) -> None:
        """``on``: the cores of each worker of a role; empty: any. LAMINA_PACKED_WEIGHTS of the workers is a file in
        memory, owned by this launcher and empty: its first user fills it.
        """
        self.key = key
        self._wanted, self._on = dict(wanted), {role: list(each) for role, each in on.items()}
        self._packed = open(os.memfd_create("lamina-packed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "rb")  # noqa: SIM115

    def thread_count(self, role: str, index: int) -> int:
        return len(self._cores(role, index)) or max(1, len(os.sched_getaffinity(0)) // self._wanted[role])

    def start(self, role: str, index: int, threads: int = 0) -> ProcessWorker:
        packed = f"/proc/{os.getpid()}/fd/{self._packed.fileno()}"
        return ProcessWorker(role, index, threads, self._cores(role, index), **{PACKED: packed})

    def start_spare(self, role: str, number: int, threads: int = 0, wait_s: float = 0.0) -> ProcessWorker:
        return self.start(role, number, threads)

    def promote_spare(self, role: str, number: int, index: int) -> None:
        """Do nothing: all workers are on this host, and with --cores there are no spares."""

    def avoid_host(self, role: str, index: int) -> None:
        """Do nothing: there is no other host."""

    def _cores(self, role: str, index: int) -> cpu_cores.Cores:
        """Return the cores of a worker. One that replaces a worker on loan has those of the last local worker."""
        return self._on[role][min(index, len(self._on[role]) - 1)]

    def can_replace(self, lost: WorkerHandle) -> bool:
        return True

    def set_capacity(self, role: str, count: int) -> bool:
        had = self._on[role]
        if count > len(had) and any(any(each) for each in self._on.values()):  # cores were dealt out at the start
            return False
        self._wanted[role], self._on[role] = count, [*had, *[cpu_cores.Cores()] * count][:count]
        return True

    def keep_workers(self, role: str, numbers: Sequence[int]) -> None:
        self._on[role] = [self._on[role][n] for n in numbers]
        self._wanted[role] = len(numbers)

    def close(self) -> None:
        self._packed.close()


def open_launcher(
    config: EngineConfig, key: bytes, wanted: Mapping[str, int], without: Collection[str] = ()
) -> LocalLauncher:
    if config.devices.memory_device == "cpu":  # a worker on a GPU checks its memory by itself
        check_kv_memory_fits(config, free_bytes())
    on = {role: [cpu_cores.Cores()] * count for role, count in wanted.items()}
    if config.devices.cores:
        on = cores_by_role(config, wanted)
        log.info("--cores: %s", "; ".join(_lines(on)) or "fewer than workers: the system places them")
    return LocalLauncher(key, wanted, on)


def cores_by_role(config: EngineConfig, wanted: Mapping[str, int]) -> dict[str, list[cpu_cores.Cores]]:
    """Return the cores of each worker, by role, as ``--cores`` says. Raises ValueError if that does not fit."""
    roles = "compute", "memory", "prefill"
    counts = [wanted.get(role, 0) for role in roles]
    if not counts[1]:
        raise ValueError(conflict_text("--transport loopback", "--cores"))
    if not counts[0]:
        raise ValueError(conflict_text("--cores", NN_MODULE))
    lists = cpu_cores.assign_cores(
        config.devices.cores, counts, core_topology(), at_once=config.topology.overlaps_pools
    )
    return dict(zip(roles, lists, strict=True))


def _lines(on: Mapping[str, Sequence[cpu_cores.Cores]]) -> Iterator[str]:
    for role, each in on.items():
        yield from (f"{role} worker {i} on {cpu_cores.core_list_text(x)}" for i, x in enumerate(each) if x)


def core_topology() -> list[int]:
    """Return the cores that this process may use. Cores of one NUMA node, and threads of one core, are neighbours."""

    def place_of(core: int) -> tuple[int, ...]:
        here = Path(f"/sys/devices/system/cpu/cpu{core}")
        node = next((int(p.name[4:]) for p in here.glob("node[0-9]*")), 0)
        try:
            return node, int((here / "topology/core_id").read_text()), core
        except (OSError, ValueError):
            return node, core, core

    return sorted(os.sched_getaffinity(0), key=place_of)


def start(role: str, threads: int, on: cpu_cores.Cores, **env: str) -> tuple[Process, socket.socket]:
    """Start the process of a worker, with ``env`` as additional environment. Returns it and the driver's end of its
    control link. It is forked from the zygote, if possible: modules are imported already.
    """
    arguments = ["--cores", ",".join(map(str, on))] if on else []
    serve, own = ":".join(ROLES[role]), {**worker_environment(threads), **env}

    def fresh(control: socket.socket) -> Process:
        return start_with_stderr(
            role, lambda err: SpawnedProcess(spawn(role, control, threads, arguments, (), err.fd, **env), err)
        )

    def forked(warm: ZygoteClient, control: socket.socket) -> Process:
        fork = partial(warm.fork, serve, arguments, own, control, cores=on, starts=role in STARTERS)
        return start_with_stderr(role, lambda err: fork(stderr=err))

    if any(own.get(name) for name in BINDING):
        return _linked(fresh)
    for _ in range(2):  # a lost zygote is replaced
        if (warm := START.get(own, start=role not in LIGHT)) is None:
            break
        try:
            return _linked(partial(forked, warm))
        except ZygoteLostError as error:
            START.forget(warm, error)
            gone, why = warm, error
        except NoForkError as error:
            if role not in LIGHT:  # which loses little by starting afresh
                START.give_up(warm, error)
            break
    else:
        START.give_up(gone, why)
    return _linked(fresh)


def _linked(begin: Callable[[socket.socket], Process]) -> tuple[Process, socket.socket]:
    """Return what ``begin`` starts with the worker's end of a new control link, and the driver's end. No two attempts
    share a link: an order that no zygote has read holds its worker's end, which would hide the end of another worker.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            return begin(theirs), ours
    except BaseException:
        ours.close()
        raise


def spawn(
    role: str,
    control: socket.socket,
    threads: int = 0,
    more: Sequence[str] = (),
    fds: Sequence[int] = (),
    stderr: int = INHERITED.fd,
    **env: str,
) -> subprocess.Popen[bytes]:
    """Start a worker's fresh process with its end of the control link, ``more`` arguments and inherited descriptors.
    ``stderr``: the descriptor of its stderr.
    """
    module, function = ROLES[role]
    words = ["lamina.workers", f"{module}:{function}", "--control-fd", str(control.fileno()), *more]
    command, environ = own_python("-m", *words, environ={**worker_environment(threads), **env})
    return subprocess.Popen(
        command,
        pass_fds=[control.fileno(), *fds],
        stdin=subprocess.DEVNULL,
        stderr=None if stderr == INHERITED.fd else stderr,
        env=environ,
        process_group=0,  # Ctrl-C is the driver's to handle, also while the worker still imports
    )


def spawn_supervised(
    role: str, sock: socket.socket, keys: bytes, threads: int, fds: Sequence[int] = (), **env: str
) -> tuple[SpawnedProcess, int]:
    """Start a worker's process with a control link to a driver elsewhere. Returns it and its life line, which ends with
    this process, however that ends. Raises OSError if this host starts no more processes.
    """
    theirs, life_line = os.pipe()
    with suppress(BrokenPipeError):
        os.write(life_line, keys)
    try:
        more, inherited = ["--life-line-fd", str(theirs)], [theirs, *fds]
        return start_with_stderr(
            role, lambda err: SpawnedProcess(spawn(role, sock, threads, more, inherited, err.fd, **env), err)
        ), life_line
    except OSError:
        os.close(life_line)
        raise
    finally:
        os.close(theirs)


def worker_environment(threads: int) -> dict[str, str]:
    """Return the environment of a worker's process; ``threads``: of OpenMP, 0: as here."""
    # Both pools may share these cores. OpenMP threads that spin at the end of a loop take them from the other pool. On
    # a busy machine they take them from the very thread that they wait for (measured: 10 times slower steps).
    defaults = {"OMP_WAIT_POLICY": "passive"}
    # Set at start, it limits the threads that OpenMP makes; set later, OpenMP wakes all of them for the smallest loop.
    wanted = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    # No worker computes with numpy: its OpenBLAS need not start a thread for each core, and no process with more than
    # one thread forks.
    always = {"OPENBLAS_NUM_THREADS": "1", **json_environment()}
    return own_environment({**defaults, **os.environ, **wanted, **always})
