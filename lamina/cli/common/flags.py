"""Command-line flags made from the options of an engine, so that the two cannot drift apart."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from lamina.api.vllm_compat import PASTED, SWITCHES, translate_vllm_options
from lamina.config.engine_config import EngineConfig
from lamina.config.flat_options import OPTIONS, REMOVED_OPTIONS, flat_options, make_config
from lamina.config.option import Option, flag_name


def add_engine_flags(parser: argparse.ArgumentParser, only: Collection[str] = tuple(OPTIONS)) -> None:
    """One flag for each option of an engine, or for those of ``only``, plus --print-config and --dry-run."""
    group = parser.add_argument_group("engine")
    for option in (option for name, option in OPTIONS.items() if name in only):
        default = {(): "", None: "unset"}.get(option.default, option.default)
        help = f"{option.help} (default: {default})"
        group.add_argument(flag_name(option.name), default=option.default, help=help, **_kind(option))
    for name in REMOVED_OPTIONS:
        parser.add_argument(flag_name(name), nargs="?", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    for name in PASTED:
        kind: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if name in SWITCHES else {}
        parser.add_argument(flag_name(name), default=argparse.SUPPRESS, help=argparse.SUPPRESS, **kind)
    parser.add_argument("--print-config", action="store_true", help="print all settings, defaults filled in, as JSON")
    parser.add_argument("--dry-run", action="store_true", help="check everything, say what would be started, and exit")


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The EngineConfig of parsed flags; of pasted ones that mean nothing here a line on stderr tells. Raises ValueError
    that names the flag.
    """
    options, pasted = (
        {name: getattr(args, name) for name in names if hasattr(args, name)}
        for names in ((*OPTIONS, *REMOVED_OPTIONS), PASTED)
    )
    replacements, lines = translate_vllm_options(pasted, options)
    for line in lines:
        print(line, file=sys.stderr)
    return make_config(options | replacements)


def print_config(config: EngineConfig, **more: Any) -> None:
    """JSON on stdout: what was asked for, and the defaults of the rest."""
    print(json.dumps({**more, **flat_options(config)}, indent=2))


def check_writable(path: str | None, flag: str) -> None:
    """Before any work is done: raises ValueError that names ``flag`` where no file can be written. None: none is
    to."""
    if path is None:
        return
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise ValueError(f"{flag} {path}: there is no folder {folder}: make it, or name another")
    target = path if os.path.exists(path) else folder
    if os.path.isdir(path) or not os.access(target, os.W_OK):
        raise ValueError(f"{flag} {path} cannot be written: name a file in a folder that is yours")


def _kind(option: Option) -> dict[str, Any]:
    """How argparse reads the option's text; a list stays text, which the option parses."""
    if bool in option.types:
        return {"action": argparse.BooleanOptionalAction}
    return {"type": _int_or_word if option.types == (int, str) else str if tuple in option.types else option.types[0]}


def _int_or_word(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdigit() else text
