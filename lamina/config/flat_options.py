"""An EngineConfig of flat options, as ``LLM`` and the command line take them."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from msgspec import structs

from .engine_config import EngineConfig
from .option import Option, options_of
from .resolve import check_compatible

_GROUPS = {f.name: f.type for f in structs.fields(EngineConfig)}
OPTIONS: dict[str, Option] = {name: option for group in _GROUPS.values() for name, option in options_of(group).items()}
SUBJECT_OF = {
    name: subject for subject, group in _GROUPS.items() for name in options_of(group)
}  # field of EngineConfig


def make_config(options: Mapping[str, Any]) -> EngineConfig:
    """An EngineConfig of keyword options. Raises ValueError, naming the option or its flag, for an unknown name, for
    a value that an option cannot have, and for options that do not go together.
    """
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        near = get_close_matches(unknown[0], OPTIONS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(OPTIONS)}"
        raise ValueError(f"unknown option {unknown[0]!r}; {hint}")
    values = {name: OPTIONS[name].parse(value) for name, value in options.items()}
    config = EngineConfig(
        **{
            name: group(**{option: values[option] for option in options_of(group) if option in values})
            for name, group in _GROUPS.items()
        }
    )
    check_compatible(config)
    return config


def flat_options(config: EngineConfig) -> dict[str, Any]:
    """Every option by its name: what ``make_config`` makes ``config`` of."""
    return {name: value for group in _GROUPS for name, value in structs.asdict(getattr(config, group)).items()}


def replace_options(config: EngineConfig, options: Mapping[str, Any]) -> EngineConfig:
    """``config`` with other values for ``options``. Raises ValueError as ``make_config`` does."""
    return make_config({**flat_options(config), **options})


def with_fewer_workers(config: EngineConfig, left: Mapping[str, int]) -> dict[str, Any]:
    """Sizes, by option, with which ``config`` does with so many workers as are ``left``, by option: of those that work
    together none or all. Raises ValueError as ``replace_options`` does, where it cannot.
    """
    topology, had = config.topology, flat_options(config)
    together = {"memory_workers": topology.tensor_parallel_size, "prefill_workers": topology.prefill_pipeline}
    sizes: dict[str, Any] = {name: count - count % together[name] for name, count in left.items()}
    if sizes.get("prefill_workers") == 0:
        alone = {"prefill_pipeline": 1, "prefill_kv_memory": "auto"}
        sizes |= {name: value for name, value in alone.items() if value != had[name]}
    replace_options(config, sizes)
    return sizes
