"""A suite's list: which files are run, and the differences that are known, each under its reason.

    run tests/test_completion.py             a file of the suite
    passes 40                                at least so many pass
    [reason]                                 why the tests below it fail here
    says *LoRA is not served*                how their causes read; a failure for another cause is not known
    tests/test_completion.py::test_lora*     * is any text
    [!reason]                                why the tests below it say nothing of Lamina: they are not run

Lines that begin with # are comments.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Ran:
    """The result of one test: ``outcome`` is passed, failed or skipped; ``cause`` is one line."""

    test: str
    outcome: str
    cause: str = ""


@dataclass
class Reason:
    """The reason why some tests fail, or are not run. ``says``: patterns of the causes that it explains."""

    text: str
    silent: bool = False
    says: list[str] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)


@dataclass
class Known:
    """A list, read."""

    files: list[str] = field(default_factory=list)
    passes: int = 0
    reasons: list[Reason] = field(default_factory=list)

    @property
    def differs(self) -> list[str]:
        """Patterns of the tests that may fail."""
        return [test for reason in self.reasons if not reason.silent for test in reason.tests]

    @property
    def silent(self) -> list[str]:
        """Patterns of the tests that are not run."""
        return [test for reason in self.reasons if reason.silent for test in reason.tests]

    def reason(self, ran: Ran) -> str:
        """Returns why ``ran`` may fail as it did; empty: nothing is known."""
        for reason in self.reasons:
            named = not reason.silent and any(matches(test, ran.test) for test in reason.tests)
            if named and any(matches(cause, ran.cause) for cause in reason.says):
                return reason.text
        return ""

    def left_out(self, test: str) -> bool:
        """Returns whether ``test`` is not run."""
        return any(matches(pattern, test) for pattern in self.silent)


@dataclass
class Verdict:
    """A run compared with its list."""

    passed: int = 0
    differs: Counter[str] = field(default_factory=Counter)  # by reason
    skipped: Counter[str] = field(default_factory=Counter)  # by cause
    new: list[Ran] = field(default_factory=list)  # failed, and no reason is known
    mended: list[str] = field(default_factory=list)  # patterns all of whose tests passed
    missing: int = 0  # fewer passed than the list says

    @property
    def red(self) -> bool:
        """Returns whether a person has to look."""
        return bool(self.new or self.missing)


def read(path: Path) -> Known:
    """The list in ``path``. Raises ValueError for a line that says nothing, and for a reason without causes."""
    known = Known()
    for number, line in enumerate(path.read_text().splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        word, _, rest = line.partition(" ")
        if line.startswith("[") and line.endswith("]"):
            known.reasons.append(Reason(line.strip("[!]"), silent=line.startswith("[!")))
        elif word == "run" and rest:
            known.files.append(rest)
        elif word == "passes" and rest.isdecimal():
            known.passes = int(rest)
        elif not known.reasons:
            raise ValueError(f"{path}:{number}: a test stands under no [reason]: {line}")
        elif word == "says" and rest:
            known.reasons[-1].says.append(rest)
        else:
            known.reasons[-1].tests.append(line)
    for reason in known.reasons:
        if reason.silent == bool(reason.says):
            wrong = "explains no cause" if reason.silent else "needs a line: says CAUSE"
            raise ValueError(f"{path}: [{reason.text}] {wrong}")
    return known


def matches(pattern: str, test: str) -> bool:
    """Returns whether ``pattern``, whose ``*`` is any text, is ``test``."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), test, re.DOTALL) is not None


def once(lines: Iterable[Ran]) -> list[Ran]:
    """One entry for each test, its worst: a test may pass and its end fail."""
    order = ("passed", "skipped", "failed")
    found = dict[str, Ran]()
    for ran in lines:
        before = found.get(ran.test)
        if before is None or order.index(ran.outcome) > order.index(before.outcome):
            found[ran.test] = ran
    return list(found.values())


def judge(known: Known, ran: Iterable[Ran], *, whole: bool = True) -> Verdict:
    """``whole``: all files of the list were run, so that their passes can be counted."""
    verdict = Verdict()
    ran = once(ran)
    for one in ran:
        if one.outcome == "passed":
            verdict.passed += 1
        elif one.outcome == "skipped":
            verdict.skipped[one.cause.removeprefix("Skipped: ")] += 1
        elif reason := known.reason(one):
            verdict.differs[reason] += 1
        else:
            verdict.new.append(one)
    for pattern in known.differs:
        outcomes = {one.outcome for one in ran if matches(pattern, one.test)}
        if outcomes == {"passed"}:
            verdict.mended.append(pattern)
    verdict.missing = max(0, known.passes - verdict.passed) if whole else 0
    return verdict
