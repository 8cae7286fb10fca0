"""A state that changes only along a table of transitions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from typing import Generic, TypeVar

State = TypeVar("State", bound=Enum)


class StateMachine(Generic[State]):
    """``state``: the present one. ``transitions``: each state -> those that may follow it."""

    def __init__(self, start: State, transitions: Mapping[State, Collection[State]]) -> None:
        self.state, self._transitions = start, transitions

    def enter(self, state: State) -> None:
        """Change the state. Raises RuntimeError for a transition that the table lacks."""
        if state not in self._transitions[self.state]:
            raise RuntimeError(f"{type(state).__name__}: {state.value} cannot follow {self.state.value}")
        self.state = state
