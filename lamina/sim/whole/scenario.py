"""What happens to a whole fleet, as data: a seed makes it, a failure prints it, and it can be played again."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from lamina.sim.model import EOS
from lamina.sim.scenario import BLOCK, CHUNKS, MAX_LEN, Arriving, alike

from .integers import KV_HEADS, LAYERS, token_bytes
from .process import CUT, DIES, STOPS, Place

LAST_CALLS = 40, 120, 400  # at which somebody is hit
HOWS = DIES, DIES, DIES, STOPS, CUT
SOON_CALL = 60


@dataclass(frozen=True)
class Strike:
    """What happens to the process in a place at its call of that number, counted from the start over all that have been
    in the place; or, for CUT, to the channel of that call.
    """

    place: Place
    call: int
    how: str = DIES


@dataclass(frozen=True)
class FleetScenario:
    """``seed``: also of who runs when, and of the times of messages. ``options``: of the engine. ``windows``: of the
    model's layers.
    """

    seed: int
    options: dict[str, Any]
    windows: tuple[int, ...]
    asks: tuple[Arriving, ...] = ()
    hits: tuple[Strike, ...] = ()


def fleet_scenario(seed: int) -> FleetScenario:
    """Of several topologies; memory enough and too little; hits, and hits soon behind others."""
    rng = random.Random(seed)
    batches, workers = rng.choice((1, 1, 2, 3)), rng.choice((1, 2, 2, 3))
    partition = rng.choice(("head", "request")) if workers == KV_HEADS else "request"
    windows = rng.choice(((0,), (0,), (6,), (0, 5)))
    heads = KV_HEADS // workers if partition == "head" else KV_HEADS
    blocks = -(-MAX_LEN // BLOCK) + (rng.randint(1, 4) if rng.random() < 0.4 else 60)
    options: dict[str, Any] = {
        "memory_workers": workers,
        "pipeline": batches,
        "prefill_workers": rng.choice((0, 0, 1, 2)),
        "partition": partition,
        "prefill_chunk": rng.choice(CHUNKS),
        "max_num_seqs": rng.randint(2, 5),
        "kv_memory": str(blocks * LAYERS * BLOCK * token_bytes(heads)),
        "seed": seed,
    }
    options["enable_prefix_caching"] = not options["prefill_workers"] and rng.random() < 0.5
    places = [("compute", i) for i in range(max(1, batches - 1))]
    places += [("memory", i) for i in range(workers)]
    places += [("prefill", i) for i in range(options["prefill_workers"])]
    asks = alike(seed, tuple(_ask(rng) for _ in range(rng.randint(1, 6))))
    return FleetScenario(seed, options, windows, asks, _hits(rng, places))


def _ask(rng: random.Random) -> Arriving:
    prompt = tuple(rng.randrange(EOS) for _ in range(rng.randint(1, 20)))
    params: dict[str, Any] = {
        "max_tokens": rng.randint(1, 14),
        "temperature": 0.0,
        "n": rng.choice((1, 1, 2)),
        "ignore_eos": rng.random() < 0.5,
    }
    cancel = rng.uniform(0.0, 0.2) if rng.random() < 0.1 else None
    return Arriving(rng.choice((0.0, rng.uniform(0.0, 0.2))), prompt, params, cancel)


def _hits(rng: random.Random, places: list[Place]) -> tuple[Strike, ...]:
    hits = list[Strike]()
    for _ in range(rng.choice((1, 1, 2, 3))):
        call = rng.randint(1, rng.choice(LAST_CALLS))
        hits.append(Strike(rng.choice(places), call, rng.choice(HOWS)))
        if rng.random() < 0.4:  # somebody else while that is made good, or the same place again
            hits.append(Strike(rng.choice(places), call + rng.randint(1, SOON_CALL), rng.choice(HOWS)))
    return tuple(hits)
