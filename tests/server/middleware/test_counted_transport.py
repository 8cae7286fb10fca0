"""The bytes that a client has taken, over the sockets that a server listens on."""

from __future__ import annotations

import asyncio
import socket

import pytest
import uvloop

from lamina.server.middleware.counted_transport import CountedTransport

PIECE = b"x" * 4096


def pair(family: socket.AddressFamily) -> tuple[socket.socket, socket.socket]:
    if family == socket.AF_UNIX:
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listener.getsockname())
        return listener.accept()[0], socket.socket(fileno=client.detach())


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
def test_what_a_client_takes_is_counted_and_what_the_kernel_holds_is_not(family: socket.AddressFamily) -> None:
    async def work() -> None:
        ours, theirs = pair(family)
        writes = list[int]()
        made, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
        transport = CountedTransport(made, lambda: writes.append(transport.untaken))
        for _ in range(32):
            transport.write(PIECE)
        assert len(writes) == 32
        assert not transport.get_write_buffer_size(), "the kernel has all of it"
        held, taken = transport.untaken, transport.taken
        assert held > 16 * len(PIECE)
        theirs.settimeout(10)
        left = 32 * len(PIECE)
        while left:
            left -= len(theirs.recv(left))
        while transport.untaken:  # until the kernel has heard of it
            await asyncio.sleep(0)
        assert transport.taken == 32 * len(PIECE) > taken
        transport.abort()
        theirs.close()
        await asyncio.sleep(0)
        assert isinstance(transport.untaken, int), "also of a socket that is closed"

    uvloop.run(asyncio.wait_for(work(), 30))
