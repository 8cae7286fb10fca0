"""Flags that set several options, as argparse reads them (``config.flag_groups``)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lamina.config.flag_groups import GROUPS, FlagGroup, flag_name, flag_text

GIVEN = "options_given"  # the attribute of a namespace with the options that such flags have set
_NUMBERS: dict[Any, str] = {int: "a whole number", float: "a number"}


class FlagValue(NamedTuple):
    """Reader of an option's text, its default, and the text of --help."""

    parse: Callable[[str], Any]
    default: Any
    help: str


def add_groups(
    parser: argparse.ArgumentParser, group_of: Callable[[str], Any], values: Mapping[str, FlagValue]
) -> set[str]:
    """Adds the flags that set several of the options in ``values``, each to the argument group of its first option.
    Returns these options, which have no other flag.
    """
    grouped = set[str]()
    for group in (group for group in GROUPS if values.keys() >= {*group.options}):
        own = {name: values[name] for name in group.options}
        group_of(group.options[0]).add_argument(
            group.flag,
            action=GroupAction,
            group=group,
            values=own,
            default=argparse.SUPPRESS,
            metavar=group.form,
            help=_help(group, own),
        )
        grouped |= own.keys()
    parser.set_defaults(**{name: values[name].default for name in grouped})
    return grouped


class GroupAction(argparse.Action):
    """Sets the options that a group's text names."""

    def __init__(self, *args: Any, group: FlagGroup, values: Mapping[str, FlagValue], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group, self._values = group, values

    def read(self, text: str) -> dict[str, Any]:
        """Return the options that ``text`` sets. Raises ValueError, and ImportError where a file needs a reader."""
        return {name: _value(name, self._values[name], each) for name, each in self._group.parse(text).items()}

    def __call__(self, parser: Any, namespace: argparse.Namespace, text: Any, option_string: Any = None) -> None:
        given: set[str] = vars(namespace).setdefault(GIVEN, set())
        try:
            for name, value in self.read(text).items():
                if name in given and getattr(namespace, name) != value:
                    before = flag_text(name, getattr(namespace, name))
                    raise ValueError(f"{self._group.flag} {text}: {before} is there, too: leave one out")
                given.add(name)
                setattr(namespace, name, value)
        except (ValueError, ImportError) as error:
            raise argparse.ArgumentError(None, str(error)) from None


def _value(name: str, kind: FlagValue, text: str) -> Any:
    try:
        return kind.parse(text)
    except ValueError as error:
        what = _NUMBERS.get(kind.parse, "a number of seconds, or a time such as 500ms")
        raise ValueError(f"{flag_name(name)} must be {what}, not {text!r}") from error


def _help(group: FlagGroup, values: Mapping[str, FlagValue]) -> str:
    """The help of the flag's own option, and of each key."""
    own = values.get(group.option)
    texts = [f"{own.help} (default: {own.default or 'none'})"] if own else []
    texts += [group.help] if group.help else []
    for key, target in group.keys.items():
        name, _, part = target.partition(".")
        default = "none" if part else values[name].default
        texts.append(f"{group.entry(key)} {group.parts.get(key) or values[name].help} (default: {default or 'none'})")
    return "; ".join(texts)
