"""The written state machines of the executor, of the worker group, and of a change of the memory workers."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from enum import Enum
from pathlib import Path

import pytest

from lamina.executor.states import (
    EXECUTOR_TRANSITIONS,
    GROUP_TRANSITIONS,
    RESIZE_TRANSITIONS,
    ExecutorState,
    GroupState,
    ResizeState,
)
from lamina.utils.state_machine import StateMachine

ARCHITECTURE = Path(__file__).resolve().parents[2] / "ARCHITECTURE.md"


def drawn(name: str) -> dict[str, set[str]]:
    """The transitions that ARCHITECTURE.md draws below ``name``."""
    section = ARCHITECTURE.read_text().split("## States of the executor")[1].split("```")[1]
    block = re.split(rf"^{name}\n", section, flags=re.MULTILINE)[1]
    lines = re.match(r"(?:  .*\n)*", block)
    assert lines
    found = {}
    for line in lines.group().splitlines():
        state, following = line.strip().split("->")
        found[state.strip()] = set(re.split(r" {3,}", following.strip())[0].split(" | "))
    return found


@pytest.mark.parametrize(
    ("name", "states", "transitions"),
    [
        ("executor", ExecutorState, EXECUTOR_TRANSITIONS),
        ("worker group", GroupState, GROUP_TRANSITIONS),
        ("change of memory workers", ResizeState, RESIZE_TRANSITIONS),
    ],
)
def test_architecture_draws_the_transitions(
    name: str, states: type[Enum], transitions: Mapping[Enum, Collection[Enum]]
) -> None:
    assert drawn(name) == {state.value: {after.value for after in transitions[state]} for state in states}


def test_a_transition_that_is_not_in_the_table_raises() -> None:
    machine = StateMachine(ExecutorState.RUNNING, EXECUTOR_TRANSITIONS)
    with pytest.raises(RuntimeError, match="ExecutorState: resuming cannot follow running"):
        machine.enter(ExecutorState.RESUMING)
    assert machine.state is ExecutorState.RUNNING
    machine.enter(ExecutorState.QUIESCING)
    assert machine.state is ExecutorState.QUIESCING
