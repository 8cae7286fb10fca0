"""Engines and executors as tests build them: the real ones, without worker processes, by public names alone.

- ``make_engine``: an engine whose executor draws tokens by a rule (fake_executor). For requests and their tokens.
- ``simulated_engine``: an engine whose workers have a virtual time, and draw no tokens. For plans, times and facts.
- ``start_executor``: an executor, without an engine, over simulated workers and links. For losses and epochs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

from fake_executor import FakeWire
from simulated import World

from lamina.config.engine_config import EngineConfig
from lamina.config.flat_options import make_config
from lamina.engine.engine import Engine
from lamina.engine.feature import EngineFeature
from lamina.engine.scheduler_factory import PartsBuilder, build_parts
from lamina.executor.worker_executor import WorkerExecutor
from lamina.protocol.control import ComputeReady
from lamina.request import RequestOutput
from lamina.tools.plan.simulator.clock import VirtualClock
from lamina.tools.plan.simulator.lossless import RoundLoad, SimulatedExecutor, simulated_ready

READY = simulated_ready(num_layers=2, num_blocks=60, block_size=16, max_len=256)


def make_engine(
    wire: Any = None, features: Iterable[EngineFeature] = (), clock: Callable[[], float] | None = None, **options: Any
) -> Engine:
    """An engine over ``wire``; None: a FakeWire. ``options``: as of LLM. It keeps no prefixes unless an option asks for
    it, so that all blocks are free at the end. ``clock``: None: a second passes between two looks at it.
    """
    config = make_config({"enable_prefix_caching": False, **options})
    ticks = count()
    return Engine(wire or FakeWire(), config, clock or (lambda: float(next(ticks))), features=features)


def simulated_engine(
    options: dict[str, Any],
    ready: ComputeReady = READY,
    seconds: Callable[[RoundLoad], float] = lambda load: 0.01,
    build: PartsBuilder = build_parts,
) -> Engine:
    """An engine over simulated workers. ``options``: as of LLM. ``ready``: what its workers say of themselves.
    ``seconds``: that a round takes.
    """
    clock = VirtualClock()
    config = make_config({"transport": "shm", "block_size": ready.block_size, **options})
    return Engine(SimulatedExecutor(clock, ready, seconds), config, clock, build=build)


def run(engine: Engine) -> dict[int, RequestOutput]:
    """Serve all requests. Returns the last output of each. No block is held afterwards but for prefixes."""
    done = dict[int, RequestOutput]()
    while engine.has_work:
        done |= {output.request_id: output for output in engine.step()}
    engine.release_idle_blocks()
    return done


def start_executor(
    world: World, config: EngineConfig, on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None
) -> WorkerExecutor:
    """Start the workers of ``config`` in ``world``, and connect them. They pass no time but the world's."""
    return WorkerExecutor("a model", config, on_progress, clock=world.clock, links=world, launch=world.launch)
