"""Asks a server for /health ten times a second, until a line comes on standard input; then prints [status, seconds] of
each request. A process of its own, so that a busy load generator does not lengthen the times.
"""

from __future__ import annotations

import http.client
import json
import select
import sys
import time
from urllib.parse import urlsplit

EVERY_S = 0.1


def main(url: str) -> None:
    place, answers = urlsplit(url), []
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=30)
    while not select.select([sys.stdin], [], [], EVERY_S)[0]:
        start = time.perf_counter()
        connection.request("GET", "/health")
        response = connection.getresponse()
        response.read()
        answers.append((response.status, time.perf_counter() - start))
    print(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1])
