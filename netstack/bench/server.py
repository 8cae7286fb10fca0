"""The server's side of a measurement, and local servers in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import subprocess
from collections.abc import Iterator, Sequence
from time import monotonic, process_time

from lamina.netstack.contract.cluster_key import KEY
from lamina.netstack.contract.fabric import Channel, ChannelError, Fabric, Listener
from lamina.netstack.own_python import own_python

from .job import TIMEOUT_S, Job, receive, send
from .machine_facts import side_of
from .patterns import server_of

START_S = 30.0
LIFE_LINE = "LAMINA_BENCH_LIFE_LINE"  # a descriptor; when it ends, the client is gone


def serve(fabric: Fabric, listener: Listener, idle_s: float, cores: Sequence[int] = ()) -> None:
    """Serve one job after another until a client sends "end", or none comes for ``idle_s``. ``cores``: those to which
    this process is bound.
    """
    while True:
        channel = listener.accept(timeout_s=idle_s)
        try:
            job = Job.unpack(receive(channel, TIMEOUT_S))
            if job.pattern == "end":
                send(channel, b"{}", TIMEOUT_S)
                return
            if job.pattern == "facts":
                outcome = side_of(fabric, cores)
            else:
                outcome = _run(fabric, channel, job)
            send(channel, json.dumps(outcome).encode(), TIMEOUT_S)
            with contextlib.suppress(ChannelError):
                channel.wait_signal(timeout_s=TIMEOUT_S)  # until the client has read that and hangs up
        finally:
            channel.close()


def _run(fabric: Fabric, channel: Channel, job: Job) -> dict[str, float]:
    action = server_of(job)
    send(channel, b"ready", TIMEOUT_S)
    cpu_s = process_time()
    action(fabric, channel, job)
    return {"cpu_s": process_time() - cpu_s}


def watch_life_line() -> None:
    """End this process together with its parent, at any point."""
    import signal
    import threading

    fd = os.environ.pop(LIFE_LINE, "")
    if fd:

        def wait() -> None:
            os.read(int(fd), 1)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=wait, daemon=True).start()


@contextlib.contextmanager
def local_servers(scheme: str, key: bytes, cores: Sequence[int | None]) -> Iterator[list[str]]:
    """Yield the addresses of a server for each of ``cores`` (None: not bound), each in a process of its own. They end
    with the block, and with this process. Raises ChannelError when one does not start.
    """
    watched, held = os.pipe()
    servers: list[subprocess.Popen[str]] = []
    try:
        for core in cores:
            name = f"#server-{len(servers)}-{secrets.token_hex(8)}"
            words = ["bench", "--transport", scheme, "--listen", name]
            words += ["--cores", "none" if core is None else str(core)]
            # The key is never an argument, which every user of the host can read.
            own = os.environ | {KEY: key.hex(), LIFE_LINE: str(watched)}
            command, environment = own_python("-m", "lamina.netstack", *words, environ=own)
            servers.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    pass_fds=[watched],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        yield [_url(server, monotonic() + START_S) for server in servers]
    finally:
        for server in servers:
            server.kill()
            server.wait()
            if server.stdout:
                server.stdout.close()
        os.close(watched)
        os.close(held)


def _url(server: subprocess.Popen[str], deadline: float) -> str:
    if server.stdout is None:
        raise ChannelError("a server without output")
    ready, _, _ = select.select([server.stdout], [], [], max(0.0, deadline - monotonic()))
    words = server.stdout.readline().split() if ready else []
    if not words:
        raise ChannelError("a server did not start; its message is above")
    return words[-1]
