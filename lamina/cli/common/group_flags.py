"""Flags that set several options, and old names of flags, as argparse reads them (``config.flag_groups``)."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lamina.config.flag_groups import GROUP_OF, GROUPS, OLD_FLAGS, OLD_NAMES_GO, FlagGroup, flag_name, flag_text
from lamina.observe.log_lines import say

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
            action=_GroupAction,
            group=group,
            values=own,
            default=argparse.SUPPRESS,
            metavar=group.form,
            help=_help(group, own),
        )
        grouped |= own.keys()
    parser.set_defaults(**{name: values[name].default for name in grouped})
    return grouped


def add_old_flags(parser: argparse.ArgumentParser, values: Mapping[str, FlagValue]) -> None:
    """Adds the old names of flags that set options in ``values``; --help does not show them."""
    for old, name in OLD_FLAGS.items():
        if name in values and old not in parser._option_string_actions:
            is_switch = isinstance(values[name].default, bool)
            names = [old, old.replace("--", "--no-", 1)] if is_switch else [old]
            parser.add_argument(
                *names,
                action=_OldFlag,
                name=name,
                value=values[name],
                nargs=0 if is_switch else None,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )


def tell_old_flags(args: argparse.Namespace) -> None:
    """Prints a line on stderr for each flag that had its old name, with what to write."""
    given = vars(args).pop("given", {})
    for written, name, value in vars(args).pop("old_flags", ()):
        if (group := GROUP_OF.get(name)) is None:
            now = flag_text(name, value)
        else:
            own = {group.option: str(getattr(args, group.option))} if group.option in given else {}
            now = f"{group.flag} {group.write({**own, name: str(value)})}"
        say(f"{written} is {now} now: the old name goes in version {OLD_NAMES_GO}", logging.WARNING)


class _GroupAction(argparse.Action):
    """Sets the options that a group's text names."""

    def __init__(self, *args: Any, group: FlagGroup, values: Mapping[str, FlagValue], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group, self._values = group, values

    def __call__(self, parser: Any, namespace: argparse.Namespace, text: Any, option_string: Any = None) -> None:
        flag = self._group.flag
        try:
            for name, each in self._group.parse(text).items():
                value = _value(name, self._values[name], each)
                if _noted(namespace, "given").get(name) == flag and getattr(namespace, name) != value:
                    raise ValueError(
                        f"{flag} {text}: {flag_text(name, getattr(namespace, name))} is there, too: leave one out"
                    )
                _set(namespace, name, value, flag)
        except (ValueError, ImportError) as error:
            raise argparse.ArgumentError(None, str(error)) from None


class _OldFlag(argparse.Action):
    """Sets the option that the flag is called otherwise for now."""

    def __init__(self, *args: Any, name: str, value: FlagValue, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._name, self._value = name, value

    def __call__(self, parser: Any, namespace: argparse.Namespace, text: Any, option_string: Any = None) -> None:
        flag = option_string or self.option_strings[0]
        try:
            value = not flag.startswith("--no-") if self.nargs == 0 else _value(self._name, self._value, text)
            _set(namespace, self._name, value, flag)
        except ValueError as error:
            raise argparse.ArgumentError(None, str(error)) from None
        written = (flag, self._name, value) if self.nargs == 0 else (f"{flag} {text}", self._name, text)
        namespace.old_flags = [*getattr(namespace, "old_flags", ()), written]


class RenamedFlag(argparse.Action):
    """Sets an option whose flag had another name before."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, value: Any, option_string: str | None = None
    ) -> None:
        _renamed(self, namespace, value)


class RenamedSwitch(argparse.BooleanOptionalAction):
    """The same of a switch."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, value: Any, option_string: str | None = None
    ) -> None:
        _renamed(self, namespace, value=not str(option_string).startswith("--no-"))


def _renamed(action: argparse.Action, namespace: argparse.Namespace, value: Any) -> None:
    try:
        _set(namespace, action.dest, value, action.option_strings[0])
    except ValueError as error:
        raise argparse.ArgumentError(None, str(error)) from None


def _noted(namespace: argparse.Namespace, name: str) -> dict[str, str]:
    """Notes of a namespace about the flags that it is made of."""
    if not hasattr(namespace, name):
        setattr(namespace, name, {})
    notes: dict[str, str] = getattr(namespace, name)
    return notes


def _set(namespace: argparse.Namespace, name: str, value: Any, flag: str) -> None:
    """Raises ValueError where another flag has set the option."""
    before = _noted(namespace, "given").setdefault(name, flag)
    if before != flag:
        old = flag if flag.replace("--no-", "--", 1) in OLD_FLAGS else before
        raise ValueError(f"{old} and {flag_name(name)} set the same: leave out {old}, which is an old name")
    setattr(namespace, name, value)


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
