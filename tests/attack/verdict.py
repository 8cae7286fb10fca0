"""The result of an attack, and what an attack gets to try it on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Verdict:
    """``held``: None = the attack was not tried, for the reason in ``evidence``."""

    held: bool | None
    evidence: str


@dataclass(frozen=True)
class Attack:
    """``run``: gets a folder of its own. ``control``: the same attack on something that is weak on purpose, where it
    must succeed; None = there is none.
    """

    name: str
    run: Callable[[Path], Verdict]
    control: Callable[[Path], Verdict] | None = None


def first_failure(checks: dict[str, bool], held: str) -> Verdict:
    """Held if all ``checks`` are true; else fell, by the first that is not."""
    failed = next((what for what, is_true in checks.items() if not is_true), None)
    return Verdict(True, held) if failed is None else Verdict(False, f"not so: {failed}")
