"""An argument parser that says what is wrong in one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from lamina.api.vllm_compat import replacement_of

from .group_flags import tell_old_flags
from .vllm_flags import translated

NUMBERS: dict[Any, str] = {int: "a whole number", float: "a number"}
MISSING = "the following arguments are required: "  # argparse's own words


class Parser(argparse.ArgumentParser):
    """Each sub-command's parser tells its own errors; an unknown flag brings the one that was perhaps meant."""

    def parse_known_args(  # type: ignore[override] # one signature instead of typeshed's overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Nothing stays unknown."""
        known = self._option_string_actions
        flags, unknown = super().parse_known_args(translated(sys.argv[1:] if args is None else args, known), namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            option = flag.lstrip("-").partition(".")[0].replace("-", "_")  # --some-config.field
            if way_out := replacement_of(option):
                self.error(f"{flag} is not here: {way_out}")
            near = get_close_matches(flag, known, n=1) if flag.startswith("--") else []
            self.error(f"unknown argument {flag}" + (f" (did you mean {near[0]}?)" if near else ""))
        tell_old_flags(flags)
        return flags, unknown

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
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _name(action: argparse.Action) -> str:
    """Return the flag as its user writes it."""
    return "/".join(action.option_strings) or str(action.metavar or action.dest)
