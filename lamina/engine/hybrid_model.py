"""The options of an engine whose model has recurrent layers."""

from __future__ import annotations

import logging

from msgspec import structs

from lamina.config.conflicts import HYBRID_MODEL, PREFIX_CACHING, conflict_text, conflicts_of
from lamina.config.engine_config import EngineConfig
from lamina.protocol.control import ComputeReady

log = logging.getLogger(__name__)


def options_for_model(config: EngineConfig, info: ComputeReady) -> EngineConfig:
    """Return the options for the model that workers have reported. Without recurrent layers they are as given; with
    them, prefixes are not cached. Raises ValueError for options that do not go with such layers.
    """
    if not info.state_shards:
        return config
    for line in conflicts_of(HYBRID_MODEL, config):
        raise ValueError(line)
    if config.batching.enable_prefix_caching:
        raise ValueError(conflict_text(HYBRID_MODEL, PREFIX_CACHING))
    if config.caches_prefixes:
        log.info("prefix caching is off: states of recurrent layers are not kept for later prompts yet")
    return structs.replace(config, batching=structs.replace(config.batching, enable_prefix_caching=False))
