"""The pause of streams when a worker is killed, and whether they then are what they would have been.

Sequences decode on real processes; at random moments one worker after the other is killed. The pause is the longest
time between two outputs after a kill. A start of the same workers is measured too, as a new process takes most of the
pause. Every completion is compared with that of a run without a kill: how many have other tokens, and how far
log-probabilities lie apart up to the first one. For comparison it also prints the error of the undisturbed run to the
same tokens in float32: what half precision rounds in any case. With --many any worker is killed, one after the other,
every few steps of the same streams, which begin again and again. Prints a table and JSON lines; --write appends those
to perf/results/bench_recovery.jsonl.

    python perf/bench_recovery.py examples/tiny_lm/model --write
    python perf/bench_recovery.py examples/tiny_lm/model --dtype bfloat16 --no-deterministic --write
    python perf/bench_recovery.py examples/tiny_lm/model --memory-workers 3 --many 200 --write
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import threading
import time
from contextlib import suppress
from statistics import median
from typing import Any, NamedTuple

from common import cpu_pressure, parser_of, record, spread

from lamina import LLM, SamplingParams
from lamina.request import CompletionOutput

OUTPUTS = 16, 320  # of all streams, between two kills: half a step of 32, or ten steps
MOMENT_S = 0.02  # from an output to the next kill, at most


class Parting(NamedTuple):
    """The difference between a completion and that of the undisturbed run."""

    parts: bool  # some token is another one
    greedy: bool
    apart: float  # the largest difference of a log-probability up to there


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model")
    parser.add_argument("--memory-workers", type=int, default=2)
    parser.add_argument("--prefill-workers", type=int, default=1)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=192, help="of a completion")
    parser.add_argument("--kills", type=int, default=5, help="of each kind of worker")
    parser.add_argument("--many", type=int, default=0, help="kills in all, of any worker, one after the other")
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--partition", default="head")
    parser.add_argument("--kv-parity", type=int, default=0)
    parser.add_argument("--spare-compute", type=int, default=0)
    parser.add_argument("--spare-memory", type=int, default=0)
    parser.add_argument("--kv-memory", default="auto", help="of a memory worker")
    parser.add_argument("--roles", default="", help="of whom is killed, by comma; empty = of all")
    parser.add_argument("--rest-s", type=float, default=0.0, help="before a kill, for the next spare to get ready")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--deterministic", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    options = {
        "memory_workers": args.memory_workers,
        "prefill_workers": args.prefill_workers,
        "pipeline": args.pipeline,
        "transport": args.transport,
        "partition": args.partition,
        "kv_parity": args.kv_parity,
        "spare_compute": args.spare_compute,
        "spare_memory": args.spare_memory,
        "kv_memory": args.kv_memory,
    }
    begun = time.perf_counter()
    with LLM(args.model, max_recoveries=10**6, dtype=args.dtype, deterministic=args.deterministic, **options) as llm:
        how = many if args.many else measure
        results, wanted = how(llm, args, time.perf_counter() - begun)
    prompts = prompts_of(args, results["vocabulary"])
    if args.dtype != "float32":
        results["rounding"] = rounding(args.model, prompts, wanted, options)
        print(f"{args.dtype} errs by {results['rounding']:.2g} where no worker is killed")
    print(record("bench_recovery", vars(args), results, write=args.write))


def prompts_of(args: argparse.Namespace, vocabulary: int) -> list[list[int]]:
    """Random tokens, always the same."""
    rng = random.Random(args.seed)
    return [[rng.randrange(vocabulary) for _ in range(args.prompt)] for _ in range(args.sequences)]


def measure(llm: LLM, args: argparse.Namespace, start_s: float) -> tuple[dict[str, Any], list[CompletionOutput]]:
    """Pauses by kind of worker, and how completions differ from the undisturbed ones, which are returned, too."""
    rng = random.Random(args.seed)
    prompts = prompts_of(args, llm.engine.worker_info.vocab_size)
    params = [params_of(i, args.tokens) for i in range(args.sequences)]
    wanted, _, took = stream(llm, prompts, params, "", 0.0)
    pauses: dict[str, list[float]] = {}
    partings: dict[str, list[Parting]] = {}
    late = 0
    for _ in range(args.kills):
        for victim in sorted(llm.pools.pids):
            role, pause = victim.partition("-")[0], None
            if args.roles and role not in args.roles.split(","):
                continue
            time.sleep(args.rest_s)
            while pause is None:  # a kill after the last token says nothing
                completions, pause, _ = stream(llm, prompts, params, victim, rng.uniform(0.1, 0.8) * took)
                late += pause is None
                partings.setdefault(role, []).extend(map(parting, completions, wanted, params))
            pauses.setdefault(role, []).append(pause)
    for role, each in pauses.items():
        other, far = partings[role], max(p.apart for p in partings[role])
        greedy = sum(p.parts and p.greedy for p in other)
        print(f"{role:8} {len(each):3} kills   pause {median(each):6.2f} s, at most {max(each):6.2f} s   ", end="")
        print(f"{sum(p.parts for p in other)} of {len(other)} with other tokens, {greedy} of them greedy; ", end="")
        print(f"log-probabilities up to there differ by {far:.2g}")
    print(f"a start of all of them: {start_s:.2f} s; kills too late: {late}")
    results = {
        "pause_s": {role: spread(each) for role, each in pauses.items()},
        "longest_s": {role: max(each) for role, each in pauses.items()},
        "kills": {role: len(each) for role, each in pauses.items()},
        "too_late": late,
        "start_s": start_s,
        "completions": {role: len(each) for role, each in partings.items()},
        "other_tokens": {role: sum(p.parts for p in each) for role, each in partings.items()},
        "other_tokens_greedy": {role: sum(p.parts and p.greedy for p in each) for role, each in partings.items()},
        "apart": {role: max(p.apart for p in each) for role, each in partings.items()},
        "vocabulary": llm.engine.worker_info.vocab_size,
        "cpu_pressure": cpu_pressure(),
    }
    return results, wanted


class Killer:
    """Kills any worker, every few outputs. ``pauses``: by role, of each kill the longest time without an output until
    the next one, or until the streams have ended.
    """

    def __init__(self, llm: LLM, rng: random.Random) -> None:
        self._llm, self._rng = llm, rng
        self.pauses: dict[str, list[float]] = {}
        self._left = rng.randint(*OUTPUTS)  # outputs until the next kill
        self._timer: threading.Timer | None = None
        self._last = 0.0  # output, or kill
        self._role = ""  # of the last kill
        self._pause = 0.0

    def look(self) -> None:
        """There is an output."""
        now = time.perf_counter()
        self._pause, self._last = max(self._pause, now - self._last), now
        self._left -= 1
        if not self._left:
            self._note()
            self._timer = threading.Timer(self._rng.uniform(0.0, MOMENT_S), self._kill)
            self._timer.start()
            self._left = self._rng.randint(*OUTPUTS)

    def rest(self) -> None:
        """All streams have ended, and others begin."""
        self._note()
        self._last = time.perf_counter()

    def _note(self) -> None:
        if self._timer is not None:
            self._timer.join()
            self.pauses.setdefault(self._role, []).append(self._pause)
        self._timer, self._pause = None, 0.0

    def _kill(self) -> None:
        victim, pid = self._rng.choice(sorted(self._llm.pools.pids.items()))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self._role = victim.partition("-")[0]


def many(llm: LLM, args: argparse.Namespace, start_s: float) -> tuple[dict[str, Any], list[CompletionOutput]]:
    """Measures, as ``measure``, --many kills of any worker."""
    killer, prompts = Killer(llm, random.Random(args.seed)), prompts_of(args, llm.engine.worker_info.vocab_size)
    params = [params_of(i, args.tokens) for i in range(args.sequences)]
    wanted, _, _ = stream(llm, prompts, params, "", 0.0)
    partings, begun = list[Parting](), time.perf_counter()
    killer.rest()
    while (kills := sum(map(len, killer.pauses.values()))) < args.many:
        outputs: dict[str, CompletionOutput] = {}
        with llm.stream(prompts, params) as outcome:
            for output in outcome:
                killer.look()
                outputs[output.request_id] = output.outputs[0]
            ids = outcome.request_ids
        killer.rest()
        partings += map(parting, [outputs[i] for i in ids], wanted, params)
    other = sum(p.parts for p in partings)
    for role, each in killer.pauses.items():
        print(f"{role:8} {len(each):3} kills   pause {median(each):6.2f} s, at most {max(each):6.2f} s")
    print(f"{kills} kills in {time.perf_counter() - begun:.0f} s: {other} of {len(partings)} streams with other tokens")
    return {
        "pause_s": {role: spread(each) for role, each in killer.pauses.items()},
        "longest_s": {role: max(each) for role, each in killer.pauses.items()},
        "kills": {role: len(each) for role, each in killer.pauses.items()},
        "start_s": start_s,
        "completions": len(partings),
        "other_tokens": other,
        "apart": max(p.apart for p in partings),
        "vocabulary": llm.engine.worker_info.vocab_size,
        "cpu_pressure": cpu_pressure(),
    }, wanted


def parting(output: CompletionOutput, wanted: CompletionOutput, params: SamplingParams) -> Parting:
    """Returns how ``output`` differs from ``wanted``."""
    pairs = zip(output.token_ids, wanted.token_ids, strict=True)
    alike = next((i for i, (a, b) in enumerate(pairs) if a != b), len(wanted.token_ids))
    apart = (abs(a - b) for a, b in zip(chosen(output)[:alike], chosen(wanted)[:alike], strict=True))
    return Parting(alike < len(wanted.token_ids), params.temperature == 0.0, max(apart, default=0.0))


def chosen(completion: CompletionOutput) -> list[float]:
    """The log-probabilities of its tokens."""
    return [next(iter(each.values())).logprob for each in completion.logprobs or []]


def rounding(model: str, prompts: list[list[int]], wanted: list[CompletionOutput], options: dict[str, Any]) -> float:
    """The largest difference of a log-probability of ``wanted`` to the same tokens in float32."""
    texts = [prompt + one.token_ids for prompt, one in zip(prompts, wanted, strict=True)]
    with LLM(model, dtype="float32", **options) as llm:
        scored = llm.generate(texts, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
    worst = 0.0
    for output, prompt, one in zip(scored, prompts, wanted, strict=True):
        exact = [next(iter(each.values())).logprob for each in (output.prompt_logprobs or [])[len(prompt) :] if each]
        worst = max(worst, *(abs(a - b) for a, b in zip(exact, chosen(one), strict=True)))
    return worst


def params_of(number: int, tokens: int) -> SamplingParams:
    """Returns parameters of all kinds; each with a seed, so that runs are alike."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "frequency_penalty": 0.3},
        {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1},
    ]
    return SamplingParams(max_tokens=tokens, ignore_eos=True, seed=number, logprobs=0, **kinds[number % len(kinds)])


def stream(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], victim: str, after_s: float
) -> tuple[list[CompletionOutput], float | None, float]:
    """The completions, the longest pause after the kill of ``victim``, and how long it all took. No pause where no
    worker was killed before the last token.
    """
    killed = float("inf")

    def kill() -> None:
        nonlocal killed
        with suppress(ProcessLookupError):
            os.kill(llm.pools.pids[victim], signal.SIGKILL)
            killed = time.perf_counter()

    timer = threading.Timer(after_s, kill)
    outputs: dict[str, Any] = {}
    begun = last = time.perf_counter()
    pause: float | None = None
    if victim:
        timer.start()
    with llm.stream(prompts, params) as replies:
        for output in replies:
            now = time.perf_counter()
            if now > killed:
                pause = max(pause or 0.0, now - max(last, killed))
            last = now
            outputs[output.request_id] = output.outputs[0]
        ids = replies.request_ids
    timer.cancel()
    return [outputs[i] for i in ids], pause, time.perf_counter() - begun


if __name__ == "__main__":
    main()
