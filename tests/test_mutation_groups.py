"""The groups of `make mutation` name files and tests that are there; each argued survivor is of one, with a reason."""

from __future__ import annotations

import re
from pathlib import Path

from mutation import GROUPS, read_argued

ROOT = Path(__file__).resolve().parents[1]


def test_files_and_tests_of_every_group_are_there() -> None:
    for group in GROUPS.values():
        for name in (*group.files, *group.tests):
            path, _, test = name.partition("::")
            assert (ROOT / path).is_file(), name
            assert f"def {test}" in (ROOT / path).read_text(), name


def test_survivors_that_are_argued_for_are_of_these_files_as_they_are() -> None:
    files = {file: " ".join((ROOT / file).read_text().split()) for group in GROUPS.values() for file in group.files}
    argued = read_argued()
    assert argued
    for change, reason in argued.items():
        file, function = change.partition(": ")[0].split()
        assert all(re.search(rf"(class|def) {name}\b", files[file]) for name in function.split(".")), change
        old = change.partition(": ")[2].partition(" -> ")[0].partition(" # ")[0]
        assert old in files[file], change
        assert reason.endswith("."), change
