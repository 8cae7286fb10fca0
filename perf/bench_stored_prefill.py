"""Seconds to the first token of a prompt whose beginning lies on disk, by a prefill worker and by compute workers.

Memory workers send each layer to the prefill worker as soon as they have loaded it. Rows of compute workers attend it
where it was loaded.

Two engines on the same cores take turns, each with a directory of its own. In each turn both get the same prompt: a
beginning that no pool and no prefill worker has, and new tokens. From both times the time is taken in which as many
bytes are read from the directory's files. Prints one JSON line; --write appends it to
perf/results/bench_stored_prefill.jsonl.

    python perf/bench_stored_prefill.py --write
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from common import BrokenError, cpu_pressure, parser_of, record, spread
from reference_model import SHAPE, make

from lamina import LLM, SamplingParams
from lamina.kv.pages import PAGE

TOKEN_BYTES = 4 * SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"] * 64  # K and V in bfloat16
BLOCK, SPARE_BYTES = 16, 1 << 20
SAVED_S = 60.0  # for what a request leaves to be saved
READ_BYTES = 1 << 20
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
AIM = 1.3


class StoredPrompts:
    """An engine and the directory of its KV."""

    def __init__(self, path: Path, folder: Path, args: argparse.Namespace, prefill_workers: int) -> None:
        self._folder = folder
        length = args.beginning + args.new + BLOCK
        one = f"{length * TOKEN_BYTES + SPARE_BYTES}" if prefill_workers else "auto"  # it keeps no earlier prompt
        self._llm = LLM(
            str(path), dtype="bfloat16", memory_workers=args.memory_workers, prefill_workers=prefill_workers,
            transport=args.transport, kv_store_dir=str(folder), prefill_chunk=args.chunk,
            max_model_len=length, kv_memory=args.kv_memory, max_num_seqs=4, prefill_kv_memory=one,
        )  # fmt: skip

    def ask(self, prompt: list[int], *, saves: bool = False) -> tuple[float, list[int], int]:
        """Returns the seconds to the first token, the tokens, and how many were stored. Leaves the pool empty.
        ``saves``: waits until its KV is on disk.
        """
        engine, before = self._llm.engine, self.count("kv_saved_bytes")
        (output,) = self._llm.generate([prompt], PARAMS)
        until = time.monotonic() + SAVED_S
        whole = len(prompt) // PAGE * PAGE * TOKEN_BYTES
        while saves and self.count("kv_saved_bytes") < before + whole and time.monotonic() < until:
            time.sleep(0.05)
        engine.release_idle_blocks()
        engine.finish_in_flight()
        engine.scheduler.evict_retained()
        assert output.times.first_token_s is not None
        seconds = output.times.first_token_s - output.times.arrival_s
        return seconds, list(output.outputs[0].token_ids), output.num_cached_tokens or 0

    def count(self, name: str, role: str = "") -> float:
        """The sum of a counter over the workers of a role."""
        return sum(s.get(name, 0.0) for worker, s in self._llm.stats().items() if worker.startswith(role))

    def read_s(self, nbytes: float) -> float:
        """The seconds to read so many bytes of the directory's files."""
        files = sorted((f for f in self._folder.rglob("*") if f.is_file()), key=lambda f: -f.stat().st_size)
        data, begun, left = bytearray(READ_BYTES), time.perf_counter(), nbytes
        for file in files:
            with file.open("rb", buffering=0) as source:
                while left > 0 and (count := source.readinto(memoryview(data)[: int(min(left, READ_BYTES))])):
                    left -= count
        if left > 0:
            raise BrokenError(f"the directory lacks {left} of {nbytes} bytes")
        return time.perf_counter() - begun

    def close(self) -> None:
        """End its workers."""
        self._llm.close()


def measure(path: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds by way, and their ratio. Raises BrokenError where tokens differ, or nothing was loaded or fetched."""
    draw = random.Random(0)
    ways = {name: StoredPrompts(path, folder / name, args, n) for name, n in (("pool", 0), ("prefill worker", 1))}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    reads, ratios, whole, pressure = list[float](), list[float](), list[float](), [cpu_pressure()]
    try:
        beginnings = [draw.choices(range(1, SHAPE["vocab_size"]), k=args.beginning) for _ in range(args.rounds + 1)]
        for beginning in beginnings:
            for way in ways.values():
                way.ask(beginning, saves=True)
        for number, beginning in enumerate(beginnings):
            prompt = beginning + draw.choices(range(1, SHAPE["vocab_size"]), k=args.new)
            took, found, nbytes = dict[str, float](), dict[str, list[int]](), 0.0
            for name in draw.sample(sorted(ways), len(ways)):
                before = [ways[name].count(x) for x in ("kv_loaded_bytes", "fetched_bytes")]
                took[name], found[name], cached = ways[name].ask(prompt)
                loaded, fetched = (
                    ways[name].count(x) - b for x, b in zip(("kv_loaded_bytes", "fetched_bytes"), before, strict=True)
                )
                if cached < args.beginning // PAGE * PAGE or not loaded or (name != "pool" and fetched != loaded):
                    raise BrokenError(f"{name}: {cached} tokens were stored, {loaded} bytes loaded, {fetched} fetched")
                nbytes = loaded
            if found["pool"] != found["prefill worker"]:
                raise BrokenError("a prefill worker gives other tokens")
            read = statistics.median(ways["pool"].read_s(nbytes) for _ in range(3))
            pressure.append(cpu_pressure())
            if number:  # the first one warms up
                reads.append(read)
                for name, each in took.items():
                    seconds[name].append(each)
                whole.append(took["prefill worker"] / took["pool"])
                ratios.append((took["prefill worker"] - read) / (took["pool"] - read))
            print(number, {name: f"{each:.3f}" for name, each in took.items()}, f"{read:.3f}", flush=True)
    finally:
        for way in ways.values():
            way.close()
    return {
        "first_token_s": {name: spread(each) for name, each in seconds.items()},
        "read_s": spread(reads),
        "nbytes": nbytes,
        "ratio": spread(whole),
        "ratio_less_read": spread(ratios),
        "aim": AIM,
        "cpu_pressure_avg10": pressure,
        "load_average": os.getloadavg(),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--beginning", type=int, default=2048, help="tokens that lie on disk")
    parser.add_argument("--new", type=int, default=320, help="tokens that are computed, more than a chunk")
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--memory-workers", type=int, default=1)
    parser.add_argument("--kv-memory", default="256MiB")
    parser.add_argument("--transport", default="shm")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = make(Path(folder) / "model", "bfloat16")
        figures = measure(path, Path(folder), args)
    print(record("bench_stored_prefill", vars(args), figures, write=args.write))


if __name__ == "__main__":
    main()
