"""Whether what a stream was told is what an undisturbed run tells; and where it is not, whether that is an edge.

A token is drawn where a random number falls among the probabilities of all, or is the best of all. KV that is built
again is computed in other shapes, so that log-probabilities move by some millionths: a number that falls so near to the
end of a token's share is that of its neighbour then, and all that follows is another text. Whether that was so is
tried: an undisturbed run, whose logits are pushed towards the other token by no more than check allows for a tie, must
tell the very same, to the last token. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .streams import StreamTold

NEAR = 0.01  # of log-probabilities: a larger error is none of rounding
# Of the largest error of a log-probability: what logits are pushed by, the least first. The last is what
# lamina.cli.check.agreement allows between two that are a tie.
PUSHES = 1.0, 3.0, 10.0


class StreamFork(NamedTuple):
    """Where two streams part: choice, and the tokens there."""

    choice: int
    token: int
    other: int


def verdict(told: StreamTold, wanted: StreamTold, *, exactly: bool = True) -> str:
    """right, wrong, lost or twice. Not ``exactly``: its tokens are others each time, and only how many they are, that
    each has been told with its log-probability, and the reason of the end are looked at.
    """
    if told.error:
        return "lost"
    count = sum(map(len, told.ids.values()))
    if told.tokens != count:
        return "lost" if count < told.tokens else "twice"
    if exactly and fork_of(told, wanted) is not None:
        return "wrong"
    if told.tokens != wanted.tokens:
        return "lost" if told.tokens < wanted.tokens else "twice"
    if not exactly:
        counts = [{i: len(x) for i, x in one.scores.items()} for one in (told, wanted)]
        return "right" if told.reasons == wanted.reasons and counts[0] == counts[1] else "wrong"
    same = (told.texts, told.ids, told.reasons) == (wanted.texts, wanted.ids, wanted.reasons)
    return "right" if same and _near(told.scores, wanted.scores) else "wrong"


def _near(scores: Mapping[int, Sequence[tuple[str, float]]], wanted: Mapping[int, Sequence[tuple[str, float]]]) -> bool:
    if {i: [t for t, _ in x] for i, x in scores.items()} != {i: [t for t, _ in x] for i, x in wanted.items()}:
        return False
    pairs = ((a, b) for i in scores for (_, a), (_, b) in zip(scores[i], wanted[i], strict=True))
    return all(abs(a - b) <= NEAR for a, b in pairs)


def fork_of(told: StreamTold, wanted: StreamTold) -> StreamFork | None:
    """The first choice in which they part; None where each is at most longer."""
    for choice in sorted(wanted.ids):
        for token, other in zip(wanted.ids[choice], told.ids.get(choice, []), strict=False):
            if token != other:
                return StreamFork(choice, token, other)
    return None


def words_of(told: StreamTold, wanted: StreamTold) -> str:
    """In what they differ, for people."""
    if told.error:
        return told.error
    fork = fork_of(told, wanted)
    if fork is None:
        return f"{told.tokens} tokens, ended by {told.reasons}, in place of {wanted.tokens}, by {wanted.reasons}"
    pairs = zip(wanted.ids[fork.choice], told.ids[fork.choice], strict=False)
    at = next(i for i, (token, other) in enumerate(pairs) if token != other)
    return f"token {at} of choice {fork.choice} is {fork.other} in place of {fork.token}"


def error_of(told: StreamTold, wanted: StreamTold) -> float:
    """The largest difference of a log-probability, as far as the tokens are the same."""
    worst = 0.0
    for choice, scores in told.scores.items():
        for (_, a), (_, b), token, other in zip(
            scores, wanted.scores.get(choice, []), told.ids[choice], wanted.ids.get(choice, []), strict=False
        ):
            if token != other:
                break
            worst = max(worst, abs(a - b))
    return worst


def pushed(body: Mapping[str, Any], fork: StreamFork, by: float) -> dict[str, Any]:
    """The request of a stream, with logits that are pushed by so much towards the other token: where the best one is
    taken that one alone; else all of its side gain, as tokens have their shares in the order of their numbers.
    """
    token, other = fork.token, fork.other
    if not body["temperature"]:
        bias = {other: by}
    elif other > token:
        bias = dict.fromkeys(range(other), -by)
    else:
        bias = dict.fromkeys(range(other + 1), by)
    return {**body, "logit_bias": {str(t): x for t, x in bias.items()}}


def is_at_edge(
    told: StreamTold,
    wanted: StreamTold,
    body: Mapping[str, Any],
    error: float,
    read: Callable[[dict[str, Any]], StreamTold],
) -> bool:
    """Whether the streams part at an edge. ``error``: of log-probabilities; ``read``: what an undisturbed run tells."""
    fork = fork_of(told, wanted)
    if fork is None or error > NEAR:
        return False
    return any(verdict(told, read(pushed(body, fork, factor * error))) == "right" for factor in PUSHES)
