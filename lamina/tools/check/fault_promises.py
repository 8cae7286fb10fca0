"""The table of deaths in ``lamina-launch check``: which process dies when, and what is promised of the tokens. Pure."""

from __future__ import annotations

from typing import NamedTuple

from lamina.observe.trace import Event

from .exactness import Exactness

ENGINE = "engine"


class Death(NamedTuple):
    """One process that is killed during a run; another one replaces it."""

    axis: str
    victim: str  # the name of a worker, such as memory-0; or ENGINE
    promised: Exactness  # of prompts of whose KV it had a part, and of all if it had none
    other_prompts: Exactness  # of prompts of whose KV it had none
    event: Event | None = None  # the event of the process at which it ends; None: at a step
    times: int = 1  # how often that comes first
    # Counted from the first prompt on, else from when all that run at once have a token.
    before_prompt_end: bool = False

    @property
    def without_determinism(self) -> Death:
        """The death in a run that is not deterministic: steps that are planned again may have other sequences in the
        batch.
        """
        least = Exactness.TOKEN_EQUAL
        return self._replace(promised=min(self.promised, least), other_prompts=min(self.other_prompts, least))


# A compute worker holds no KV, and dies between the messages of a layer. A prefill worker dies within a prompt, whose K
# and V affect the log-probabilities of all later tokens. For a memory worker it matters whose KV it had; with parity
# its KV comes back. An engine takes its workers with it.
COMPUTE = Death("lost compute worker", "compute-0", Exactness.BITWISE, Exactness.BITWISE, Event.SEND_KV, 7)
RANK = Death("lost rank", "compute-1", Exactness.BITWISE, Exactness.BITWISE, Event.WAIT_O, 7)
PREFILL = Death(
    "lost prefill worker", "prefill-0", Exactness.BITWISE, Exactness.BITWISE, Event.SEND_KV, 9, before_prompt_end=True
)
MEMORY = Death("lost memory worker", "memory-0", Exactness.TOKEN_EQUAL, Exactness.BITWISE, Event.WAIT_Q, 7)
PARITY = MEMORY._replace(promised=Exactness.BITWISE)
SERVED = Death("lost engine", ENGINE, Exactness.TOKEN_EQUAL, Exactness.TOKEN_EQUAL)
