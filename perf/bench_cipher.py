"""The cost of encrypting what leaves a host: bytes a second of one core, and round trips of a channel.

Contenders take turns of a few calls each, on one core. ``blake2b`` is a code over clear text (hashlib's, keyed), which
frames carried before they were encrypted; ``crc32c`` is what they carry within one host. Floor: one read of the memory.
Round trips are between two threads over loopback, in clear and sealed, in turns.

    python perf/bench_cipher.py [--write]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import struct
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from common import cpu_pressure, record, spread

from lamina.netstack import Channel, Geometry, Terms
from lamina.netstack.host.native_module import bounce, check, seal, unseal
from lamina.netstack.host.tcp import TcpFabric

KEY = bytes(range(32))
SIZES = {"256 B": 256, "4 KiB": 4 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20}
TURN_S = 0.01  # of one contender
LIMIT_S = 30.0
Spread = dict[str, float]


def contenders(data: bytes) -> dict[str, Callable[[int], object]]:
    """Returns, by name, a call that guards ``data``; its argument differs from call to call."""
    sealed = seal(KEY, 1, data)
    return {
        "aes-256-gcm, sealed": lambda n: seal(KEY, n, data),
        "aes-256-gcm, opened": lambda n: unseal(KEY, 1, sealed),
        "blake2b": lambda n: hashlib.blake2b(data, key=KEY, digest_size=16).digest(),
        "crc32c": lambda n: check(2, n, data),
    }


def throughput(nbytes: int, turns: int) -> dict[str, Spread]:
    """GB/s of one core, by name."""
    rates = dict[str, list[float]]()
    calls = contenders(os.urandom(nbytes))
    for _ in range(turns):
        for name, call in calls.items():
            count, start = 0, time.perf_counter()
            while (took := time.perf_counter() - start) < TURN_S:
                call(count)
                count += 1
            rates.setdefault(name, []).append(count * nbytes / took / 1e9)
    return {name: spread(values) for name, values in rates.items()}


def round_trips(nbytes: int, turns: int, rounds: int) -> dict[str, Spread]:
    """Microseconds of one round trip: medians of turns, in clear and sealed."""
    medians = dict[str, list[float]]()
    geometry = Geometry(slots=4, slot_bytes=nbytes)
    payloads = os.urandom(3 * nbytes)

    def play(channel: Channel, leads: bool) -> bytes:
        return bounce(channel, payloads, rounds, leads, False, LIMIT_S)  # type: ignore[arg-type]

    with ThreadPoolExecutor(2) as pool:
        for _ in range(turns):
            for name, sealed in (("clear", False), ("sealed", True)):
                with closing(TcpFabric(KEY, seal=sealed)) as fabric:
                    listener = fabric.listen()
                    accepted = pool.submit(listener.accept, timeout_s=LIMIT_S)
                    near = fabric.connect(listener.url, Terms(outbound=geometry, inbound=geometry))
                    follower = pool.submit(play, accepted.result(), False)
                    data = pool.submit(play, near, True).result()
                    follower.result()
                times = sorted(struct.unpack(f"<{len(data) // 8}Q", data))
                medians.setdefault(name, []).append(times[len(times) // 2] / 1e3)
    return {name: spread(values) for name, values in medians.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--turns", type=int, default=25, help="of each contender (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=300, help="round trips of a turn (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="append the row to perf/results/bench_cipher.jsonl")
    args = parser.parse_args()
    if min(args.turns, args.rounds) < 1:
        parser.error("--turns and --rounds must be 1 or more")
    before = cpu_pressure()
    trips = {name: round_trips(nbytes, max(1, args.turns // 5), args.rounds) for name, nbytes in SIZES.items()}
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    gb_s = {name: throughput(nbytes, args.turns) for name, nbytes in SIZES.items()}
    os.sched_setaffinity(0, cores)
    results = {"gb_s_of_a_core": gb_s, "round_trip_us": trips, "cpu_pressure": [before, cpu_pressure()]}
    print(record("bench_cipher", {"turns": args.turns, "rounds": args.rounds}, results, write=args.write))
    return 0


if __name__ == "__main__":
    sys.exit(main())
