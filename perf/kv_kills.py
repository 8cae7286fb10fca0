"""Memory workers that are killed while KV is saved to a directory and loaded from it. The pool is too small to keep a
request's beginning, so each request finds it in storage. As soon as some transfer is under way, one memory worker gets
SIGKILL, up to --spread milliseconds later. Every request must get the tokens that it gets without a store and without
kills, and blocks must all be free afterwards. At the end the directory must have no file that its index does not know,
and no damage. Prints counts; --write appends a line to perf/results/kv_kills.jsonl.

    python perf/kv_kills.py --kills 200 --write    # 5 minutes of two cores
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from common import BrokenError, parser_of, record
from reference_model import make

from lamina import LLM, SamplingParams
from lamina.kv.disk_store.maintenance import DamagedPage, verify
from lamina.kv.disk_store.page_index import PageIndex
from lamina.kv.disk_store.store_directory import StoreDirectory, store_secret
from lamina.protocol.step_plan import LoadKv, SaveKv
from lamina.scheduler.kv_manager.offload_index import OffloadIndex

SHAPE = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 128, "vocab_size": 320,
}  # fmt: skip
OPTIONS: dict[str, Any] = {"dtype": "float32", "deterministic": True, "prefill_chunk": 64, "max_model_len": 480}
OPTIONS["max_recoveries"] = 1_000_000
PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
PATIENCE_S = 60.0  # for a transfer to begin


class TransferKiller:
    """Kills a memory worker of an engine, soon after a transfer has begun."""

    def __init__(self, llm: LLM, draw: random.Random, spread_s: float) -> None:
        self._llm, self._draw, self._spread_s = llm, draw, spread_s
        self.hits = Counter[str]()  # kills, by what was under way then

    @contextmanager
    def during(self, wanted: type[SaveKv | LoadKv]) -> Iterator[None]:
        """One kill, as soon as such a transfer is under way, while the block goes on."""
        over = threading.Event()
        thread = threading.Thread(target=self._wait_and_kill, args=(over, wanted))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _wait_and_kill(self, over: threading.Event, wanted: type[SaveKv | LoadKv]) -> None:
        delay_s = self._draw.uniform(0.0, self._spread_s)
        end = time.monotonic() + PATIENCE_S
        while not any(isinstance(op, wanted) for op in self._moving()):
            if over.is_set() or time.monotonic() > end:
                return
            time.sleep(0.0002)
        time.sleep(delay_s)
        kinds = {"load" if isinstance(op, LoadKv) else "save" for op in self._moving()}
        os.kill(self._llm.pools.pids[f"memory-{self._draw.randrange(2)}"], signal.SIGKILL)
        self.hits[" and ".join(sorted(kinds)) or "just after one"] += 1

    def _moving(self) -> list[SaveKv | LoadKv]:
        tier = self._llm.engine.scheduler.features.get(OffloadIndex)
        assert tier is not None
        return [moving.op for moving in list(tier._moving.values())]


def prompts(draw: random.Random) -> list[list[int]]:
    """Conversations: some begin with the same tokens."""
    begun = [[draw.randrange(5, 320) for _ in range(200)] for _ in range(4)]
    return [[*draw.choice(begun), *(draw.randrange(5, 320) for _ in range(draw.randint(1, 200)))] for _ in range(12)]


def answers(llm: LLM, some: list[list[int]]) -> list[tuple[list[int], int]]:
    """Tokens, and how many had their KV."""
    outputs = llm.generate(some, PARAMS)
    return [(list(o.outputs[0].token_ids), o.num_cached_tokens or 0) for o in outputs]


def check_directory(path: Path) -> dict[str, int]:
    """Raises BrokenError."""
    with closing(StoreDirectory(str(path), make=False)) as folder:
        names = {name for name in folder.list_names() if name.startswith("segment-")}
        with closing(PageIndex(folder)) as index:
            known = {f"segment-{number:06d}" for number in index.segments()}
            pages = len(index.entries())
        damaged = sum(isinstance(each, DamagedPage) for each in verify(folder, store_secret(folder, make=False)))
    if names != known or damaged:
        raise BrokenError(f"files {sorted(names ^ known)} are not in both, {damaged} damaged atoms")
    return {"pages": pages, "segments": len(names)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=20, help="(20)")
    parser.add_argument("--spread", type=float, default=4.0, help="milliseconds after a transfer's begin (4)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="seconds, after which no worker is killed")
    args = parser.parse_args()
    draw = random.Random(args.seed)
    asked = prompts(draw)
    with tempfile.TemporaryDirectory() as folder:
        path, store = make(Path(folder) / "model", "float32", SHAPE, max_len=512), Path(folder) / "kv"
        with LLM(str(path), enable_prefix_caching=False, **OPTIONS) as llm:
            wanted = {tuple(prompt): tokens for prompt, (tokens, _) in zip(asked, answers(llm, asked), strict=True)}
        cached = requests = 0
        small: dict[str, Any] = {
            "kv_memory": "700KB",
            "kv_store_dir": str(store),
            "kv_store_size": "1536KiB",
            "memory_workers": 2,
        }
        with LLM(str(path), **OPTIONS, **small) as llm:
            free, killer = llm.engine.free_blocks, TransferKiller(llm, draw, args.spread / 1000)
            end = time.monotonic() + args.limit_s
            while killer.hits.total() < args.kills and time.monotonic() < end:
                some, wanted_now = draw.sample(asked, 2), draw.choice((SaveKv, LoadKv))
                if wanted_now is SaveKv:  # all is to be saved again
                    llm.reset_prefix_cache()
                with killer.during(wanted_now):
                    answered = answers(llm, some)
                for prompt, (tokens, had) in zip(some, answered, strict=True):
                    if tokens != wanted[tuple(prompt)]:
                        raise BrokenError(f"after {killer.hits}: {tokens} in place of {wanted[tuple(prompt)]}")
                    cached, requests = cached + had, requests + 1
                llm.engine.scheduler.evict_retained()
                llm.engine.release_idle_blocks()
                if llm.engine.free_blocks != free:
                    raise BrokenError(f"{llm.engine.free_blocks} blocks are free, of {free}")
                print(f"{killer.hits.total()} kills", file=sys.stderr)
        left = check_directory(store)
    settings = {"kills": killer.hits.total(), "spread_ms": args.spread, "seed": args.seed}
    results = {"hits": dict(killer.hits), "requests": requests, "wrong": 0, "cached_tokens": cached, **left}
    print(record("kv_kills", settings, results, write=args.write))


if __name__ == "__main__":
    main()
