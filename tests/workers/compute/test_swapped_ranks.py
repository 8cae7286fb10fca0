"""An attacker on the path who has no key leads one rank's connections to other ranks than it means."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest
import torch

from lamina.netstack import ChannelError, HandshakeError
from lamina.netstack.host.tcp import TcpFabric
from lamina.ops.collective.mesh import MeshCollective, connect_mesh, listener_terms

KEY = b"k" * 32
RANKS = 3
WAIT_S = 10.0


@contextmanager
def relay(url: str) -> Iterator[str]:
    """A place on this host from where every byte goes on to ``url``, and back."""
    host, _, port = url.partition("://")[2].rpartition(":")
    place = socket.create_server(("127.0.0.1", 0))

    def carry(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with ExitStack() as held, suppress(OSError):
            while True:
                near, _ = place.accept()
                held.enter_context(near)
                far = held.enter_context(socket.create_connection((host, int(port))))
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=carry, args=ends, daemon=True).start()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{place.getsockname()[1]}"
    finally:
        place.shutdown(socket.SHUT_RDWR)
        thread.join(WAIT_S)
        place.close()


def gather(lead: Callable[[Sequence[str]], Sequence[str]]) -> list[Future[list[float]]]:
    """Returns what all_gather gives on each of three ranks; rank 0 goes by relays, to where ``lead`` sends each of
    them.
    """
    names = [f"rank {rank}" for rank in range(RANKS)]
    with ExitStack() as stack:
        fabrics = [stack.enter_context(closing(TcpFabric(KEY, seal=True))) for _ in range(RANKS)]
        listeners = [f.listen(reception=listener_terms(n, RANKS)) for f, n in zip(fabrics, names, strict=True)]
        urls = [listener.url for listener in listeners]
        led = [urls[0], *(stack.enter_context(relay(url)) for url in lead(urls[1:]))]

        def work(rank: int) -> list[float]:
            own = led if rank == 0 else urls
            try:
                mesh: MeshCollective = connect_mesh(
                    fabrics[rank], listeners[rank], own, names, rank, start_timeout_s=WAIT_S, step_timeout_s=WAIT_S
                )
                return list(mesh.all_gather(torch.tensor([float(rank)]), RANKS).tolist())
            except BaseException:
                for fabric in fabrics:
                    fabric.close()  # the others need not wait
                raise

        with ThreadPoolExecutor(RANKS) as pool:
            return [pool.submit(work, rank) for rank in range(RANKS)]


def test_a_relay_that_changes_nothing_is_no_matter() -> None:
    assert [of.result(0.0) for of in gather(lambda others: others)] == [[0.0, 1.0, 2.0]] * RANKS


def test_ranks_that_somebody_swaps_do_not_meet() -> None:
    """Else rank 0 would take what rank 2 sends for rank 1's: [0, 2, 1]."""
    found = gather(lambda others: others[::-1])
    with pytest.raises(HandshakeError, match="not the peer that we want, 'rank 1'"):
        found[0].result(0.0)
    for other in found[1:]:
        with pytest.raises(ChannelError):
            other.result(0.0)
