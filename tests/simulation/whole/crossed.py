"""Scenarios of faults that meet others by chance alone, or never: seeds of their own, as data."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from .process import DIES, FLIPS, HANGS, STOPS, TOLD, Place
from .scenario import FleetChange, FleetScenario, Strike, fleet_scenario, longer

SPAN = 200  # of calls, at which the first one of a scenario is hit
AT_ONCE = 6  # calls after a message, at which the next one is
HANG_S = 2.0  # for which a step may be owed
ROOMY = "1MiB"


def crossed_fleet(seed: int) -> FleetScenario:
    """The scenario of ``seed``, in which others are hit. One or two are hit as they quiesce after the loss of another
    worker, or as they reconnect. Workers that give KV away or take it are hit as memory workers come and go. One is
    asked to end, and hit before it has; another one hangs, and another one's memory is damaged.
    """
    of, rng = fleet_scenario(seed), random.Random(f"crossed {seed}")
    kind = rng.choice(("halt", "halt", "move", "told", "hang", "flip"))
    options: dict[str, Any] = {**of.options, "kv_memory": ROOMY, "spare_memory": rng.choice((0, 0, 1))}
    options.pop("prefill_kv_memory", None)
    asks = tuple(longer(rng, ask) for ask in of.asks)
    of = replace(of, options=options, asks=asks, deaths=(), changes=(), hits=())
    return _KINDS[kind](of, rng)


def _in_halts(of: FleetScenario, rng: random.Random) -> FleetScenario:
    """A loss, and others after a message of the epoch change of its recovery."""
    places = _places(of)
    first = rng.choice(places)
    others = rng.choices([p for p in places if p != first] or places, k=rng.choice((1, 1, 2)))
    behind = [Strike(p, rng.randint(1, AT_ONCE), rng.choice((DIES, DIES, STOPS)), _message(p, rng)) for p in others]
    return replace(of, hits=(Strike(first, rng.randint(1, SPAN)), *behind))


def _in_moves(of: FleetScenario, rng: random.Random) -> FleetScenario:
    """Memory workers come or go, and who gives, or who takes, dies meanwhile: by head all KV moves at once, by request
    sequences go one by one before.
    """
    there, wanted, partition = of.options["memory_workers"], rng.choice((1, 2, 2, 4)), "request"
    if rng.random() < 0.5:
        (there, wanted), partition = rng.choice(((2, 1), (2, 1), (1, 2))), "head"
    gone = tuple(sorted(rng.sample(range(there), there - wanted))) if wanted < there else ()
    victims = rng.sample(range(max(there, wanted)), k=min(rng.choice((1, 1, 2)), max(there, wanted)))
    victims = [rng.choice(gone)] if gone and rng.random() < 0.7 else victims
    message = rng.choice(("Reshard", "Reshard", "Reshard", "PrepareStore"))
    hits = tuple(Strike(("memory", w), rng.randint(1, 2 * AT_ONCE), DIES, message) for w in victims)
    change = FleetChange(rng.uniform(0.0, 0.1), wanted, gone)
    options = {**of.options, "partition": partition, "memory_workers": there}
    return replace(of, options=options, hits=hits, changes=(change,))


def _told_to_end(of: FleetScenario, rng: random.Random) -> FleetScenario:
    """One or two are asked to, and perhaps end before their KV has gone, or another worker does."""
    workers = of.options["memory_workers"]
    told = rng.sample(range(workers), k=min(rng.choice((1, 1, 2)), workers))
    hits = [Strike(("memory", w), rng.randint(1, SPAN), TOLD) for w in told]
    if rng.random() < 0.6:
        hits.append(
            Strike(("memory", told[0]), rng.randint(1, 4 * AT_ONCE), DIES, rng.choice(("TerminationNotice", "Reshard")))
        )
    if rng.random() < 0.3:
        hits.append(Strike(("compute", 0), rng.randint(1, SPAN)))
    return replace(of, hits=tuple(hits))


def _hanging(of: FleetScenario, rng: random.Random) -> FleetScenario:
    """One hangs, and perhaps another worker dies while it is given up."""
    places = _places(of)
    hits = [Strike(rng.choice(places), rng.randint(1, SPAN), HANGS)]
    if rng.random() < 0.4:
        victim = rng.choice(places)
        hits.append(Strike(victim, rng.randint(1, AT_ONCE), DIES, "Quiesce"))
    return replace(of, options={**of.options, "step_timeout_s": HANG_S}, hits=tuple(hits))


def _damaged(of: FleetScenario, rng: random.Random) -> FleetScenario:
    """A bit of what one or two memory workers are about to attend, and have checksums of."""
    places = [("memory", i) for i in range(of.options["memory_workers"])]
    hits = [Strike(rng.choice(places), rng.randint(1, SPAN), FLIPS) for _ in range(rng.choice((1, 1, 2)))]
    if rng.random() < 0.3:
        hits.append(Strike(rng.choice(places), rng.randint(1, AT_ONCE), DIES, "Quiesce"))
    # A block that another worker has filled, or a fork has copied, has a checksum from the first step that attends it.
    options = {**of.options, "kv_checks": 1.0, "prefill_workers": 0, "enable_prefix_caching": False}
    asks = tuple(replace(ask, params={**ask.params, "n": 1}) for ask in of.asks)
    return replace(of, options=options, asks=asks, hits=tuple(hits))


_KINDS = {"halt": _in_halts, "move": _in_moves, "told": _told_to_end, "hang": _hanging, "flip": _damaged}


def _places(of: FleetScenario) -> list[Place]:
    options = of.options
    places = [("compute", i) for i in range(max(1, options["pipeline"] - 1))]
    places += [("memory", i) for i in range(options["memory_workers"])]
    return places + [("prefill", i) for i in range(options["prefill_workers"])]


def _message(place: Place, rng: random.Random) -> str:
    """A message of an epoch change: a worker is to quiesce, has quiesced, or is to reconnect."""
    return rng.choice(("Quiesce", "Quiesced", "Connect"))
