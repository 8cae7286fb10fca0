"""Decode speed of Lamina against transformers' generate, on the same model and the same cores.

All competitors are prefilled first and then take turns of a few steps each, so that noise of the machine hits them
alike. Prints one JSON line; --write appends it to perf/results/bench_decode.jsonl.

    python perf/bench_decode.py --batch 8 --prompt 512 --tokens 64 --dtype bfloat16 --write
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import cpu_pressure, record, spread
from reference_model import make

from lamina import LLM, SamplingParams

TURN_STEPS = 8


class Generate:
    """``model.generate`` on a thread, held between its steps by a logits processor, so that it runs only in its
    turn.
    """

    def __init__(self, model: Any, prompts: list[list[int]], tokens: int, cache: str) -> None:
        self._times: list[float] = []
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        ids = torch.tensor(prompts)
        options: dict[str, Any] = {"cache_implementation": "static"} if cache == "static" else {}
        if cache == "static":
            options["disable_compile"] = True  # as transformers itself decides on a CPU

        def run() -> None:
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                logits_processor=[self._hold],
                **options,
            )

        threading.Thread(target=run, daemon=True).start()
        self._paused.acquire()  # prefilled

    def _hold(self, ids: Any, scores: Any) -> Any:
        self._times.append(time.perf_counter())
        self._paused.release()
        self._go.acquire()
        self._times[-1] = time.perf_counter()  # the step to come begins here
        return scores

    def turn(self, steps: int) -> list[float]:
        """Seconds of each of ``steps`` decode steps."""
        found = []
        for _ in range(steps):
            start = time.perf_counter()
            self._go.release()
            self._paused.acquire()
            found.append(time.perf_counter() - start)
        return found

    def close(self) -> None:
        pass  # the thread is a daemon and holds nothing but memory


class Lamina:
    """An LLM whose sequences are all prefilled, stepped by its stream."""

    def __init__(self, path: Path, prompts: list[list[int]], tokens: int, **options: Any) -> None:
        self._batch = len(prompts)
        self.llm = LLM(str(path), max_model_len=len(prompts[0]) + tokens + 8, max_num_seqs=self._batch, **options)
        self._engine = self.llm.engine
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        for prompt in prompts:
            self._engine.add(prompt, params)
        while len(self._engine.step()) < self._batch:
            pass  # until all decode together

    def turn(self, steps: int) -> list[float]:
        """Seconds of each step. One step is always in flight, so the first of a turn is not counted."""
        self._step()
        return [self._step() for _ in range(steps)]

    def _step(self) -> float:
        start = time.perf_counter()
        while len(self._engine.step()) < self._batch:
            pass
        return time.perf_counter() - start

    def close(self) -> None:
        self.llm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens decoded by each competitor")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--memory-workers", type=int, default=1)
    parser.add_argument("--attention", default="auto", help="backend of the memory workers")
    parser.add_argument("--threads", type=int, default=0, help="of each competitor; 0 = all cores")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--write", action="store_true", help="append to perf/results")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        path = make(Path(folder) / "model", args.dtype, {"num_hidden_layers": args.layers})
        print(record("bench_decode", vars(args), measure(path, args), write=args.write))


def measure(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Steps of all competitors in turns; tokens per second and where Lamina's time went."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=args.dtype).eval()
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(1, 32000, (args.batch, args.prompt), generator=generator).tolist()
    threads = {"compute_threads": args.threads, "memory_threads": args.threads}
    common = {"attention": args.attention, "dtype": args.dtype, "memory_workers": args.memory_workers, **threads}
    total = args.tokens + 2 * TURN_STEPS + args.tokens // TURN_STEPS
    makers: dict[str, Callable[[], Generate | Lamina]] = {
        "transformers static": lambda: Generate(model, prompts, total, "static"),
        "transformers dynamic": lambda: Generate(model, prompts, total, "dynamic"),
        "lamina shm": lambda: Lamina(path, prompts, total, transport="shm", **common),
        "lamina loopback": lambda: Lamina(path, prompts, total, transport="loopback", **common),
    }
    players: dict[str, Generate | Lamina] = {}
    try:
        for name, make_player in makers.items():
            players[name] = make_player()
        return _rounds(players, args.tokens // TURN_STEPS, args.batch)
    finally:
        for player in players.values():
            player.close()


def _rounds(players: dict[str, Any], rounds: int, batch: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {name: [] for name in players}
    pressure = []
    split = players["lamina shm"].llm
    for player in players.values():
        player.turn(2)  # warm
    before = split.stats()
    for _ in range(rounds):
        for name, player in players.items():
            times[name] += player.turn(TURN_STEPS)
        pressure.append(cpu_pressure())
    medians = {name: spread(t)["median"] for name, t in times.items()}
    shm = medians["lamina shm"]
    return {
        "step_s": {name: spread(t) for name, t in times.items()},
        "tokens_per_s": {name: batch / m for name, m in medians.items()},
        "ratio_to_static": medians["transformers static"] / shm,
        "ratio_to_dynamic": medians["transformers dynamic"] / shm,
        "disaggregation_tax": shm / medians["lamina loopback"] - 1.0,
        "seconds_by_role": _difference(split.stats(), before),
        "convert_s": split.engine.info.summary["convert_s"],
        "cpu_pressure_avg10": pressure,
    }


def _difference(after: dict[str, dict[str, float]], before: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {w: {k: v - before[w].get(k, 0.0) for k, v in values.items()} for w, values in after.items()}


if __name__ == "__main__":
    main()
