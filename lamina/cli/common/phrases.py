"""Words that several sub-commands print."""

from __future__ import annotations

from collections.abc import Sequence

from lamina.config.engine_config import EngineConfig


def collective_text(config: EngineConfig, hosts: Sequence[str] = ()) -> list[str]:
    """Return how ranks would meet, in a line, or in several if replicas differ. ``hosts``: of the compute workers in
    their order, none where all are on one. Raises ValueError for what ranks would refuse.
    """
    from lamina.ops.collective.expected_collective import expected_collective

    size, by_words = config.topology.tensor_parallel_size, dict[str, list[str]]()
    for first in range(0, config.topology.num_compute if size > 1 else 0, size):
        together = len(set(hosts[first : first + size])) <= 1
        words = expected_collective(config.topology.collective, config.devices.compute_device, together=together)
        by_words.setdefault(words, []).extend(f"compute-{i}" for i in range(first, first + size))
    line = f"--collective {config.topology.collective}: ranks would meet over "
    return [line + w + (f" ({', '.join(who)})" if len(by_words) > 1 else "") for w, who in by_words.items()]
