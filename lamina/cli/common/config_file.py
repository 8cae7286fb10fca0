"""``--config FILE``: options from a file, which ``--print-config`` writes. Flags of the command line win."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from lamina.config.flag_groups import RENAMED_FLAGS
from lamina.utils.yaml_file import read_yaml

from .group_flags import GroupAction

FLAG = "--config"
_HIDDEN = "***"  # a key, as --print-config prints it
_BY_FLAG = {flag.strip("-").replace("-", "_"): option for option, flag in RENAMED_FLAGS.items()}


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag; ``read_config`` reads its file before all other flags."""
    text = "options of a file, JSON or YAML, as --print-config writes them; other flags win"
    parser.add_argument(FLAG, default=argparse.SUPPRESS, metavar="FILE", help=text)


def read_config(parser: argparse.ArgumentParser, args: Sequence[str]) -> None:
    """Make the values of the file that ``args`` name the defaults of ``parser``. Ends the program with one line if the
    file cannot be read, or has an option that the command does not have.
    """
    actions = {action.dest: action for action in parser._actions}
    if FLAG.strip("-") not in actions:
        return
    path = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    path.add_argument(FLAG)
    try:
        file = path.parse_known_args(args)[0].config
    except argparse.ArgumentError as error:
        parser.error(str(error))
    if file is None:
        return
    known = {*actions, *parser._defaults} - {"help", "config", "print_config", "dry_run"}
    try:
        table: Any = read_yaml(file, f"{FLAG} {file}")
        if not isinstance(table, dict):
            raise ValueError(f"{FLAG} {file} has no table of options: see --print-config")
        _take(parser, actions, known, table, f"{FLAG} {file}")
    except (ValueError, ImportError) as error:
        parser.error(str(error))


def _take(
    parser: argparse.ArgumentParser,
    actions: Mapping[str, argparse.Action],
    known: Collection[str],
    table: Mapping[Any, Any],
    subject: str,
) -> None:
    """Make the values of a table the defaults of ``parser``. Raises ValueError, ImportError."""
    given = dict[str, str]()  # option -> its key in the file
    for key, value in table.items():
        name = str(key).replace("-", "_")
        name = _BY_FLAG.get(name, name)
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "see --print-config"
            raise ValueError(f"{subject}: there is no option {key} ({hint})")
        if value == _HIDDEN:
            continue
        action, options = actions.get(name), {name: value}
        if isinstance(action, GroupAction) and _is_text_of(value, parser._defaults.get(name)):
            if not isinstance(value, str):
                raise ValueError(f"{subject}: {key} must be text, as after {action.option_strings[0]}, not {value!r}")
            options = action.read(value)
        elif action is not None and not isinstance(action, GroupAction):
            options = {name: _checked(action, value, f"{subject}: {key}")}
            if not action.option_strings:
                action.nargs, action.required = "?", False
        for option in options:
            if (before := given.setdefault(option, str(key))) != str(key):
                raise ValueError(f"{subject}: {before} and {key} set the same: leave one out")
        parser.set_defaults(**options)


def _is_text_of(value: Any, default: Any) -> bool:
    """Return whether a value is the text of a flag with keys, and not of its option of the same name. ``default``: of
    that option; None = there is none.
    """
    if default is None:
        return True
    return isinstance(value, str) and (":" in value or "=" in value or not isinstance(default, str))


def _checked(action: argparse.Action, value: Any, name: str) -> Any:
    """Return a value as the default of a flag. Raises ValueError for one that the flag could not have."""
    if value is None and action.default is None:
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if action.nargs == 0 and not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, not {value!r}")
    is_one = isinstance(action.default, int | float | str) or not action.option_strings
    if is_one and (value is None or isinstance(value, list | dict)):
        raise ValueError(f"{name} must be one value, not {value!r}")
    if isinstance(action.default, list) and not isinstance(value, list):
        raise ValueError(f"{name} must be a list, not {value!r}")
    if action.type in (int, float) and not isinstance(value, str) and (not is_number or action.type(value) != value):
        raise ValueError(f"{name} must be {'a whole number' if action.type is int else 'a number'}, not {value!r}")
    return str(value) if action.type is str and is_number else value
