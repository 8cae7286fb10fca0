"""The time in which a prefill worker gets the beginning of a prompt from another one, over tcp between two processes of
this host. Mooncake's transfer engine is the reference: it reads as many bytes of another process's memory over tcp.

Ours is the code that serves (lamina/workers/prefill/prefix_fetch.py): asked, gathered from blocks, sent with a
checksum, compared, and put into blocks of the other store. Theirs is one read of memory that lies in one piece, by
`transfer_sync_read` of an environment of its own (--peer: its python; it needs libibverbs, also for tcp). Both take
turns. Prints one JSON line; --write appends it to perf/results/bench_fetch.jsonl.

    python perf/bench_fetch.py --peer ENVIRONMENT/bin/python --write
"""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from common import cpu_pressure, parser_of, record, spread
from peers.child import Child

from lamina import netstack
from lamina.config.engine_config import Deadlines, KVOptions
from lamina.config.partition import by_head
from lamina.ops.attention.spec import AttentionSpec
from lamina.protocol.control import Address
from lamina.protocol.prefix_fetch import ConnectPrefillPeers
from lamina.protocol.step_plan import BindRequest, FetchPrefix, Free, LayerShape, New, RowRange, SequenceOp, StepPlan
from lamina.workers.epoch_channels import EpochFabric, EpochListener
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.prefill.prefix_fetch import PrefixFetch, cached_prefixes, prefix_listener_terms

CPU, BLOCK, WAIT_S = torch.device("cpu"), 16, 60.0
PEER = Path(__file__).parent / "peers" / "mooncake_engine.py"


class Prefiller:
    """A store and its end of a view. The first of two has all of sequence 1."""

    def __init__(self, number: int, layers: int, most: int) -> None:
        shape = LayerShape(8, 8, 128, 128, AttentionSpec(scale=0.1).encode())
        token_bytes = layers * shape.kv_heads * (shape.qk_dim + shape.v_dim) * 2
        bind = BindRequest(
            worker=0, partition=by_head([shape.kv_heads] * layers, [1.0], 0), layers=[shape] * layers, dtype="bfloat16",
            kv=KVOptions(block_size=BLOCK, attention="native"), kv_bytes=token_bytes * (most + 8 * BLOCK),
            max_rows=most + BLOCK, max_model_len=most + 4 * BLOCK,
        )  # fmt: skip
        self.token_bytes, self._step = token_bytes, 0
        self._number, self._layers, self._store = number, layers, KvStore(bind, CPU)
        self._view = EpochFabric(1, netstack.open("tcp", key=b"k" * 32))
        self._door = EpochListener(
            netstack.open("tcp", key=b"k" * 32).listen("", prefix_listener_terms(f"p{number}", 2))
        )
        self.url, self._most = self._door.url, most

    def meet(self, urls: list[str]) -> None:
        peers = [Address(url, f"p{number}") for number, url in enumerate(urls)]
        source = cached_prefixes(self._store, ConnectPrefillPeers(peers=peers, own_index=self._number))
        self._own = PrefixFetch(self._store, source, self._view, Deadlines(step_timeout_s=WAIT_S))
        self._own.connect(self._door)
        if self._number == 0:
            self._begin([New(1)], [RowRange(1, 0, self._most)])

    def fetch(self, tokens: int) -> float:
        """Seconds for so many tokens of the other's sequence."""
        begun, sequence = time.perf_counter(), 2 + self._step
        ops: list[SequenceOp] = [New(sequence), FetchPrefix(sequence, 0, tokens, 0, 1)]
        self._begin(ops, [RowRange(sequence, tokens, 1)])
        for layer in range(self._layers):
            self._own.receive_layer(layer)
        took = time.perf_counter() - begun
        self._begin([Free(sequence)], [])
        return took

    def _begin(self, ops: list[SequenceOp], rows: list[RowRange]) -> None:
        self._step += 1
        plan = StepPlan(step=self._step, ops=ops, rows=rows)
        self._own.request(plan)
        self._store.apply_plan(plan)
        self._own.begin_step(plan)


def _hold(pipe: Connection, layers: int, most: int) -> None:
    holder = Prefiller(0, layers, most)
    pipe.send(holder.url)
    holder.meet([holder.url, pipe.recv()])
    pipe.recv()
    os._exit(0)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", default="16,128,512,2048", help="of a beginning, by comma")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--peer", default="", help="python of an environment with Mooncake's transfer engine")
    args = parser.parse_args()
    each = [int(tokens) for tokens in args.tokens.split(",")]
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    holder = context.Process(target=_hold, args=(there, args.layers, max(each)), daemon=True)
    holder.start()
    asker = Prefiller(1, args.layers, max(each))
    if not here.poll(WAIT_S):
        raise SystemExit("the process that holds the prompt does not start")
    urls = [here.recv(), asker.url]
    here.send(asker.url)
    asker.meet(urls)
    peer = Child(args.peer, str(PEER), [str(max(each) * asker.token_bytes)]) if args.peer else None
    figures = measure(asker, peer, each, args.rounds)
    print(record("bench_fetch", {**vars(args), "peer": bool(args.peer)}, figures, write=args.write))
    for tokens, told in figures["fetches"].items():
        print(tokens, {name: f"{1e3 * of['median']:.2f} ms" for name, of in told.items() if isinstance(of, dict)})
    if peer:
        peer.close()
    here.send(None)
    holder.join(10)


def measure(asker: Prefiller, peer: Child | None, each: list[int], rounds: int) -> dict[str, Any]:
    """Seconds by tokens, in turns."""
    fetches = dict[str, Any]()
    for tokens in each:
        ours, theirs, nbytes = list[float](), list[float](), tokens * asker.token_bytes
        for turn in range(rounds + 2):
            took = asker.fetch(tokens), peer.ask(nbytes=nbytes)["seconds"] if peer else 0.0
            if turn > 1:
                ours.append(took[0])
                theirs.append(took[1])
        told = {"nbytes": nbytes, "lamina_s": spread(ours)}
        fetches[str(tokens)] = {**told, "mooncake_s": spread(theirs)} if peer else told
    return {"fetches": fetches, "cpu_pressure_avg10": cpu_pressure()}


if __name__ == "__main__":
    main()
