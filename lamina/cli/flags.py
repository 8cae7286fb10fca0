"""Command-line flags made from the fields of the configuration dataclasses, so that the two cannot drift apart."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Collection
from typing import Any

from lamina.config import EngineConfig, flag, make_config

_ALL = tuple(f.name for f in dataclasses.fields(EngineConfig))


def add_engine_flags(parser: argparse.ArgumentParser, only: Collection[str] = _ALL) -> None:
    """One flag for each field of EngineConfig, or for those of ``only``, plus --print-config and --dry-run."""
    group = parser.add_argument_group("engine")
    for f in (f for f in dataclasses.fields(EngineConfig) if f.name in only):
        kind: dict[str, Any] = (
            {"action": argparse.BooleanOptionalAction} if f.type == "bool" else {"type": _TYPES[str(f.type)]}
        )
        group.add_argument(flag(f.name), default=f.default, help=f"{f.metadata['help']} (default: {f.default})", **kind)
    parser.add_argument("--print-config", action="store_true", help="print all settings, defaults filled in, as JSON")
    parser.add_argument("--dry-run", action="store_true", help="check everything, say what would be started, and exit")


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The EngineConfig of parsed flags. Raises ValueError that names the flag."""
    return make_config({name: getattr(args, name) for name in _ALL if hasattr(args, name)})


def print_config(config: EngineConfig, **more: Any) -> None:
    """JSON on stdout: what was asked for, and the defaults of the rest."""
    print(json.dumps({**more, **dataclasses.asdict(config)}, indent=2))


def _int_or_word(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdigit() else text


_TYPES = {"int": int, "int | str": _int_or_word, "float": float, "str": str}
