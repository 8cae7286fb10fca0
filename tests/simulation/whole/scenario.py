"""The events of a whole fleet, as data: a seed makes them, a failure prints them, and they can be played again."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from simulation.model import EOS
from simulation.scenario import BLOCK, CHUNKS, MAX_LEN, Arriving, alike

from .hybrid_integers import VERSION_BYTES
from .integers import KV_HEADS, LAYERS, token_bytes
from .process import CUT, DIES, STOPS, Place

LAST_CALLS = 40, 120, 400  # at which a process is hit
HOWS = DIES, DIES, DIES, STOPS, CUT
SOON_CALL = 60
LAST_DEATHS = 60, 200, 600  # calls at which an engine dies
LONG = 200  # tokens of a context, of which more than one chunk of ops.attention.merge is had


@dataclass(frozen=True)
class Strike:
    """An event that happens to the process in a place at its call of that number; for CUT, to the channel of that call.
    Calls are counted from the start over all processes that have been in the place. ``behind``: counted from where one
    there first has that control message, or has sent it; empty: from the start.
    """

    place: Place
    call: int
    how: str = DIES
    behind: str = ""


@dataclass(frozen=True)
class FleetChange:
    """An operator's order, at a time, for another number of memory workers. ``leaving``: the workers that leave; empty:
    the last ones.
    """

    at_s: float
    workers: int
    leaving: tuple[int, ...] = ()


@dataclass(frozen=True)
class FleetScenario:
    """``seed``: also of who runs when, and of the times of messages. ``options``: of the engine. ``windows``: of the
    model's layers. ``deaths``: of one engine after the other, the calls of its links at which it dies.
    """

    seed: int
    options: dict[str, Any]
    windows: tuple[int, ...]
    asks: tuple[Arriving, ...] = ()
    hits: tuple[Strike, ...] = ()
    changes: tuple[FleetChange, ...] = ()
    deaths: tuple[int, ...] = ()
    is_hybrid: bool = False  # some layers of the model are recurrent


def fleet_scenario(seed: int) -> FleetScenario:
    """Several topologies, memory enough and too little, hits, and more hits soon after."""
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
        "kv_memory": _memory(blocks, heads),
        "seed": seed,
    }
    if options["prefill_workers"]:
        options |= _prompts_kept(random.Random(f"prompts {seed}"))
    else:
        options["enable_prefix_caching"] = rng.random() < 0.5
    asks = alike(seed, tuple(_ask(rng) for _ in range(rng.randint(1, 6))))
    return FleetScenario(seed, options, windows, asks, _hits(rng, _places(options)))


def planned_fleet(seed: int) -> FleetScenario:
    """The scenario of ``seed``, with what it lacks: engines that die, and memory workers that come and go. Others are
    two ranks, sequences in stripes, and a memory worker that keeps the parity of the others.
    """
    of, rng = fleet_scenario(seed), random.Random(f"planned {seed}")
    options, asks, hits = dict(of.options), of.asks, of.hits
    kind = rng.choice(("ranks", "stripes", "parity", "", ""))
    if kind == "stripes":
        options |= {"partition": "token", "memory_workers": rng.randint(2, 3), "max_model_len": LONG}
        options |= {"prefill_chunk": 32, "kv_memory": _memory(-(-LONG // BLOCK) + 60, KV_HEADS)}
        asks = tuple(replace(ask, prompt=_long(rng, ask.prompt)) for ask in asks[:3])
    elif kind == "ranks":
        workers = rng.choice((2, 4))
        options |= {"tensor_parallel_size": 2, "collective": "mesh", "memory_workers": workers}
        options |= {"partition": "head" if workers == 2 else "request", "prefill_workers": 0}
        options["kv_memory"] = _memory(-(-MAX_LEN // BLOCK) + 60, 1)
    elif kind == "parity":
        blocks = -(-MAX_LEN // BLOCK) + rng.choice((1, 4, 60))
        options |= {"kv_parity": 1, "partition": "head", "memory_workers": KV_HEADS, "kv_memory": _memory(blocks, 1)}
    if kind in ("ranks", "stripes"):
        options.pop("prefill_kv_memory", None)  # of other prompts, or of none
    if kind:
        hits = _hits(rng, _places(options))
    changes = list[FleetChange]()
    there, step = options["memory_workers"], 2 if kind == "ranks" else 1
    for at_s in sorted(rng.uniform(0.0, 0.3) for _ in range(rng.choice((0, 1, 2)) if kind != "parity" else 0)):
        workers = step * rng.randint(1, 4 // step)
        leaving = tuple(rng.sample(range(there), there - workers)) if workers < there and step == 1 else ()
        changes.append(FleetChange(at_s, workers, leaving))
        there = workers
    count = rng.choice((1, 1, 2)) if not changes or rng.random() < 0.5 else 0
    count = rng.choice((0, 0, 0, 1)) if kind == "parity" else count
    deaths = tuple(rng.randint(1, rng.choice(LAST_DEATHS)) for _ in range(count))
    return replace(of, options=options, asks=asks, hits=hits, changes=tuple(changes), deaths=deaths)


def hybrid_fleet(seed: int) -> FleetScenario:
    """The scenario of ``seed`` with a hybrid model, room for few or many states, and perhaps an engine that dies."""
    of, rng = fleet_scenario(seed), random.Random(f"hybrid {seed}")
    options = {**of.options, "prefill_workers": 0, "enable_prefix_caching": rng.random() < 0.8}
    options.pop("prefill_kv_memory", None)
    blocks = -(-MAX_LEN // BLOCK) + rng.choice((2, 8, 60))
    states = rng.randint(4, 6 * options["max_num_seqs"]) * VERSION_BYTES
    least = 2 * int(_memory(-(-MAX_LEN // BLOCK) + 8, KV_HEADS))  # states may have a half
    options["kv_memory"] = str(max(least, int(_memory(blocks, KV_HEADS)) + states * 2))
    asks = alike(seed, tuple(longer(rng, _ask(rng)) for _ in range(rng.randint(2, 6))))
    deaths = tuple(rng.randint(1, rng.choice(LAST_DEATHS)) for _ in range(rng.choice((0, 0, 1))))
    hits = _hits(rng, _places(options)) if rng.random() < 0.8 else ()
    return replace(of, options=options, windows=(0,), asks=asks, hits=hits, deaths=deaths, is_hybrid=True)


def prefilled_hybrid_fleet(seed: int) -> FleetScenario:
    """The ``hybrid_fleet`` of ``seed`` with prefill workers, which die too."""
    of, rng = hybrid_fleet(seed), random.Random(f"prefilled {seed}")
    options = {**of.options, "prefill_workers": rng.choice((1, 1, 2))}
    return replace(of, options=options, hits=_hits(rng, _places(options)))


def changing_hybrid_fleet(seed: int) -> FleetScenario:
    """The ``hybrid_fleet`` of ``seed``, whose memory workers come and go."""
    of, rng = hybrid_fleet(seed), random.Random(f"changing {seed}")
    changes, there = list[FleetChange](), of.options["memory_workers"]
    for at_s in sorted(rng.uniform(0.0, 0.2) for _ in range(rng.choice((1, 2)))):
        workers = rng.randint(1, 4)
        leaving = tuple(rng.sample(range(there), there - workers)) if workers < there else ()
        changes.append(FleetChange(at_s, workers, leaving))
        there = workers
    return replace(of, changes=tuple(changes))


def moving_fleet(seed: int) -> FleetScenario:
    """The scenario of ``seed``, with what both others lack. Sequences leave memory workers one by one, stripes on loan
    go home, several stages compute prompts, and there are spares. Memory workers also have other work.
    """
    of, rng = fleet_scenario(seed), random.Random(f"moving {seed}")
    kind = rng.choice(("leaving", "leaving", "stripes", "stages", "spares"))
    options, asks, changes = {**of.options, **_besides(rng)}, of.asks, list[FleetChange]()
    options.pop("prefill_kv_memory", None)  # of other sizes
    if kind == "leaving":
        more, moved = leaving(rng)
        options, changes = options | more, [*moved]
        asks = tuple(longer(rng, ask) for ask in asks)
    elif kind == "stripes":
        workers = rng.randint(2, 3)
        options |= {"partition": "spill", "memory_workers": workers, "max_model_len": LONG, "prefill_chunk": 32}
        options["kv_memory"] = _memory(rng.choice((38, 44, 44, 50)), KV_HEADS)
        options["max_num_seqs"] = 6
        asks = tuple(longer(rng, ask) for ask in (*asks, *asks)[:6])  # some short ones, which leave room for loans
        asks = tuple(replace(x, prompt=_long(rng, x.prompt)) if rng.random() < 0.6 else x for x in asks)
    elif kind == "stages":
        stages = rng.choice((2, 2, 3))
        options |= {"prefill_pipeline": stages, "prefill_workers": stages * rng.choice((1, 1, 2))}
        asks = tuple(replace(ask, prompt=(*ask.prompt, *(rng.randrange(EOS) for _ in range(6)))) for ask in asks)
    else:
        options |= {"spare_compute": rng.choice((0, 1, 2)), "spare_memory": rng.choice((0, 1, 2))}
        if rng.random() < 0.3 and options["partition"] == "request":
            changes.append(FleetChange(rng.uniform(0.0, 0.3), rng.randint(1, 4)))
    hits = _hits(rng, _places(options)) if rng.random() < 0.8 else ()
    deaths = tuple(rng.randint(1, rng.choice(LAST_DEATHS)) for _ in range(rng.choice((0, 0, 0, 1))))
    windows = (0,) if kind in ("leaving", "stripes") else of.windows  # what has left a window is in no place
    return replace(of, options=options, windows=windows, asks=asks, hits=hits, changes=tuple(changes), deaths=deaths)


def leaving(rng: random.Random) -> tuple[dict[str, Any], tuple[FleetChange, ...]]:
    """Options of an engine whose sequences lie whole on memory workers, of one rank or two, and the change by which
    some of these go, and perhaps others come.
    """
    ranks, places = rng.choice((1, 1, 2)), rng.randint(2, 4)
    places = min(places, 3) if ranks > 1 else places
    blocks = -(-MAX_LEN // BLOCK) * rng.choice((1, 2, 5)) + rng.randint(1, 4)
    options: dict[str, Any] = {"partition": "request", "memory_workers": ranks * places, "max_num_seqs": 6}
    options["kv_memory"] = _memory(blocks, KV_HEADS // ranks)
    if ranks > 1:
        options |= {"tensor_parallel_size": ranks, "collective": "mesh", "prefill_workers": 0}
    stay = rng.randint(1, places - 1)
    going = sorted(ranks * place + rank for place in rng.sample(range(places), places - stay) for rank in range(ranks))
    changes = [FleetChange(rng.uniform(0.0, 0.1), ranks * stay, tuple(going))]
    if rng.random() < 0.3:
        changes.append(FleetChange(rng.uniform(0.1, 0.3), ranks * rng.randint(1, places)))
    return options, tuple(changes)


def longer(rng: random.Random, ask: Arriving) -> Arriving:
    """Soon, and with so many tokens that much happens meanwhile."""
    longer = {"max_tokens": rng.randint(12, MAX_LEN - len(ask.prompt) - 1), "ignore_eos": True}
    return replace(ask, at_s=ask.at_s / 10, params={**ask.params, **longer})


def _besides(rng: random.Random) -> dict[str, Any]:
    """Draws the other work of memory workers, and how rows are cut."""
    return {
        "kv_checks": rng.choice((0.0, 0.0, 0.3, 1.0)),
        "zero_on_free": rng.random() < 0.3,
        "overlap": rng.random() < 0.7,
        "deterministic": rng.random() < 0.3,
    }


def _prompts_kept(rng: random.Random) -> dict[str, Any]:
    """Draws the prompts that prefill workers keep: none, all that come, or one and a little more."""
    if rng.random() < 0.4:
        return {"enable_prefix_caching": False}
    little = _memory(-(-MAX_LEN // BLOCK) + rng.randint(5, 12), KV_HEADS)
    return {"enable_prefix_caching": True, "prefill_kv_memory": rng.choice(("auto", little))}


def _memory(blocks: int, heads: int) -> str:
    return str(blocks * LAYERS * BLOCK * token_bytes(heads))


def _places(options: dict[str, Any]) -> list[Place]:
    ranks = options.get("tensor_parallel_size", 1)
    places = [("compute", i) for i in range(ranks * max(1, options["pipeline"] - 1))]
    places += [("memory", i) for i in range(options["memory_workers"] + ranks * options.get("kv_parity", 0))]
    return places + [("prefill", i) for i in range(options["prefill_workers"])]


def _long(rng: random.Random, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """Draws a length at which a stripe ends soon, or has just ended."""
    more = rng.randint(100, LONG - 40) - len(prompt)
    return (*prompt, *(rng.randrange(EOS) for _ in range(more)))


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
        if rng.random() < 0.4:  # another place during its recovery, or the same place again
            hits.append(Strike(rng.choice(places), call + rng.randint(1, SOON_CALL), rng.choice(HOWS)))
    return tuple(hits)
