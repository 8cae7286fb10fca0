"""How much two runs have in common."""

from __future__ import annotations

from enum import IntEnum


class Exactness(IntEnum):
    """How much two runs have in common, the strictest last."""

    NOTHING = 0
    BOUNDED = 1  # log-probabilities within a bound of the reference's, and no token that it is sure is another
    TOKEN_EQUAL = 2  # lamina.tools.check.agreement holds
    BITWISE = 3  # the same tokens and the same log-probabilities, to the last bit

    @property
    def word(self) -> str:
        return self.name.lower().replace("_", "-")
