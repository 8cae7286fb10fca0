"""Q shipped to a creditor, or its K and V fetched: times over emulated links (arXiv 2401.02669, figure 12).

Of a layer of a Llama 8B shape in half precision a creditor has so many tokens, as four nodes of the merge tree.
Shipped: one row's Q goes there, and the partial results come back. Fetched: K and V of all these tokens come, to be
attended at home. Both ends are threads of this process over the loopback transport, through an emulated link of so many
gigabits a second that delays each message by its bytes. These are therefore times of the wire and of this host's
copies. Attention is the same in both cases, and is left out. Prints a JSON line for each length and link; --write
appends them to perf/results/bench_loan_bytes.jsonl.

    python perf/bench_loan_bytes.py --write        # half a minute
"""

from __future__ import annotations

import secrets
import threading
import time

from common import cpu_pressure, parser_of, record, spread

from lamina import netstack
from lamina.netstack import Channel, Geometry, Terms

Q_HEADS, KV_HEADS, DIM, HALF, FLOAT, NODES = 32, 8, 128, 2, 4, 4
Q_BYTES = Q_HEADS * DIM * HALF
BACK_BYTES = NODES * Q_HEADS * (DIM + 1) * FLOAT  # results and log-sum-exps
TOKEN_BYTES = 2 * KV_HEADS * DIM * HALF  # of K and V
LATENCY_MS = 0.01
SLOT_BYTES, WAIT_S = 1 << 20, 60.0


def ends(gbps: float) -> tuple[Channel, Channel]:
    """The ends of a channel over such a link."""
    fabric = netstack.open(f"emulate+loopback?latency_ms={LATENCY_MS}&gbps={gbps:g}", key=secrets.token_bytes(32))
    listener, inbox = fabric.listen(), Geometry(slots=64, slot_bytes=SLOT_BYTES)
    accepted = list[Channel]()
    accepting = threading.Thread(target=lambda: accepted.append(listener.accept(timeout_s=WAIT_S)))
    accepting.start()
    here = fabric.connect(listener.url, Terms(outbound=inbox, inbound=inbox), timeout_s=WAIT_S)
    accepting.join()
    return here, accepted[0]


def send(channel: Channel, nbytes: int) -> None:
    """In messages of a slot each."""
    for start in range(0, nbytes, SLOT_BYTES):
        slot = channel.reserve(min(SLOT_BYTES, nbytes - start), timeout_s=WAIT_S)
        slot.data[:] = bytes(slot.data.nbytes)
        channel.put_signal(slot, b"")


def receive(channel: Channel, nbytes: int) -> None:
    """Receives as many bytes."""
    while nbytes > 0:
        arrival = channel.wait_signal(timeout_s=WAIT_S)
        nbytes -= arrival.data.nbytes
        channel.release(arrival)


def timed(home: Channel, creditor: Channel, there: int, back: int, repeats: int) -> list[float]:
    """Seconds from the first byte that goes ``there`` to the last one that comes ``back``."""

    def answer() -> None:
        for _ in range(repeats):
            receive(creditor, there)
            send(creditor, back)

    def ask() -> float:
        start = time.perf_counter()
        send(home, there)
        receive(home, back)
        return time.perf_counter() - start

    answering = threading.Thread(target=answer)
    answering.start()
    seconds = [ask() for _ in range(repeats)]
    answering.join()
    return seconds


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--lengths", default="8192,32768,131072", help="tokens that the creditor has, by comma")
    parser.add_argument("--gbps", default="10,25,100", help="gigabits a second of the link, by comma")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    def many(nbytes: int) -> int:
        return int(args.repeats) * (1 if nbytes > 1 << 24 else 8)

    for gbps in map(float, args.gbps.split(",")):
        home, creditor = ends(gbps)
        shipped = timed(home, creditor, Q_BYTES, BACK_BYTES, many(BACK_BYTES))
        for length in map(int, args.lengths.split(",")):
            fetched = timed(home, creditor, 1, length * TOKEN_BYTES, many(length * TOKEN_BYTES))
            settings = {"tokens": length, "gbps": gbps, "latency_ms": LATENCY_MS, "repeats": args.repeats}
            ratio = spread(fetched)["median"] / spread(shipped)["median"]
            result = {
                "shipped_bytes": Q_BYTES + BACK_BYTES, "fetched_bytes": length * TOKEN_BYTES,
                "shipped_s": spread(shipped), "fetched_s": spread(fetched), "fetched_over_shipped": round(ratio, 1),
                "cpu_pressure_avg10": cpu_pressure(),
            }  # fmt: skip
            print(record("bench_loan_bytes", settings, result, write=args.write), flush=True)
        home.close()
        creditor.close()


if __name__ == "__main__":
    main()
