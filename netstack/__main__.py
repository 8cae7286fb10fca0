"""Ping-pong between two processes: ``python -m lamina.netstack [SCHEME ...] [--bytes N] [--count N]``.

The child echoes every message. Prints the round trip's p50 and p99 and checks each echo's bytes.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
from time import perf_counter

from . import SCHEMES, Channel, ChannelError, Geometry, PeerFault, open

URL, KEY = "LAMINA_NETSTACK_URL", "LAMINA_NETSTACK_KEY"  # how the child gets them: never by its arguments
SLOTS = 4
WARM_UP = 200
TIMEOUT_S = 10.0


def echo(scheme: str, nbytes: int) -> None:
    """The child: send every message back until the peer closes."""
    geometry = Geometry(slots=SLOTS, slot_bytes=nbytes)
    fabric = open(scheme, key=bytes.fromhex(os.environ.pop(KEY)))
    channel = fabric.connect(os.environ[URL], outbound=geometry, inbound=geometry)
    try:
        while True:
            arrival = channel.wait_signal(timeout_s=TIMEOUT_S)
            slot = channel.reserve(arrival.data.nbytes, timeout_s=TIMEOUT_S)
            slot.data[:] = arrival.data
            channel.put_signal(slot, arrival.tag)
            channel.release(arrival)
    except PeerFault:
        pass  # the parent is done
    finally:
        fabric.close()


def ping(channel: Channel, nbytes: int, count: int) -> list[float]:
    """Round trips in seconds, sorted."""
    payload = [secrets.token_bytes(nbytes) for _ in range(2)]
    times = []
    for i in range(WARM_UP + count):
        start = perf_counter()
        slot = channel.reserve(nbytes, timeout_s=TIMEOUT_S)
        slot.data[:] = payload[i % 2]
        channel.put_signal(slot, i.to_bytes(8, "little"))
        arrival = channel.wait_signal(timeout_s=TIMEOUT_S)
        times.append(perf_counter() - start)
        if arrival.data != payload[i % 2] or int.from_bytes(arrival.tag, "little") != i:
            raise ValueError(f"echo {i} differs from what was sent")
        channel.release(arrival)
    return sorted(times[WARM_UP:])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lamina.netstack", description=__doc__)
    parser.add_argument("scheme", nargs="*", help="transports to measure (default: all between processes)")
    parser.add_argument("--bytes", type=int, default=4096, help="payload of a message (default: %(default)s)")
    parser.add_argument("--count", type=int, default=2000, help="round trips (default: %(default)s)")
    parser.add_argument("--echo", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    key = secrets.token_bytes(32)
    if args.echo:
        echo(args.scheme[0], args.bytes)
        return 0
    try:
        for scheme in args.scheme or SCHEMES:
            try:
                fabric = open(scheme, key=key)
            except ImportError as error:
                if args.scheme:
                    raise
                sys.stdout.write(f"{scheme}  skipped: {error}\n")
                continue
            if fabric.in_process:
                continue
            listener = fabric.listen()
            command = [sys.executable, "-m", "lamina.netstack", scheme, "--echo", "--bytes", str(args.bytes)]
            child = subprocess.Popen(command, env=os.environ | {URL: listener.url, KEY: key.hex()})
            try:
                times = ping(listener.accept(timeout_s=TIMEOUT_S), args.bytes, args.count)
            finally:
                fabric.close()
                child.wait(TIMEOUT_S)
            p50, p99 = (1e6 * times[int(len(times) * q)] for q in (0.50, 0.99))
            round_trip = f"round trip p50 {p50:.1f} us  p99 {p99:.1f} us  verified {args.count}"
            sys.stdout.write(f"{scheme}  {args.bytes} B  {round_trip}\n")
    except (ChannelError, ImportError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
