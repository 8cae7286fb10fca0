"""The options of an engine whose model has recurrent layers."""

from __future__ import annotations

import logging

from msgspec import structs

from lamina.config.conflicts import HYBRID_MODEL, conflicts_of
from lamina.config.engine_config import EngineConfig
from lamina.protocol.control import ComputeReady
from lamina.protocol.mixers import versions_of_sequence

log = logging.getLogger(__name__)


def options_for_model(config: EngineConfig, info: ComputeReady) -> EngineConfig:
    """Return the options for the model that workers have reported. Without recurrent layers they are as given; with
    them, no more sequences run than have room for their states. Raises ValueError for options that do not go with such
    layers.
    """
    if not info.state_shards:
        return config
    for line in conflicts_of(HYBRID_MODEL, config):
        raise ValueError(line)
    most = max_num_seqs(config, info)
    return structs.replace(config, batching=structs.replace(config.batching, max_num_seqs=most))


def max_num_seqs(config: EngineConfig, info: ComputeReady) -> int:
    """Return how many sequences may run: as the options say, or as many as have room for their recurrent states."""
    most, versions = config.batching.max_num_seqs, versions_of_sequence(config.topology.max_batches)
    if not info.state_shards or (room := info.state_slots // versions) >= most:
        return most
    log.warning(
        "--max-num-seqs is %d, not %d: memory workers have room for %d states, and a sequence has %d: raise "
        "--kv-cache-memory-bytes for more",
        room,
        most,
        info.state_slots,
        versions,
    )
    return room
