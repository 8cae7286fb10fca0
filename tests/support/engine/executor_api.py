"""Executors of simulated workers, by public names of the product alone."""

from __future__ import annotations

from simulated import World

from lamina.config.engine_config import EngineConfig
from lamina.executor.worker_executor import WorkerExecutor


def start_executor(world: World, config: EngineConfig) -> WorkerExecutor:
    """Start the workers of ``config`` in ``world``, and connect them. They pass no time but the world's."""
    return WorkerExecutor("a model", config, clock=world.clock, links=world, launch=world.launch)
