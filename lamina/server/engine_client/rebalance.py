"""Gives memory workers other shares of the work when one becomes slower, or fast again."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from lamina.config.engine_config import EngineConfig
from lamina.engine.engine import Engine
from lamina.engine.scheduler_factory import check_kv_capacity
from lamina.executor.load_balance import LoadBalancer
from lamina.executor.memory_worker_slots import ResizeNeedsRestartError, check_resizable
from lamina.executor.worker_executor import WorkerExecutor
from lamina.protocol.executor import Clock

log = logging.getLogger(__name__)
REASON = "weigh"  # the reason of such a change


class Rebalancer:
    """Rebalances one engine whose memory workers are measured (``--memory-weights measured``); otherwise
    does nothing.
    """

    def __init__(self, engine: Engine, pools: WorkerExecutor, clock: Clock = time.monotonic) -> None:
        self._engine, self._pools = engine, pools
        topology = engine.config.topology
        # A worker that holds whole sequences may attend prompts while others decode, so its rate would mean nothing.
        info = engine.worker_info
        alike = (info.stripe_blocks > 0 and not info.single_shard) or all(lanes.has_all for lanes in info.kv_shards)
        several = topology.memory_workers > topology.tensor_parallel_size
        watched = topology.measures_weights and several and _can_change(engine.config)
        self._shares = LoadBalancer(topology.tensor_parallel_size, clock) if watched and alike else None
        self._last_warning: object = None  # the last logged reason why shares stay

    def update(self, counters: Mapping[str, Mapping[str, float]]) -> None:
        """Start a change of shares if one is due; does not wait. ``counters``: worker name -> its counters; call it
        about once a second.
        """
        elastic, names = self._pools.resizer, sorted(name for name in counters if name.startswith("memory-"))
        if self._shares is None or elastic.in_progress or len(names) != len(elastic.weights):
            return
        of_each = [counters[f"memory-{number}"] for number in range(len(names))]
        if (weights := self._shares.rebalance(elastic.weights, of_each)) is None:
            return
        parts = ", ".join(f"{weight:g}" for weight in weights)
        try:
            change = elastic.plan(len(weights), weights=weights)
            check_kv_capacity(self._engine.scheduler, self._engine.worker_info, change.capacity)
            elastic.begin(change, reason=REASON)
        except (ValueError, OSError) as error:
            now = list(elastic.weights), [weight < max(weights) for weight in weights]
            if self._last_warning != now:  # log once for the same worker and shares
                log.warning("memory workers read by %s, and keep their parts of the work: %s", parts, error)
            self._last_warning = now
        else:
            self._last_warning = None
            log.info("--memory-weights measured: memory workers now read by %s, and have such parts", parts)


def _can_change(config: EngineConfig) -> bool:
    """Return True if the present memory workers can get other shares."""
    try:
        check_resizable(config, same=True)
    except ResizeNeedsRestartError:
        return False
    return True
