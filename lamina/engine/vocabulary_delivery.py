"""Delivery of the vocabulary that grammars need: it goes with a receiver's first round that has a grammar."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lamina.protocol.control import RunStep, Vocabulary

DECODING = -1  # all compute workers, which get the same rounds


class VocabularyDelivery:
    """Attaches the vocabulary to rounds, once in each epoch for each receiver."""

    def __init__(self, make: Callable[[], Vocabulary] | None = None) -> None:
        """``make``: called with the first grammar; None: no request may have one."""
        self._make = make
        self._made: Vocabulary | None = None
        self._receivers = set[int]()

    @property
    def is_available(self) -> bool:
        """True if requests may have grammars."""
        return self._make is not None

    def begin_epoch(self) -> None:
        """Send it again to all, since some workers may be new."""
        self._receivers.clear()

    def attached(self, steps: Iterable[RunStep], receiver: int = DECODING) -> Vocabulary | None:
        """Return what goes with a round of ``steps`` to ``receiver``, the number of a prefill worker."""
        if self._make is None or receiver in self._receivers or not any(map(_has_grammar, steps)):
            return None
        self._receivers.add(receiver)
        self._made = self._made or self._make()
        return self._made


def _has_grammar(step: RunStep) -> bool:
    updates = (request.logits_update for request in step.sampling_requests)
    return any(u is not None and u.penalties is not None and u.penalties.grammar for u in updates)
