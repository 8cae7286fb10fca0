"""The warm process: imports what workers need, computes nothing, and forks a worker for each order.

``python -m lamina.workers.zygote --door-fd N --life-line-fd M MODULE...``. It has one thread for all its life: a fork
copies the calling thread alone, and pools of threads that had started before would be lost or stand still for ever.

An order is one datagram at the door, with these descriptors: the order's JSON in a file, the line for answers, the
directory, standard output, standard error, the worker's control socket, and for a worker that is to start workers the
other side of the door. Over the line go {pid} with a descriptor of
the process or {refused}, then {status} when the worker has ended. Nothing but descriptors and JSON is read.
"""

from __future__ import annotations

import argparse
import array
import ctypes
import fcntl
import gc
import json
import os
import resource
import select
import socket
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from lamina.netstack.own_python import own_python

from .worker_process import ExitPromptly, ignore_end_signals

PASSED_DESCRIPTORS = 7  # descriptors of an order, at most
MAX_REQUEST_BYTES = 16 << 20  # bytes of its JSON
DEVICES = "/dev/nvidia"  # a CUDA context of a parent is of no use to its children
RESOURCE_LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]


class ForkRequest(NamedTuple):
    """The start of one worker. ``order_socket``: -1 = none.

    ``arguments``: serve, arguments, environment, cores, umask, limits.
    """

    arguments: dict[str, Any]
    line: socket.socket
    directory: int
    stdout: int
    stderr: int
    control: int
    order_socket: int = -1

    def close(self) -> None:
        """The warm process's own copies; the line stays."""
        for fd in self[2:]:
            if fd >= 0:
                os.close(fd)


class Zygote:
    """Serves orders until its driver is gone."""

    def __init__(self, listener: socket.socket, life_line: int, lacks: str) -> None:
        """``lacks``: why no worker can be forked; "" = nothing."""
        self._request_socket, self._life_line, self._why_not = listener, life_line, lacks
        self._poll = select.poll()
        for fd in (listener.fileno(), life_line):
            self._poll.register(fd, select.POLLIN)
        self._workers: dict[int, tuple[int, socket.socket]] = {}  # by descriptor of the process: pid, line
        self._closed = False  # the door: nobody can order any more

    def serve(self) -> ForkRequest | None:
        """Returns in the worker, with its order, and in the warm process, with None: at the driver's end, or once the
        door is closed and the last worker has ended.
        """
        while not self._closed or self._workers:
            for fd, _ in self._poll.poll():
                if fd in self._workers:
                    self._reap(fd)
                elif fd == self._life_line:
                    return None
                elif (order := self._take()) and self._fork(order):
                    return order
        return None

    def _take(self) -> ForkRequest | None:
        try:
            return receive_request(self._request_socket)
        except EOFError:
            self._poll.unregister(self._request_socket)
            self._closed = True
            return None

    def _fork(self, order: ForkRequest) -> bool:
        """Whether this is the worker now."""
        sys.stdout.flush()
        sys.stderr.flush()
        why, pid = self._why_not or why_not_fork() or why_abandoned(order.line), -1
        if not why:
            try:
                pid = os.fork()
            except OSError as error:
                why = f"fork: {error.strerror}"
        if pid == 0:
            self._leave(order)
            return True
        order.close()
        if why:
            reply(order.line, {"refused": why})
            order.line.close()
            return False
        process = os.pidfd_open(pid)
        self._workers[process] = pid, order.line
        self._poll.register(process, select.POLLIN)
        reply(order.line, {"pid": pid}, [process])
        return False

    def _leave(self, order: ForkRequest) -> None:
        """In the worker: nothing of the warm process stays open, and nothing of other workers."""
        for fd, (_, line) in self._workers.items():
            os.close(fd)
            line.close()
        order.line.close()
        os.close(self._life_line)
        self._request_socket.close()

    def _reap(self, process: int) -> None:
        pid, line = self._workers.pop(process)
        self._poll.unregister(process)
        os.close(process)
        _, status = os.waitpid(pid, 0)
        reply(line, {"status": os.waitstatus_to_exitcode(status)})
        line.close()


