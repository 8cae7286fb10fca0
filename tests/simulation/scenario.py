"""The events of a simulation, as data: a seed makes them, a failure prints them, and they can be played again."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from lamina.config.partition import KvShards
from lamina.request import SamplingParams
from lamina.scheduler.sessions.cache_options import DEFAULT_CACHE_OPTIONS, CacheOptions
from lamina.scheduler.sessions.session_table import SessionName

from .model import EOS
from .workers import PoolShape

BLOCK = 4
CHUNKS = 4, 6, 8
MAX_LEN = 48
STOPS = "ab", "q", "xyz"


@dataclass(frozen=True)
class Arriving:
    """A request that comes at a time; ``cancel_s``: it is given up so much later."""

    at_s: float
    prompt: tuple[int, ...]
    params: dict[str, Any]
    cancel_s: float | None = None
    terms: CacheOptions = DEFAULT_CACHE_OPTIONS
    forgets: str = ""  # before it comes: its "session", or "all" KV of ended requests

    @cached_property
    def sampling(self) -> SamplingParams:
        """Returns the sampling parameters of the request."""
        return SamplingParams(**self.params)


@dataclass(frozen=True)
class Fault:
    """A worker that dies at a time. ``again``: the workers that die during its recovery, one after the other."""

    at_s: float
    victim: tuple[str, int]
    again: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class PlannedChange:
    """A user asks at a time for so many memory workers, each with so many blocks. ``again``: the worker that dies while
    KV moves; ("memory", -1): none, but some KV is damaged.
    """

    at_s: float
    workers: int
    num_blocks: int
    again: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Scenario:
    """``seed``: also of the simulated times. ``options``: of the engine. ``windows``: of its layer groups."""

    seed: int
    options: dict[str, Any]
    partition: str
    windows: tuple[int, ...]
    num_blocks: int
    asks: tuple[Arriving, ...] = ()
    faults: tuple[Fault, ...] = field(default=())
    changes: tuple[PlannedChange, ...] = ()
    max_len: int = MAX_LEN

    @property
    def layout(self) -> PoolShape:
        """Returns the layout of the memory workers at first."""
        return self.layout_of(self.options["memory_workers"], self.num_blocks)

    def _weights(self, workers: int) -> tuple[int, ...]:
        """Draws the weights of heads.

        Together they weigh what they did at first, on any workers, so the tokens are the same.
        """
        first = self.options["memory_workers"]
        if workers == first or self.partition != "head":
            return tuple(range(2, 2 + workers))
        others = range(3, 2 + workers)
        return (*others, sum(range(2, 2 + first)) - sum(others))

    def layout_of(self, workers: int, num_blocks: int) -> PoolShape:
        """Returns the layout of so many workers, each with so many blocks."""
        weights = self._weights(workers)
        stripe = 2 if self.partition in ("token", "spill") else 0
        if self.partition == "head" or workers == 1:
            lanes = [KvShards()] * len(self.windows)
            holders = [list(range(workers))] * len(lanes)
            sparse = (False, True) if self.options.get("kv_sparsity") == "evict" else ()
            return PoolShape(list(self.windows), lanes, holders, 0, False, num_blocks, BLOCK, weights, sparse)
        parts = [KvShards(tuple(w == owner for w in range(workers))) for owner in range(workers)]
        each = [(window, lanes, [owner]) for window in self.windows for owner, lanes in enumerate(parts)]
        return PoolShape([w for w, _, _ in each], [x for _, x, _ in each], [h for _, _, h in each], stripe,
                      self.partition == "spill", num_blocks, BLOCK, weights)  # fmt: skip


def scenario(seed: int) -> Scenario:
    """Draws scenarios of all kinds: topologies, prompts, parameters, memory enough and too little, losses, and losses
    during recovery.
    """
    rng = random.Random(seed)
    batches = rng.choice((1, 1, 2, 3))
    options: dict[str, Any] = {
        "memory_workers": rng.randint(1, 3),
        "pipeline": batches,
        "prefill_workers": rng.choice((0, 0, 1, 2)),
        "prefill_chunk": rng.choice(CHUNKS),
        "max_num_seqs": rng.randint(2, 6),
        "deterministic": rng.random() < 0.3,
        "seed": seed,
    }
    windows = rng.choice(((0,), (0,), (6,), (0, 5)))
    tight = rng.random() < 0.4
    num_blocks = -(-MAX_LEN // BLOCK) + (rng.randint(0, 3) if tight else 100)
    asks = alike(seed, tuple(_ask(rng) for _ in range(rng.randint(1, 7))))
    options["enable_prefix_caching"] = seed % 3 == 0
    if options["enable_prefix_caching"] and seed % 2 == 0 and not options["prefill_workers"]:
        modes = "swap", "auto", "recompute"
        options |= {"kv_offloading_size": "1MiB", "preemption_mode": modes[seed // 6 % len(modes)]}
        num_blocks, asks = -(-MAX_LEN // BLOCK) + seed % 4, _again(seed, asks)
    roles = [("compute", i) for i in range(max(1, batches - 1))]
    roles += [("memory", i) for i in range(options["memory_workers"])]
    roles += [("prefill", i) for i in range(options["prefill_workers"])]
    faults = tuple(_fault(rng, roles) for _ in range(rng.choice((1, 1, 2, 3))))
    partition = rng.choice(("head", "request", "token"))
    if seed % 5 == 2 and windows[0] == 0 and options["memory_workers"] > 1:  # one sequence needs what all have
        partition, num_blocks = "spill", least_lending(options["memory_workers"]) + seed // 5 % 3
    return Scenario(seed, options, partition, windows, num_blocks, asks, tuple(sorted(faults, key=lambda f: f.at_s)))


def planned(seed: int) -> Scenario:
    """The scenario of ``seed``, while memory workers come and go."""
    of, rng = scenario(seed), random.Random(f"planned {seed}")
    least, changes = -(-MAX_LEN // BLOCK), list[PlannedChange]()
    for at_s in sorted(rng.uniform(0.0, 0.4) for _ in range(rng.choice((1, 2, 2, 3)))):
        workers, spare = rng.randint(1, 4), rng.choice((0, 3, 100))
        victims = [("memory", -1), *(("memory", w) for w in range(workers)), ("compute", 0)]
        again = tuple(rng.choice(victims) for _ in range(rng.choice((0, 0, 1, 2))))
        blocks = least + spare if of.partition != "spill" or workers == 1 else least_lending(workers) + spare % 97
        changes.append(PlannedChange(at_s, workers, blocks, again))
    faults = of.faults if rng.random() < 0.5 else ()
    return replace(of, changes=tuple(changes), faults=faults)


def leaving(seed: int) -> Scenario:
    """The scenario of ``seed`` with whole sequences on memory workers of which some are soon to go."""
    of, rng = scenario(seed), random.Random(f"leaving {seed}")
    workers = rng.randint(2, 4)
    options = {**of.options, "memory_workers": workers, "max_num_seqs": 8, "enable_prefix_caching": seed % 2 == 0}
    options = {name: value for name, value in options.items() if name not in ("kv_offloading_size", "preemption_mode")}
    blocks = -(-MAX_LEN // BLOCK) * rng.choice((2, 3, 9))
    victims = [("memory", w) for w in range(workers)]
    faults = tuple(Fault(rng.uniform(0.0, 0.2), rng.choice(victims)) for _ in range(rng.choice((0, 0, 1, 2))))
    change = PlannedChange(rng.uniform(0.01, 0.1), rng.randint(1, workers - 1), blocks + 100)
    asks = tuple(replace(ask, at_s=ask.at_s / 50, params={**ask.params, "ignore_eos": True}) for ask in of.asks)
    return replace(of, options=options, partition="request", windows=(0,), num_blocks=blocks, asks=asks,
                   changes=(change,), faults=tuple(sorted(faults, key=lambda f: f.at_s)))  # fmt: skip


def borrowing(seed: int) -> Scenario:
    """The scenario of ``seed``, while loans come and go: memory workers on which nothing begins, and nothing is stored.
    Those at home keep KV in host memory, too.
    """
    of, rng = scenario(seed), random.Random(f"borrowing {seed}")
    options = {
        **of.options, "memory_workers": 2, "prefill_workers": 0, "enable_prefix_caching": True,
        "kv_offloading_size": "1MiB", "preemption_mode": rng.choice(("swap", "auto", "recompute")),
        "borrow": "1GiB", "ledger": "a:1",
    }  # fmt: skip
    blocks, times = least_lending(2) + rng.choice((0, 0, 1, 2)), sorted(rng.uniform(0.0, 0.4) for _ in range(4))
    guests = [rng.randint(2, 4) for _ in times]
    changes = tuple(PlannedChange(at_s, workers, blocks) for at_s, workers in zip(times, guests, strict=True))
    victims = [("memory", w) for w in range(4)]
    faults = tuple(Fault(rng.uniform(0.0, 0.4), rng.choice(victims)) for _ in range(rng.choice((0, 1, 1, 2))))
    return replace(of, options=options, partition="spill", windows=(0,), num_blocks=blocks, asks=_again(seed, of.asks),
                   changes=changes, faults=tuple(sorted(faults, key=lambda f: f.at_s)))  # fmt: skip


def talking(seed: int) -> Scenario:
    """Turns of sessions, which keep KV in the pool and outside of it; some are longer than the context."""
    rng = random.Random(f"talking {seed}")
    short = rng.random() < 0.5
    max_len = 2 * MAX_LEN if short else 400
    options: dict[str, Any] = {
        "memory_workers": rng.randint(1, 3), "pipeline": rng.choice((1, 1, 2, 3)), "max_num_seqs": rng.randint(2, 6),
        "prefill_workers": rng.choice((0, 0, 1)) if short else 0,
        "prefill_chunk": rng.choice(CHUNKS) * (2 if short else 8),
        "deterministic": short and rng.random() < 0.3, "enable_prefix_caching": True, "seed": seed,
        "scheduling_policy": "priority",
    }  # fmt: skip
    if not options["prefill_workers"] and rng.random() < 0.7:
        options |= {"kv_offloading_size": "1MiB", "preemption_mode": rng.choice(("swap", "auto", "recompute"))}
    if not short:
        options |= {"context_overflow": "truncate", "keep_first": rng.choice((0, 128)), "truncate_ratio": 0.4}
    blocks = -(-max_len // BLOCK) + rng.choice((0, 4) if "preemption_mode" in options else (0, 4, 100))
    asks = list[Arriving]()
    for number in range(rng.randint(6, 16 if short else 24)):
        ask = _ask(rng)
        name = rng.choice(("", "a", "b", "c"))
        params = {**ask.params, "max_tokens": rng.randint(3, 12), "n": 1 if name else ask.params["n"]}
        params |= {"prompt_logprobs": None} if name else {}
        terms = CacheOptions(
            session=SessionName(b"", name) if name else None, affinity_key=rng.choice((b"", b"k")),
            retention_s=rng.choice((0.0, 0.5)), priority=rng.choice((0, 0, 1)),
        )  # fmt: skip
        forgets = rng.choice(("session" if name else "all", *([""] * 12)))
        prompt = ask.prompt[: rng.randint(1, 24)] * (1 if short else rng.randint(4, 10))
        at_s = number // 4 * 0.4 + rng.choice((0.0, rng.uniform(0.0, 0.2)))
        asks.append(replace(ask, at_s=at_s, prompt=prompt, params=params, terms=terms, forgets=forgets))
    workers, roles = options["memory_workers"], [("compute", 0)]
    roles += [("memory", i) for i in range(workers)]
    faults = tuple(_fault(rng, roles) for _ in range(rng.choice((0, 0, 0, 1))))
    changes = (PlannedChange(rng.uniform(0.0, 0.8), rng.randint(1, 4), blocks),) if rng.random() < 0.3 else ()
    faults = tuple(sorted(faults, key=lambda f: f.at_s))
    windows = rng.choice(((0,), (0,), (6,))) if short else (0,)
    return Scenario(
        seed, options, rng.choice(("head", "request")), windows, blocks, tuple(asks), faults, changes, max_len
    )


def sparse(seed: int) -> Scenario:
    """Sequences that keep or attend a part of their KV, and some that measure the error of it."""
    rng = random.Random(f"sparse {seed}")
    mode, max_len = rng.choice(("evict", "evict", "select")), 400
    options: dict[str, Any] = {
        "memory_workers": rng.randint(1, 3), "pipeline": rng.choice((1, 1, 2)), "max_num_seqs": rng.randint(2, 6),
        "prefill_workers": 0, "prefill_chunk": rng.choice((32, 64)), "enable_prefix_caching": rng.random() < 0.5,
        "kv_sparsity": mode, "kv_budget": 64, "kv_recent": 16, "kv_sink": 4, "block_size": 16, "seed": seed,
    }  # fmt: skip
    if mode == "evict":
        options["kv_observation_window"] = rng.choice((4, 8))
    if rng.random() < 0.7:
        options["kv_error_budget"] = "top1=0.1,kl=0.1,shadow=0.7"
    if options["enable_prefix_caching"] and mode == "evict" and "kv_error_budget" not in options:
        options |= {"kv_offloading_size": "1MiB", "preemption_mode": "swap"}
    elif options["enable_prefix_caching"] and mode == "evict":
        del options["enable_prefix_caching"]  # it is on, and needs pages elsewhere where it is asked for
    blocks, asks = -(-max_len // BLOCK) + rng.choice((0, 20, 100)), list[Arriving]()
    for _ in range(rng.randint(3, 8)):
        ask = _ask(rng)
        extra = {"kv_sparsity": "none"} if rng.random() < 0.2 else {}
        params = {**ask.params, **extra, "max_tokens": rng.randint(20, 150), "ignore_eos": True}
        asks.append(replace(ask, prompt=(ask.prompt * 12)[: rng.randint(20, 240)], params=params))
    roles = [("compute", 0), *(("memory", i) for i in range(options["memory_workers"]))]
    faults = tuple(_fault(rng, roles) for _ in range(rng.choice((0, 0, 1))))
    windows = (0, 0)
    return Scenario(seed, options, "head", windows, blocks, tuple(asks), faults, (), max_len)


def least_lending(workers: int) -> int:
    """Blocks of each, of which one sequence needs what all have together."""
    stripes = -(-MAX_LEN // (2 * BLOCK)) + workers
    return 2 * -(-stripes // workers)


def _ask(rng: random.Random) -> Arriving:
    tokens = rng.randint(1, 24)
    params: dict[str, Any] = {
        "max_tokens": rng.randint(1, MAX_LEN - 24 - 1),
        "n": rng.choice((1, 1, 1, 2)),
        "temperature": 1.0,
    }
    extras: tuple[dict[str, Any], ...] = (
        {"seed": rng.randrange(1 << 20)},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"stop": [rng.choice(STOPS)]},
        {"logprobs": 1},
        {"prompt_logprobs": 0},
        {"min_tokens": min(3, params["max_tokens"])},
        {"ignore_eos": True},
        {"stop_token_ids": [rng.randrange(EOS)]},
    )
    for extra in extras:
        if rng.random() < 0.3:
            params |= extra
    params |= _forbidden(random.Random(repr(params)))
    cancel = rng.uniform(0.0, 0.3) if rng.random() < 0.1 else None
    return Arriving(
        rng.choice((0.0, rng.uniform(0.0, 0.5))), tuple(rng.randrange(EOS) for _ in range(tokens)), params, cancel
    )


def _forbidden(rng: random.Random) -> dict[str, Any]:
    """Bad words, many of which a completion would have, and allowed tokens, more than they forbid."""
    if rng.random() < 0.7:
        return {}
    words = [[rng.randrange(EOS), rng.randrange(EOS)] for _ in range(900)] + [[rng.randrange(EOS)] for _ in range(9)]
    allowed = rng.sample(range(EOS), 60) if rng.random() < 0.5 else None
    return {"bad_words_token_ids": words, "allowed_token_ids": allowed}


def alike(seed: int, asks: tuple[Arriving, ...]) -> tuple[Arriving, ...]:
    """Some prompts begin like the one before them."""
    rng, arrivals = random.Random(~seed), list[Arriving]()
    for ask in asks:
        before = arrivals[-1].prompt if arrivals and rng.random() < 0.6 else ()
        arrivals.append(replace(ask, prompt=(*before[: rng.randint(4, 24)], *ask.prompt)[:24]))
    return tuple(arrivals)


def _again(seed: int, asks: tuple[Arriving, ...]) -> tuple[Arriving, ...]:
    """All of them come again, later and in another order."""
    rng, arrivals = random.Random(seed), list(asks)
    for _ in range(2):
        arrivals += [replace(ask, at_s=ask.at_s + rng.uniform(0.1, 0.6)) for ask in rng.sample(asks, len(asks))]
    return tuple(arrivals)


def _fault(rng: random.Random, roles: list[tuple[str, int]]) -> Fault:
    again = tuple(rng.choice(roles) for _ in range(rng.choice((0, 0, 0, 1, 2))))
    return Fault(rng.uniform(0.0, 0.5), rng.choice(roles), again)
