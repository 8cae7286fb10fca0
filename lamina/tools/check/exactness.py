"""The degrees to which two runs agree."""

from __future__ import annotations

from enum import IntEnum


class Exactness(IntEnum):
    """The degree to which two runs agree, the strictest last."""

    NOTHING = 0
    BOUNDED = 1  # log-probabilities within a bound of the reference's, and no other token where it is sure
    TOKEN_EQUAL = 2  # lamina.tools.check.agreement holds
    BITWISE = 3  # the same tokens and the same log-probabilities, to the last bit

    @property
    def word(self) -> str:
        return self.name.lower().replace("_", "-")
