"""Command-line flags made from the options of an engine, so that the two cannot drift apart."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

from lamina.api.vllm_compat import PASTED, SWITCHES, translate_vllm_options
from lamina.config.engine_config import EngineConfig
from lamina.config.flag_groups import RENAMED_FLAGS, flag_name
from lamina.config.flat_options import OPTIONS, SUBJECT_OF, flat_options, make_config
from lamina.config.option import Option
from lamina.executor.hosts.cluster_file import is_file
from lamina.observe.log_lines import say

from .group_flags import FlagValue, add_groups
from .parser import Parser

SUBJECTS = {  # part of an EngineConfig -> title of its flags
    "model": "model", "kv": "KV cache", "batching": "batching", "topology": "workers", "devices": "devices",
    "launch": "start and hosts", "deadlines": "deadlines", "offload": "KV offload", "overflow": "long contexts",
}  # fmt: skip

ESSENTIAL = frozenset((  # of the engine's flags, those that --help shows
    "--dtype", "--max-model-len", "--trust-remote-code", "--quantization", "--kv-cache-memory-bytes",
    "--kv-cache-dtype", "--max-num-seqs", "--memory-workers", "--prefill-workers", "--pipeline",
    "--tensor-parallel-size", "--compute-device", "--memory-device", "--transport", "--cluster", "--print-config",
    "--dry-run",
))  # fmt: skip


def add_engine_flags(parser: Parser, only: Collection[str] = tuple(OPTIONS)) -> None:
    """The flags of an engine's options, or of those of ``only``, by subject, plus --print-config and --dry-run.

    From here on --help shows what is essential: the flags that ``parser`` had, unless it has chosen among them, and
    ESSENTIAL.
    """
    parser.essential = (parser.essential or parser.flags) | ESSENTIAL
    titles = {name: SUBJECTS[subject] for name, subject in SUBJECT_OF.items()}
    add_option_flags(parser, {name: option for name, option in OPTIONS.items() if name in only}, titles)
    for name in PASTED:
        if (flag := flag_name(name)) not in RENAMED_FLAGS.values():
            switch: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if name in SWITCHES else {}
            parser.add_argument(flag, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **switch)
    parser.add_argument("--print-config", action="store_true", help="print all settings, defaults filled in, as JSON")
    parser.add_argument("--dry-run", action="store_true", help="check everything, say what would be started, and exit")


def add_option_flags(
    parser: argparse.ArgumentParser,
    options: Mapping[str, Option],
    titles: Mapping[str, str],
    parsers: Mapping[str, Callable[[str], Any]] = MappingProxyType({}),
) -> None:
    """Add a flag for each option, or one for several, to the argument group that ``titles`` names. ``parsers``: of
    options whose text is not simply of their type.
    """
    values = {
        name: FlagValue(parsers.get(name) or _parser_of(option), option.default, option.help)
        for name, option in options.items()
    }
    groups = {title: parser.add_argument_group(title) for title in dict.fromkeys(titles[name] for name in values)}
    grouped = add_groups(parser, lambda name: groups[titles[name]], values)
    for option in (options[name] for name in values if name not in grouped):
        default = {(): "", None: "unset"}.get(option.default, option.default)
        help, kind = f"{option.help} (default: {default})", _kind(option)
        if option.name in RENAMED_FLAGS:
            kind["metavar"] = flag_name(option.name).strip("-").replace("-", "_").upper()
        groups[titles[option.name]].add_argument(
            flag_name(option.name), dest=option.name, default=option.default, help=help, **kind
        )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The EngineConfig of parsed flags; of pasted ones that mean nothing here a line on stderr tells. Raises ValueError
    that names the flag.
    """
    options, pasted = (
        {name: getattr(args, name) for name in names if hasattr(args, name)} for names in (OPTIONS, PASTED)
    )
    if options.get("launcher") == "static" and is_file(options.get("ray_address", "")) and not options["hosts"]:
        options["hosts"] = options.pop("ray_address")  # of --cluster
    replacements, lines = translate_vllm_options(pasted, options)
    for line in lines:
        say(line, logging.WARNING)
    return make_config(options | replacements)


def check_at_least(args: argparse.Namespace, low: int, *names: str) -> None:
    """Raises ValueError that names the flag of an argument below ``low``."""
    for name in names:
        if (value := getattr(args, name)) < low:
            raise ValueError(f"{flag_name(name)} must be at least {low}, not {value}")


def print_config(config: EngineConfig, **more: Any) -> None:
    """JSON on stdout: what was asked for, and the defaults of the rest, by the names of flags where these set one
    option.
    """
    options = {**more, **flat_options(config)}
    shown = {RENAMED_FLAGS.get(name, name).strip("-").replace("-", "_"): value for name, value in options.items()}
    print(json.dumps(shown, indent=2))


def _kind(option: Option) -> dict[str, Any]:
    """Return the parser of the option's text for argparse; a list stays text, which the option parses."""
    if bool in option.types:
        return {"action": argparse.BooleanOptionalAction}
    return {"type": _parser_of(option)}


def _parser_of(option: Option) -> Callable[[str], Any]:
    return _int_or_word if option.types == (int, str) else str if tuple in option.types else option.types[0]


def _int_or_word(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdigit() else text
