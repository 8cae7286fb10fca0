"""The zygote: imports what workers need, computes nothing, and forks a worker for each request.

``python -m lamina.workers.zygote --door-fd N --life-line-fd M MODULE...``. It always has one thread: a fork copies only
the calling thread, so pools of threads started before would be lost, or wait for ever.

A request is one datagram at the request socket that brings descriptors. They are a file with the request's JSON, the
socket for replies, the directory, standard output, standard error, and the worker's control socket. For a worker that
will start workers, the other end of the request socket follows. Replies are {pid} with a descriptor of the process, or
{refused}; then {status} after the worker has ended. It reads nothing but descriptors and JSON.
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

PASSED_DESCRIPTORS = 7  # descriptors of a request, at most
MAX_REQUEST_BYTES = 16 << 20  # bytes of its JSON, at most
DEVICES = "/dev/nvidia"  # a parent's CUDA context is useless to its children
RESOURCE_LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]


class ForkRequest(NamedTuple):
    """The request to start one worker. ``order_socket``: -1 for none. ``arguments``: serve, arguments, environment,
    cores, umask, limits.
    """

    arguments: dict[str, Any]
    line: socket.socket
    directory: int
    stdout: int
    stderr: int
    control: int
    order_socket: int = -1

    def close(self) -> None:
        """Close the zygote's copies of the descriptors; the socket for replies stays open."""
        for fd in self[2:]:
            if fd >= 0:
                os.close(fd)


class Zygote:
    """Serves requests until its driver ends."""

    def __init__(self, listener: socket.socket, life_line: int, lacks: str) -> None:
        """``lacks``: the reason why no worker can be forked; "" for none."""
        self._request_socket, self._life_line, self._why_not = listener, life_line, lacks
        self._poll = select.poll()
        for fd in (listener.fileno(), life_line):
            self._poll.register(fd, select.POLLIN)
        # By descriptor of the process: pid, socket for replies.
        self._workers: dict[int, tuple[int, socket.socket]] = {}
        self._closed = False  # the request socket: no process can send requests any more

    def serve(self) -> ForkRequest | None:
        """Serve requests. Returns in the worker with its request, and in the zygote with None. The zygote returns at
        the driver's end, or after the request socket is closed and the last worker has ended.
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
        """Fork a worker. Returns True in the worker, False in the zygote."""
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
        """Close, in the worker, all descriptors of the zygote and of other workers."""
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
    """Return the next request; None if the datagram is not a valid one. Raises EOFError if none will follow."""
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
    """Send a reply; the process that made the request may have ended."""
    with suppress(OSError):
        socket.send_fds(line, [json.dumps(answer).encode()], fds, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)


def why_not_fork() -> str:
    """Return the reason why this process must not fork; "" if it has one thread, no GPU, and can watch its workers."""
    try:
        os.close(os.pidfd_open(os.getpid()))  # needed to notice the end of a worker
    except OSError as error:
        return f"it gets no descriptor of a process: {error.strerror}"
    if (threads := len(os.listdir("/proc/self/task"))) != 1:
        return f"it has {threads} threads"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "it has opened CUDA"
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing itself is closed by now
            if (name := os.readlink(f"/proc/self/fd/{fd}")).startswith(DEVICES):
                return f"it has opened {name}"
    return ""


def why_abandoned(line: socket.socket) -> str:
    """Return the reason to refuse a request that its sender abandoned, having started another worker; "" if it still
    waits.
    """
    poll = select.poll()
    poll.register(line, 0)
    return "its sender no longer waits for it" if poll.poll(0) else ""


def become_worker(order: ForkRequest) -> list[str]:
    """Make this process, the worker, like a fresh one with this request. Returns the arguments of lamina.workers."""
    given = order.arguments
    os.setpgid(0, 0)  # only the driver handles Ctrl-C
    os.fchdir(order.directory)
    for fd, standard in ((order.stdout, 1), (order.stderr, 2)):
        os.dup2(fd, standard)
    for fd in order[2:5]:
        os.close(fd)
    os.umask(given["umask"])
    for name, limits in given["limits"].items():
        if name in RESOURCE_LIMITS and tuple(limits) != resource.getrlimit(getattr(resource, name)):
            with suppress(OSError, ValueError):  # above the zygote's limit, which no user may raise
                resource.setrlimit(getattr(resource, name), limits)
    os.sched_setaffinity(0, given["cores"])  # before any thread starts
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
    """Seed again the generators that take their seed from the system in every process. Python's own reseeds after a
    fork.
    """
    for name, how in (("numpy", "random.seed"), ("torch", "seed")):
        if module := sys.modules.get(name):
            attrgetter(how)(module)()


def set_threads(wanted: int) -> None:
    """Set the sizes of thread pools as if OMP_NUM_THREADS had been ``wanted`` when OpenMP was loaded.

    That variable would count for all threads; now only the calling thread's size can be set. MKL derives its own size
    from it, which torch passes to OpenMP in each thread that computes: set here, it reaches them all. A torch without
    MKL needs torch.set_num_threads, which has a side effect: it wakes threads for the smallest loop.
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
    """Yield the shared libraries of this process whose file names begin with one of ``names``."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if "/" in line}
    yield from (ctypes.CDLL(path) for path in sorted(paths) if os.path.basename(path).startswith(names))


def threads_wanted() -> int:
    """Return the threads that OpenMP takes from OMP_NUM_THREADS (a list by level), else the cores of this process."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdigit() and int(first) else len(os.sched_getaffinity(0))


def set_process_title(arguments: Sequence[str]) -> None:
    """Show these arguments in ps, as far as they fit in the space of the zygote's."""
    name = b"lamina-worker"
    ctypes.CDLL(None).prctl(15, name, 0, 0, 0)  # PR_SET_NAME of prctl(2): what top shows
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc_pid_stat(5)
    if 0 < start < end:
        text = b"\0".join(os.fsencode(a) for a in arguments)[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def load(modules: Sequence[str]) -> str:
    """Import modules. Returns the reason of a failure, "" for success. MODULE:NAME also reads a name of a module that
    imports lazily; MODULE:NAME() calls it. MODULE? may be missing.
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
    """Discard exit handlers that imports have registered, useless to a worker, which ends at once. torch alone has 190
    of them. They touched 35 MB that a worker shares with this process, and took 36 ms of a core.
    """
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        finalizer.atexit = False


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lamina.workers.zygote", allow_abbrev=False)
    parser.add_argument("modules", metavar="MODULE", nargs="+", help="module to import")
    parser.add_argument("--door-fd", type=int, required=True, help="inherited socket of requests to start workers")
    parser.add_argument("--life-line-fd", type=int, required=True, help="inherited pipe that ends with the driver")
    args = parser.parse_args()
    ignore_end_signals()
    door, life_line = socket.socket(fileno=args.door_fd), args.life_line_fd
    # During imports this process cannot check: the kernel ends it by SIGIO when the driver's end of the pipe closes.
    fcntl.fcntl(life_line, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(life_line, fcntl.F_GETFL)
    fcntl.fcntl(life_line, fcntl.F_SETFL, flags | os.O_ASYNC)
    if select.select([life_line], [], [], 0)[0]:
        return
    import_module("lamina.observe.log_lines").log_as_told("zygote")
    gc.disable()  # imports leave hardly any garbage, and collections would take a sixth of their time
    lacks = load(args.modules)
    drop_exit_handlers()
    fcntl.fcntl(life_line, fcntl.F_SETFL, flags)
    gc.collect()
    gc.freeze()  # a collection would copy the pages of all imports, in every worker
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
