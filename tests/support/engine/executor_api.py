"""Executors of simulated workers, by public names of the product alone."""

from __future__ import annotations

from collections.abc import Callable

from simulated import World

from lamina.config.engine_config import EngineConfig
from lamina.executor.worker_executor import WorkerExecutor


def start_executor(
    world: World, config: EngineConfig, on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None
) -> WorkerExecutor:
    """Start the workers of ``config`` in ``world``, and connect them. They pass no time but the world's."""
    return WorkerExecutor("a model", config, on_progress, clock=world.clock, links=world, launch=world.launch)