def receive_request(listener: socket.socket) -> ForkRequest | None:
    """The next order; None for what is none. Raises EOFError where none will come."""
    number = array.array("i")
    data, parts, _, _ = listener.recvmsg(
        1, socket.CMSG_SPACE(PASSED_DESCRIPTORS * number.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    if not data:
        raise EOFError
    for level, kind, rights in parts:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            number.frombytes(rights[: len(rights) - len(rights) % number.itemsize])
    try:
        file, line, *rest = number
        given = json.loads(os.pread(file, MAX_REQUEST_BYTES, 0))
        os.close(file)
        return ForkRequest(given, socket.socket(fileno=line), *rest)
    except (ValueError, TypeError, OSError):
        for fd in number:
            with suppress(OSError):
                os.close(fd)
        return None


def reply(line: socket.socket, answer: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Whoever ordered may be gone."""
    with suppress(OSError):
        socket.send_fds(line, [json.dumps(answer).encode()], fds, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)


def why_not_fork() -> str:
    """Why this process must not fork, "" where it may: it has one thread, no GPU, and can watch its workers."""
    try:
        os.close(os.pidfd_open(os.getpid()))  # by which the end of a worker is seen
    except OSError as error:
        return f"it gets no descriptor of a process: {error.strerror}"
    if (threads := len(os.listdir("/proc/self/task"))) != 1:
        return f"it has {threads} threads"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "it has opened CUDA"
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # of the listing itself
            if (name := os.readlink(f"/proc/self/fd/{fd}")).startswith(DEVICES):
                return f"it has opened {name}"
    return ""


def why_abandoned(line: socket.socket) -> str:
    """Why nobody waits for the answer any more, "" where somebody does: who gave up has started another worker."""
    poll = select.poll()
    poll.register(line, 0)
    return "nobody waits for it" if poll.poll(0) else ""


def become_worker(order: ForkRequest) -> list[str]:
    """Make this process, the worker, what a fresh one with this order would be. Returns lamina.workers' arguments."""
    given = order.arguments
    os.setpgid(0, 0)  # Ctrl-C is the driver's to handle
    os.fchdir(order.directory)
    for fd, standard in ((order.stdout, 1), (order.stderr, 2)):
        os.dup2(fd, standard)
    for fd in order[2:5]:
        os.close(fd)
    os.umask(given["umask"])
    for name, limits in given["limits"].items():
        if name in RESOURCE_LIMITS and tuple(limits) != resource.getrlimit(getattr(resource, name)):
            with suppress(OSError, ValueError):  # above the limit of the warm process, which no user may raise
                resource.setrlimit(getattr(resource, name), limits)
    os.sched_setaffinity(0, given["cores"])  # before any thread is made
    os.environ.clear()
    os.environ.update(given["environment"])
    arguments = [given["serve"], "--control-fd", str(order.control), *given["arguments"]]
    if order.order_socket >= 0:
        arguments += ["--door-fd", str(order.order_socket)]
    sys.argv[:] = [str(Path(__file__).with_name("__main__.py")), *arguments]
    set_process_title(own_python("-m", "lamina.workers", *arguments)[0])
    reseed()
    return arguments


def reseed() -> None:
    """Generators that begin with a number of the system's in every process. Python's own does so after a fork."""
    for name, how in (("numpy", "random.seed"), ("torch", "seed")):
        if module := sys.modules.get(name):
            attrgetter(how)(module)()


def set_threads(wanted: int) -> None:
    """Pools of threads, as they would be had OMP_NUM_THREADS been ``wanted`` when OpenMP was loaded.

    That count would be every thread's; now it can be set for the calling one alone. MKL makes a number of its own of
    it, which torch gives to OpenMP in each thread that computes: fixed here, it reaches them all.
    torch.set_num_threads, for a torch without MKL, does more: once called, it wakes threads for the smallest loop.
    """
    openmp = list(mapped_libraries("libgomp", "libiomp", "libomp.", "libomp-"))
    for library in openmp:
        library.omp_set_num_threads(wanted)
    try:
        for mkl in mapped_libraries("libtorch_cpu"):
            threads = mkl.mkl_get_max_threads()
            mkl.mkl_serv_set_num_threads(threads)
            for library in openmp:
                library.omp_set_num_threads(threads)
    except AttributeError:
        sys.modules["torch"].set_num_threads(wanted)


def mapped_libraries(*names: str) -> Iterator[ctypes.CDLL]:
    """Shared libraries of this process whose file's name begins so."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if "/" in line}
    yield from (ctypes.CDLL(path) for path in sorted(paths) if os.path.basename(path).startswith(names))


def threads_wanted() -> int:
    """The threads that OpenMP would take from OMP_NUM_THREADS (a list by level), else the cores of this process."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdigit() and int(first) else len(os.sched_getaffinity(0))


def set_process_title(arguments: Sequence[str]) -> None:
    """These are the arguments that ps shows, as far as there is room where those of the warm process were."""
    name = b"lamina-worker"
    ctypes.CDLL(None).prctl(15, name, 0, 0, 0)  # PR_SET_NAME of prctl(2): what top shows
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc_pid_stat(5)
    if 0 < start < end:
        text = b"\0".join(os.fsencode(a) for a in arguments)[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def load(modules: Sequence[str]) -> str:
    """Import these; MODULE:NAME also where a module imports lazily, and MODULE:NAME() is called. MODULE? may be one
    that was not built. Returns why that failed, "" where it did not.
    """
    try:
        for module, _, name in (each.partition(":") for each in modules):
            if module.endswith("?"):
                with suppress(ImportError):
                    import_module(module[:-1])
                continue
            imported = import_module(module)
            if name.endswith("()"):
                getattr(imported, name[:-2])()
            elif name:
                getattr(imported, name)
    except Exception as error:  # noqa: BLE001 - a worker that imports the module reports the same error
        return f"{type(error).__name__}: {error}"
    return ""


def drop_exit_handlers() -> None:
    """What imports have asked to be finalized at exit is of no use to a worker, which ends at once. Of torch alone
    these are 190 objects, whose turns touched 35 MB that a worker shares with this process, and took 36 ms of a core.
    """
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        finalizer.atexit = False


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lamina.workers.zygote", allow_abbrev=False)
    parser.add_argument("modules", metavar="MODULE", nargs="+", help="what to import")
    parser.add_argument("--door-fd", type=int, required=True, help="inherited socket that brings orders")
    parser.add_argument("--life-line-fd", type=int, required=True, help="inherited pipe that ends with the driver")
    args = parser.parse_args()
    ignore_end_signals()
    door, life_line = socket.socket(fileno=args.door_fd), args.life_line_fd
    # While it imports nobody looks: the kernel ends this process, by SIGIO, when the driver's end of the pipe closes.
    fcntl.fcntl(life_line, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(life_line, fcntl.F_GETFL)
    fcntl.fcntl(life_line, fcntl.F_SETFL, flags | os.O_ASYNC)
    if select.select([life_line], [], [], 0)[0]:
        return
    gc.disable()  # imports leave hardly any garbage: to look for it again and again is a sixth of their time
    lacks = load(args.modules)
    drop_exit_handlers()
    fcntl.fcntl(life_line, fcntl.F_SETFL, flags)
    gc.collect()
    gc.freeze()  # a collection would copy the pages of all that is imported, in every worker
    gc.enable()
    order = Zygote(door, life_line, lacks).serve()
    if order is not None:
        arguments = become_worker(order)
        set_threads(threads_wanted())
        from .__main__ import main as work

        work(arguments)


if __name__ == "__main__":
    end = ExitPromptly()
    main()
    end.status = 0
