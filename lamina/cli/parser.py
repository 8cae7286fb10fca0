"""An argument parser that says what is wrong in one line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """Each sub-command's parser tells its own errors; an unknown flag brings the one that was perhaps meant."""

    def parse_known_args(  # type: ignore[override] # one signature instead of typeshed's overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Nothing stays unknown."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            near = get_close_matches(flag, self._option_string_actions, n=1) if flag.startswith("--") else []
            self.error(f"unknown argument {flag}" + (f" (did you mean {near[0]}?)" if near else ""))
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """One line on stderr, and status 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")
