"""The cost of a decode step while KV is saved at full rate: milliseconds a step, with host memory or a directory.

--batch sequences decode after a prompt of --context tokens. In turns of --steps steps nothing is saved, or a retained
prompt of --saved tokens is, again and again, with no pause. For that the medium forgets its pages, and they are saved
once more. Of each pair of turns that follow one another the ratio of the medians counts. Pages a second show whether
saving keeps up: those that are saved, those that the steps fill meanwhile, and those that prompts fill where nothing
else is computed. Prints one JSON line; --write appends it to perf/results/bench_saving.jsonl.

    python perf/bench_saving.py --pairs 20 --write
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from common import BrokenError, cpu_pressure, parser_of, record, spread
from reference_model import make

from lamina import LLM, SamplingParams
from lamina.kv.pages import PAGE
from lamina.scheduler.kv_manager.offload_index import OffloadIndex
from lamina.scheduler.kv_manager.prefix_cache import PrefixCache

WORDS = 30_000
AHEAD = 2  # prompts that are to be saved while one is
IN_FLIGHT = 3  # steps of a turn that are begun or ended outside of its measured ones
SETTINGS = ("batch", "context", "saved", "steps", "pairs")


class SavingDecoder:
    """An engine whose sequences decode for as long as it is asked, and a prompt that it retains."""

    def __init__(self, path: Path, args: argparse.Namespace, medium: dict[str, Any]) -> None:
        draw = random.Random(0)
        steps = 2 * (args.steps + IN_FLIGHT) * args.pairs + 64
        self._llm = LLM(
            str(path), dtype="bfloat16", memory_workers=1, max_num_seqs=args.batch + 1, kv_memory="256MiB",
            max_model_len=max(args.context + steps, args.saved) + 16, **medium,
        )  # fmt: skip
        one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        self._llm.generate([[draw.randrange(1, WORDS) for _ in range(args.saved + 1)]], one)
        self._engine, tier = self._llm.engine, self._llm.engine.scheduler.features.get(OffloadIndex)
        assert tier is not None
        self._engine.finish_in_flight()
        self.page_bytes = self.saved_bytes() * tier.page_size / args.saved
        self._tier, prefixes = tier, self._engine.scheduler.features[PrefixCache]
        (number,) = prefixes.eviction_order
        self._known = prefixes.held_sequence(number)
        self._keys = tier.keys_of(self._known, args.saved)
        long = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
        began = time.perf_counter()
        for _ in range(args.batch):
            self._engine.add([draw.randrange(1, WORDS) for _ in range(args.context)], long)
        while self._engine.scheduler.num_waiting or not all(s.is_decoding for s in self._engine.scheduler.running):
            self._engine.step()
        self._engine.finish_in_flight()
        self.prompt_pages_s = args.batch * args.context / tier.page_size / (time.perf_counter() - began)

    def steps(self, count: int, *, saving: bool) -> list[float]:
        """Seconds of so many steps."""
        self._engine.finish_in_flight()
        took, last = list[float](), 0.0
        while len(took) < count + 1:
            if saving and len(self._tier._moving) < AHEAD * len(self._keys):
                self._engine.scheduler._pending_ops += self._tier.delete_ops(self._known.id, self._keys)
                self._engine.scheduler._pending_ops += self._tier.save_ops(
                    self._known, len(self._keys) * self._tier.page_size
                )
            if not self._engine.scheduler.num_running:
                raise BrokenError("the sequences have ended before their turns; more tokens are to be asked for")
            if self._engine.step():
                now = time.perf_counter()
                took.append(now - last)
                last = now
        return took[1:]

    def saved_bytes(self) -> float:
        """So far."""
        return sum(stats.get("kv_saved_bytes", 0.0) for stats in self._llm.stats().values())

    def close(self) -> None:
        """End its workers."""
        self._llm.close()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="", help="a directory; none: the reference model, made anew")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--saved", type=int, default=1024, help="tokens of what is saved")
    parser.add_argument("--steps", type=int, default=12, help="of a turn")
    parser.add_argument("--pairs", type=int, default=12, help="of turns")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(args.model) if args.model else make(Path(folder) / "model", "bfloat16")
        media = {
            "memory": {"kv_offloading_size": "1GiB"},
            "file": {"kv_store_dir": f"{folder}/kv", "kv_store_size": "2GiB"},
        }
        results = {name: measure(path, args, options) for name, options in media.items()}
    print(record("bench_saving", {name: getattr(args, name) for name in SETTINGS}, results, write=args.write))


def measure(path: Path, args: argparse.Namespace, medium: dict[str, Any]) -> dict[str, Any]:
    """Measures one medium."""
    player = SavingDecoder(path, args, medium)
    took: dict[bool, list[float]] = {False: [], True: []}
    ratios, rates, pressure = list[float](), list[float](), list[float]()
    try:
        for _ in range(args.pairs):
            middle = dict[bool, float]()
            for saving in random.sample([False, True], 2):
                before = player.saved_bytes()
                each = player.steps(args.steps, saving=saving)
                took[saving] += each
                middle[saving] = statistics.median(each)
                rates += [(player.saved_bytes() - before) / sum(each)] if saving else []
            ratios.append(middle[True] / middle[False])
            pressure.append(cpu_pressure())
    finally:
        player.close()
    if not min(rates):
        raise BrokenError("nothing was saved in a turn that was to save")
    return {
        "step_s": spread(took[False]),
        "step_saving_s": spread(took[True]),
        "ratio": spread(ratios),
        "ratio_of_all": statistics.median(took[True]) / statistics.median(took[False]),
        "saved_bytes_per_s": spread(rates),
        "pages_per_s": {
            "saved": statistics.median(rates) / player.page_bytes,
            "filled_by_steps": args.batch / PAGE / statistics.median(took[True]),
            "filled_by_prompts": player.prompt_pages_s,
        },
        "cpu_pressure_avg10": pressure,
    }


if __name__ == "__main__":
    main()
