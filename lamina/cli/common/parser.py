"""An argument parser that says what is wrong in one line."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from lamina.api.vllm_compat import replacement_of
from lamina.config.flag_groups import GROUP_OF, flag_name
from lamina.observe.log_lines import log_json, say

from .config_file import read_config
from .group_flags import GIVEN
from .vllm_flags import WORDS, translated

NUMBERS: dict[Any, str] = {int: "a whole number", float: "a number"}
_OWN_TITLES = ("positional arguments", "options")  # of argparse's own groups
MISSING = "the following arguments are required: "  # argparse's own words


class Parser(argparse.ArgumentParser):
    """Each sub-command's parser tells its own errors; an unknown flag brings the one that was perhaps meant.

    ``--help=all`` shows all flags, and ``--help=WORD`` a group of them, or those that mention the word, as vLLM does.
    """

    essential: frozenset[str] = frozenset()  # the flags that --help shows; empty: all

    @property
    def flags(self) -> frozenset[str]:
        """The flags that it has by now."""
        return frozenset(self._option_string_actions)

    def parse_known_args(  # type: ignore[override] # one signature instead of typeshed's overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Nothing stays unknown."""
        known, args = self._option_string_actions, sys.argv[1:] if args is None else args
        if "--log-json" in args:  # before any line about other flags
            log_json("server")
        if self._subparsers is None:
            for word in (arg.partition("=")[2] for arg in args if arg.startswith("--help=")):
                print(super().format_help() if word == "all" else self._help_on(word), end="")
                self.exit()
            read_config(self, args)
        flags, unknown = super().parse_known_args(translated(args, known), namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            option = flag.lstrip("-").partition(".")[0].replace("-", "_")  # --some-config.field
            if way_out := replacement_of(option):
                self.error(f"{flag} is not supported: {way_out}")
            if option in GROUP_OF and GROUP_OF[option].flag in self._option_string_actions:
                self.error(f"{flag} is not a flag: write {flag_name(option)}")
            self.error(f"unknown argument {flag}{self._hint(flag)}")
        if hasattr(flags, GIVEN):
            delattr(flags, GIVEN)
        return flags, unknown

    def _hint(self, flag: str) -> str:
        """Return what another program's flag is here, or the flag that was perhaps meant; "" if neither is known."""
        shown = [name for name, action in self._option_string_actions.items() if action.help != argparse.SUPPRESS]
        if (word := WORDS.get(flag)) is not None:
            return f" (did you mean {word}?)" if word in shown else "" if word.startswith("-") else f": {word}"
        near = get_close_matches(flag, shown, n=1, cutoff=0.8) if flag.startswith("--") else []
        return f" (did you mean {near[0]}?)" if near else ""

    def format_help(self) -> str:
        """Return the page of --help."""
        if not self.essential:
            return super().format_help()
        titles = "; ".join(str(group.title) for group in self._action_groups if group.title not in _OWN_TITLES)
        page = self._page(lambda action: not self.essential.isdisjoint(action.option_strings))
        return f"{page}\nall flags: --help=all; those of a group, or with a word: --help=WORD\ngroups: {titles}\n"

    def _help_on(self, word: str) -> str:
        """Return the help of a group, else of all flags that mention ``word``. Ends the program if there are none."""
        asked = word.replace("_", "-").lower()
        if group := next((each for each in self._action_groups if str(each.title).lower() == asked), None):
            return self._page(lambda action: action in group._group_actions)

        def mentions(action: argparse.Action) -> bool:
            text = f"{' '.join(action.option_strings)} {action.help}"
            return bool(action.option_strings) and action.help != argparse.SUPPRESS and asked in text.lower()

        if not any(map(mentions, self._actions)):
            self.error(f"--help={word}: no flag mentions it; --help=all shows them all")
        return self._page(mentions)

    def _page(self, is_shown: Callable[[argparse.Action], bool]) -> str:
        """Return the help of some flags, by group."""
        formatter = self._get_formatter()
        values = [str(action.metavar or action.dest) for action in self._actions if not action.option_strings]
        formatter.add_text(f"usage: {' '.join([self.prog, *values])} [flags]")
        formatter.add_text(self.description)
        for group in self._action_groups:
            actions = [a for a in group._group_actions if is_shown(a) and a.help != argparse.SUPPRESS]
            formatter.start_section(group.title)
            formatter.add_text(group.description if actions else None)
            formatter.add_arguments(actions)
            formatter.end_section()
        return formatter.format_help()

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            if (kind := NUMBERS.get(action.type)) is None:
                raise
            raise argparse.ArgumentError(None, f"{_name(action)} must be {kind}, not {arg_string!r}") from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        near = get_close_matches(str(value), choices, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(choices)}"
        raise argparse.ArgumentError(None, f"{_name(action)} {value!r} is unknown ({hint})")

    def error(self, message: str) -> NoReturn:
        """One line on stderr, and status 2."""
        if message.startswith(MISSING):
            names = message.removeprefix(MISSING)
            message = f"{names} {'are' if ',' in names else 'is'} missing"
        say(f"{self.prog}: {message}; see {self.prog} --help", logging.ERROR)
        self.exit(2)


def _name(action: argparse.Action) -> str:
    """Return the flag as its user writes it."""
    return "/".join(action.option_strings) or str(action.metavar or action.dest)
