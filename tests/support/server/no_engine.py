"""A server process without an engine, for tests of connections: python no_engine.py FILES OPTIONS.

FILES: its limit on open files; OPTIONS: JSON of ServerConfig. It prints its port.
"""

from __future__ import annotations

import json
import resource
import socket
import sys

import uvloop
from fake import make_service

from lamina.server.run import HttpServer

if __name__ == "__main__":
    files = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]

        async def serve() -> None:
            await HttpServer(make_service(**json.loads(sys.argv[2])), lambda: print(port, flush=True)).run(sock)

        uvloop.run(serve())
