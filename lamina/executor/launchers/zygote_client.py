"""Forks workers from the zygote of this driver (``lamina.workers.zygote``).

A driver has one zygote, started with its first worker and kept for its life. Two engines share it. A worker that starts
workers, such as a server's engine, uses the zygote that it was forked from. Workers continue when it dies. A zygote and
its workers have the same values of all environment variables that imports may read. If these change, the next worker
gets a new zygote, and the old one ends with the last of its workers.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import resource
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from lamina.executor.stall_detector import STOPPED_S, StallDetector
from lamina.netstack.own_python import own_python
from lamina.utils.proc import StopProbe
from lamina.workers import worker_process

from .process import SpawnedProcess
from .worker_stderr import INHERITED, Stderr, start_with_stderr

log = logging.getLogger(__name__)
RESTART_MESSAGE = "%s: another one takes its place, and imports first"

# Modules that workers import, in an order that suits each worker: torch without transformers first.
MODULES = (
    "torch", "lamina.workers.memory.main", "lamina.workers.memory.memory_worker",
    "lamina.workers.memory.kv_transfer.reshard", "lamina.workers.memory.memory_bandwidth", "lamina.netstack.host.shm",
    "lamina.workers.compute.main", "lamina.workers.prefill.main", "lamina.ops.attention.reference",
    "lamina.server.engine_client.engine_process", "lamina.models.convert", "lamina.models.load",
    "transformers:PreTrainedModel", "transformers:PreTrainedTokenizerFast", "transformers:GenerationMixin",
    "transformers.models.auto.modeling_auto", "torch.export._trace", "torch._subclasses.schema_check_mode",
    "torch.fx.experimental.validator", "torch._inductor.sizevars", "sympy.tensor.tensor",
    "torch._export.passes.replace_set_grad_with_hop_pass", "torch._export.passes.replace_autocast_with_hop_pass",
    "torch._inductor.fx_passes.dedupe_symint_uses", "torch._inductor.compiler_bisector", "transformers.modeling_layers",
    "transformers.processing_utils", "lamina.models.load:prepare_transformers()", "lamina.ops.attention.native?",
    "lamina.ops.gemm.native?", "lamina.ops.rows.program?",
    "lamina.ops.sampling.native?",
)  # fmt: skip
# Variables that no module reads at import: a worker's may differ from its zygote's.
LATE = ("LAMINA_", "PYTEST_", "OMP_NUM_THREADS", "PWD", "OLDPWD", "CUDA_VISIBLE_DEVICES")
FORK_S = 60.0  # for a worker to be forked, the imports of a busy machine included
LOOK_S = 0.25  # between two looks whether the zygote is stopped; a thread that does not wake up would count as hung
STATUS_S = 1.0  # for the zygote to report how a worker has ended


class NoForkError(OSError):
    """No worker can be forked here; the text names the reason."""


class ZygoteLostError(NoForkError):
    """The zygote has ended or stands still; another one may fork."""


class ForkedProcess:
    """The process of a worker, which is a child of the zygote. Safe from any thread."""

    def __init__(self, pid: int, pidfd: int, line: socket.socket, stderr: Stderr = INHERITED) -> None:
        """Take ownership of ``pidfd`` and ``line``, the socket to the zygote."""
        self.pid = pid
        self._pidfd, self._line, self._stderr = pidfd, line, stderr
        self._lock = threading.Lock()
        self._status: int | None = None
        self._ended = False

    def __del__(self) -> None:
        os.close(self._pidfd)
        self._line.close()

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Return whether it has ended, after waiting ``timeout_s`` at most."""
        with self._lock:
            if not self._ended and _readable(self._pidfd, timeout_s):
                reply = _receive(self._line, STATUS_S)[0]
                self._status = reply.get("status")
                self._ended = True
        if self._ended:
            self._stderr.end(self._status)
        return self._ended

    @property
    def exit_status(self) -> int | None:
        """The exit status, or minus the signal, once it has ended; None if the zygote ended before it."""
        return self._status

    def kill(self) -> None:
        """Kill the process, which may have ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


class ZygoteClient:
    """The driver's end of a zygote, its own or the one that it was forked from."""

    def __init__(self, environment: Mapping[str, str], listener: socket.socket) -> None:
        self.environment = import_time_environment(environment)
        self._order_socket = listener

    def fork(
        self,
        serve: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        control: socket.socket,
        *,
        cores: Sequence[int] = (),
        starts: bool = False,
        stderr: Stderr = INHERITED,
    ) -> ForkedProcess:
        """Fork a worker that serves ``control``. ``cores``: empty: those of the calling thread; ``starts``: whether it
        starts workers of its own. Raises NoForkError, ZygoteLostError.
        """
        reply = {
            "serve": serve,
            "arguments": list(arguments),
            "environment": dict(environment),
            "cores": list(cores) or sorted(os.sched_getaffinity(0)),
            "umask": _umask(),
            "limits": _limits(),
        }
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ExitStack() as after:
            after.callback(theirs.close)
            # Without a name, as it contains keys.
            file = after.enter_context(open(os.memfd_create("lamina-order"), "wb"))
            file.write(json.dumps(reply).encode())
            file.flush()
            directory = os.open(".", os.O_PATH | os.O_DIRECTORY)
            after.callback(os.close, directory)
            standard = [duplicate_standard_stream(fd, after) for fd in (1, stderr.fd)]
            fds = [file.fileno(), theirs.fileno(), directory, *standard, control.fileno()]
            fds += [self._order_socket.fileno()] if starts else []
            try:
                socket.send_fds(self._order_socket, [b"0"], fds, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
            except (BrokenPipeError, ConnectionResetError) as error:  # before its end can be waited for
                ours.close()
                raise ZygoteLostError("the zygote has ended") from error
            except OSError as error:
                ours.close()
                raise ZygoteLostError(f"the zygote accepts no order ({error.strerror})") from error
        try:
            self._await_reply(ours)
        except NoForkError:
            ours.close()
            raise
        answer, passed = _receive(ours, 0.0)
        if "pid" in answer and passed:
            return ForkedProcess(answer["pid"], passed[0], ours, stderr)
        ours.close()
        if "refused" in answer:
            raise NoForkError(f"the zygote refuses to fork: {answer['refused']}")
        raise ZygoteLostError("the zygote has ended")

    def _await_reply(self, line: socket.socket) -> None:
        """Wait for a reply or for the zygote's end. Raises NoForkError if it is late, ZygoteLostError if the zygote is
        stopped.
        """
        probe, stalls = StopProbe(), StallDetector[int](time.monotonic)
        deadline = time.monotonic() + FORK_S
        while not _readable(line.fileno(), min(LOOK_S, FORK_S)):
            if stalls.update([self.pid] if probe.is_stopped(self.pid) else []):
                raise ZygoteLostError(f"the zygote has been stopped for {STOPPED_S:g} s")
            if time.monotonic() >= deadline:
                raise NoForkError(f"the zygote has not replied for {FORK_S:g} s")

    @property
    def pid(self) -> int:
        """The zygote's process id, while it lives: it is the parent of a worker that it has forked."""
        return os.getppid()

    def close(self) -> None:
        self._order_socket.close()


class OwnedZygote(ZygoteClient):
    """A zygote that this process has started; it ends with this process, however that ends."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start the zygote. Returns before it has imported anything."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(environment, ours)
        held, self._life_line = os.pipe()
        fds = [theirs.fileno(), held]
        ends = ["--door-fd", str(fds[0]), "--life-line-fd", str(fds[1])]
        with ExitStack() as after:
            after.callback(theirs.close)
            after.callback(os.close, held)
            out = duplicate_standard_stream(1, after)
            before = signal.pthread_sigmask(
                signal.SIG_BLOCK, worker_process.END_SIGNALS
            )  # inherited, until it ignores them
            after.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
            command, environ = own_python("-m", "lamina.workers.zygote", *ends, *MODULES, environ=environment)

            def begin(stderr: Stderr) -> SpawnedProcess:
                return SpawnedProcess(
                    subprocess.Popen(
                        command,
                        pass_fds=fds,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=duplicate_standard_stream(stderr.fd, after),
                        env=environ,
                        process_group=0,
                    ),
                    stderr,
                )

            self._process = start_with_stderr("zygote", begin)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return not self._process.has_ended()

    def retire(self) -> None:
        """Give the process no more orders; it ends with the last of its workers."""
        super().close()

    def close(self) -> None:
        """Kill the process, which holds no state. Its workers continue."""
        super().close()
        os.close(self._life_line)
        self._process.kill()
        self._process.wait()

    def close_in_child(self) -> None:
        """Close the descriptors in a child of this process, which would otherwise keep the zygote alive."""
        super().close()
        os.close(self._life_line)


class ZygoteManager:
    """Finds or starts the zygote for workers of this process. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._own: OwnedZygote | None = None
        self._retired: list[OwnedZygote] = []
        self._parent: ZygoteClient | None = None
        # Environments whose workers are fresh processes from now on.
        self._failed_environments: list[Mapping[str, str]] = []
        self._closed = False

    def get(self, environment: Mapping[str, str], *, start: bool = True) -> ZygoteClient | None:
        """Return the zygote for workers with this environment; a new one may still be importing. None if one has failed
        with this environment, or this process ends, or there is none and ``start`` is False.
        """
        wanted = import_time_environment(environment)
        with self._lock:
            self._reap()
            if self._closed or wanted in self._failed_environments:
                return None
            if worker_process.door_fd is not None:  # this process was forked from one
                self._parent = ZygoteClient(os.environ, socket.socket(fileno=worker_process.door_fd))
                worker_process.door_fd = None
            if self._parent is not None and self._parent.environment == wanted:
                return self._parent
            is_there = self._own is not None and self._own.is_alive and self._own.environment == wanted
            if not is_there and not start:
                return None
            if self._own is not None and not self._own.is_alive:
                log.warning(RESTART_MESSAGE, "the zygote has ended")
            if not is_there:
                self._retire()
                self._own = OwnedZygote(environment)
            return self._own

    def _retire(self) -> None:
        """Let the present zygote end by itself."""
        if self._own is not None:
            self._own.retire()
            self._retired.append(self._own)
            self._own = None

    def _reap(self) -> None:
        """Close the retired zygotes that have ended by themselves."""
        for ended in [warm for warm in self._retired if not warm.is_alive]:
            self._retired.remove(ended)
            ended.close()

    def forget(self, warm: ZygoteClient, why: object) -> None:
        """Forget a zygote that has ended or stands still: the next one is new, and this process's own."""
        with self._lock:
            if warm is self._parent:
                self._parent = None
            elif warm is self._own:
                self._own = None
            else:
                return
        log.warning(RESTART_MESSAGE, why)
        warm.close()

    def give_up(self, warm: ZygoteClient, why: object) -> None:
        """Start workers of its environment as fresh processes from now on, so that none waits for it again."""
        with self._lock:
            reply = bool(self._failed_environments)
            self._failed_environments.append(warm.environment)
            if warm is self._own:
                self._retire()
            elif warm is self._parent:
                self._parent = None
                warm.close()
        if not reply:
            log.warning("workers start as fresh processes, which takes longer: %s", why)

    def close(self) -> None:
        """End all zygotes for good, at the end of this process."""
        with self._lock:
            self._closed = True
            left, self._own, self._retired = [*self._retired, *([self._own] if self._own else [])], None, []
        for warm in left:
            warm.close()

    def reset_in_child(self) -> None:
        """Forget all zygotes in a child of this process: they are its parent's."""
        left = [*self._retired, *([self._own] if self._own else [])]
        self._own, self._retired, self._lock = None, [], threading.Lock()
        for warm in left:
            warm.close_in_child()

    @property
    def pid(self) -> int | None:
        """The process id of this process's own zygote."""
        return self._own.pid if self._own is not None else None


def import_time_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that imports may have read."""
    return {name: value for name, value in environment.items() if not name.startswith(LATE)}


def duplicate_standard_stream(fd: int, after: ExitStack) -> int:
    """Return descriptor 1 or 2 of this process; if it is closed, one of /dev/null, which ``after`` closes."""
    try:
        os.fstat(fd)
    except OSError:
        fd = os.open(os.devnull, os.O_WRONLY)
        after.callback(os.close, fd)
    return fd


def _readable(fd: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


def _receive(line: socket.socket, timeout_s: float) -> tuple[dict[str, Any], list[int]]:
    """Return the next reply and its descriptors; both are empty if there is none."""
    if not _readable(line.fileno(), timeout_s):
        return {}, []
    try:
        data, fds, _, _ = socket.recv_fds(line, 4096, 1, socket.MSG_CMSG_CLOEXEC)
        answer = json.loads(data) if data else {}
    except (OSError, ValueError):
        return {}, []
    return (answer if isinstance(answer, dict) else {}), fds


def _umask() -> int:
    """Return this process's umask. os.umask would change it for a moment, in all threads."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1], 8) for line in lines if line.startswith("Umask:"))


def _limits() -> dict[str, tuple[int, int]]:
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {name: resource.getrlimit(getattr(resource, name)) for name in names}


START = ZygoteManager()
atexit.register(START.close)
os.register_at_fork(after_in_child=START.reset_in_child)
