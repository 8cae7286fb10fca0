"""Decides whether a stream has the tokens of an undisturbed run and, if not, whether the difference is an edge.

A token is drawn where a random number falls among the probabilities of all tokens, or is the best of all. Rebuilt KV is
computed in other shapes, so that log-probabilities move by some millionths. A number that falls so near to the edge of
a token's share then selects its neighbour, and all later tokens differ. To test that, the logits of an undisturbed run
are pushed towards the other token, by no more than check allows for a tie. That run must give exactly the same tokens,
to the last one. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .client_streams import StreamRecord

CLOSE_LOGPROB = 0.01  # of log-probabilities: a larger error does not come from rounding
# The most that logits are pushed, in multiples of the largest error of a log-probability: lamina.tools.check.agreement
# allows the same between two that are a tie.
MOST = 10.0
ROUNDS = 8  # each leaves one more token, whose share is too large, without a push
LOOKS = 12  # searches for a push between too much and too little: by then the last place of a logit is reached
Undisturbed = Callable[[dict[str, Any]], StreamRecord]  # returns the stream of a request in an undisturbed run


class Divergence(NamedTuple):
    """The place where two streams diverge: choice, number of the token, and the tokens there."""

    choice: int
    place: int
    token: int
    other: int


def verdict(record: StreamRecord, wanted: StreamRecord, *, exactly: bool = True) -> str:
    """Return right, wrong, lost or twice. Not ``exactly``: its tokens differ each time. Then only their number, the
    presence of each one's log-probability, and the reason of the end are checked.
    """
    if record.error:
        return "lost"
    count = sum(map(len, record.ids.values()))
    if record.tokens != count:
        return "lost" if count < record.tokens else "twice"
    if exactly and first_divergence(record, wanted) is not None:
        return "wrong"
    if record.tokens != wanted.tokens:
        return "lost" if record.tokens < wanted.tokens else "twice"
    if not exactly:
        counts = [{i: len(x) for i, x in one.scores.items()} for one in (record, wanted)]
        return "right" if record.reasons == wanted.reasons and counts[0] == counts[1] else "wrong"
    same = (record.texts, record.ids, record.reasons) == (wanted.texts, wanted.ids, wanted.reasons)
    return "right" if same and _near(record.scores, wanted.scores) else "wrong"


def _near(scores: Mapping[int, Sequence[tuple[str, float]]], wanted: Mapping[int, Sequence[tuple[str, float]]]) -> bool:
    if {i: [t for t, _ in x] for i, x in scores.items()} != {i: [t for t, _ in x] for i, x in wanted.items()}:
        return False
    pairs = ((a, b) for i in scores for (_, a), (_, b) in zip(scores[i], wanted[i], strict=True))
    return all(abs(a - b) <= CLOSE_LOGPROB for a, b in pairs)


def first_divergence(record: StreamRecord, wanted: StreamRecord) -> Divergence | None:
    """Return the first choice in which they diverge; None if each is at most longer."""
    for choice in sorted(wanted.ids):
        for place, (token, other) in enumerate(zip(wanted.ids[choice], record.ids.get(choice, []), strict=False)):
            if token != other:
                return Divergence(choice, place, token, other)
    return None


def difference_text(record: StreamRecord, wanted: StreamRecord) -> str:
    """Return the difference in words."""
    if record.error:
        return record.error
    fork = first_divergence(record, wanted)
    if fork is None:
        return f"{record.tokens} tokens, ended by {record.reasons}, in place of {wanted.tokens}, by {wanted.reasons}"
    return f"token {fork.place} of choice {fork.choice} is {fork.other} in place of {fork.token}"


def error_of(record: StreamRecord, wanted: StreamRecord) -> float:
    """Return the largest difference of a log-probability, as far as the tokens are the same."""
    worst = 0.0
    for choice, scores in record.scores.items():
        for (_, a), (_, b), token, other in zip(
            scores, wanted.scores.get(choice, []), record.ids[choice], wanted.ids.get(choice, []), strict=False
        ):
            if token != other:
                break
            worst = max(worst, abs(a - b))
    return worst


def with_logit_bias(body: Mapping[str, Any], fork: Divergence, by: float) -> dict[str, Any]:
    """Return the request of a stream, with logits pushed by ``by`` towards the other token. In greedy decoding only
    that token is pushed. Otherwise all tokens on its side of the drawn number are, as tokens have their shares in the
    order of their ids.
    """
    return _pushed_each(body, fork, dict.fromkeys(_movers(body, fork), by))


def _pushed_each(body: Mapping[str, Any], fork: Divergence, pushes: Mapping[int, float]) -> dict[str, Any]:
    sign = -1.0 if body["temperature"] and fork.other > fork.token else 1.0
    return {**body, "logit_bias": {str(token): sign * by for token, by in pushes.items()}}


def _movers(body: Mapping[str, Any], fork: Divergence) -> range:
    """Return the tokens that are pushed."""
    first, last = (0, fork.other + (fork.other < fork.token)) if body["temperature"] else (fork.other, fork.other + 1)
    return range(first, last)


def only_choice(record: StreamRecord, choice: int) -> StreamRecord:
    parts: list[dict[int, Any]] = [record.texts, record.ids, record.scores, record.reasons]
    texts, ids, scores, reasons = ({k: v for k, v in part.items() if k == choice} for part in parts)
    return StreamRecord(texts, ids, scores, reasons, sum(map(len, ids.values())), record.error, record.times, record.id)


def is_numeric_tie(
    record: StreamRecord, wanted: StreamRecord, body: Mapping[str, Any], error: float, read: Undisturbed
) -> bool:
    """Return True if the streams diverge at edges only, each choice for itself. ``error``: of log-probabilities."""
    choices = [(only_choice(record, i), only_choice(wanted, i)) for i in sorted(wanted.ids)]
    parted = [(one, first_divergence(one, same)) for one, same in choices if verdict(one, same) != "right"]
    if not parted or error > CLOSE_LOGPROB:
        return False
    return all(
        fork is not None and _some_push_tells(one, only_choice(wanted, fork.choice), fork, body, MOST * error, read)
        for one, fork in parted
    )


def _some_push_tells(
    one: StreamRecord, wanted: StreamRecord, fork: Divergence, body: Mapping[str, Any], most: float, read: Undisturbed
) -> bool:
    """Return True if some push of at most ``most`` makes an undisturbed run give the same tokens.

    The share of the other token may be far smaller than a push moves the shares before it. So the search is between
    pushes that are too much and too little. If these are as near as two logits can be, it tries pushes of fewer tokens.
    If then one token with a large share makes all the difference, it tries pushes of all other tokens.
    """

    def is_too_little(pushes: Mapping[int, float]) -> bool | None:
        """Return None if the run gives the same tokens."""
        trial = only_choice(read(_pushed_each(body, fork, pushes)), fork.choice)
        if verdict(one, trial) == "right":
            return None
        before, ids = (each.ids.get(fork.choice, []) for each in (wanted, trial))
        return ids[: fork.place] == before[: fork.place] and _falls_short(fork, ids, bool(body["temperature"]))

    return _is_between(list(_movers(body, fork)), most, is_too_little)


def _is_between(tokens: list[int], most: float, is_too_little: Callable[[Mapping[int, float]], bool | None]) -> bool:
    """Return True if there are pushes for which ``is_too_little`` is None, of no token by more than ``most``."""
    low, high = dict.fromkeys(tokens, 0.0), dict.fromkeys(tokens, most)  # too little, and too much
    if (short := is_too_little(high)) is not False:
        return short is None
    for _ in range(ROUNDS):
        for _ in range(LOOKS):
            half = {token: (low[token] + high[token]) / 2 for token in low}
            if (short := is_too_little(half)) is None:
                return True
            low, high = (half, high) if short else (low, half)
        few, many = 0, len(tokens)
        while many - few > 1:
            count = (few + many) // 2
            if (short := is_too_little(low | {token: high[token] for token in tokens[:count]})) is None:
                return True
            few, many = (count, many) if short else (few, count)
        last = tokens.pop(few)  # it makes the difference
        low |= {token: high[token] for token in tokens[:few]}
        high = low | {last: high[last]}
        more, less = low | dict.fromkeys(tokens, most), high | dict.fromkeys(tokens, -most)
        if (short := is_too_little(more)) is False:
            high = more
        elif short is not None and (short := is_too_little(less)) is True:
            low = less
        else:
            return short is None
    return False


def _falls_short(fork: Divergence, ids: Sequence[int], drawn: bool) -> bool:
    """Return True if the token at the fork is still short of the other one. If it equals that one, later tokens have
    moved.
    """
    if len(ids) <= fork.place:
        return False
    there, token, other = ids[fork.place], fork.token, fork.other
    if not drawn:
        return there == token
    return there < other if other > token else there > other
