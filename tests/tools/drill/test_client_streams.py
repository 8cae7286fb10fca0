"""A stream that parts from the undisturbed one is at an edge where rounding decides, and wrong everywhere else.

Covers: lamina/tools/drill/stream_verdicts.py.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch

from lamina.ops.sampling.sampler import Sampler
from lamina.ops.sampling.token_history import TokenHistory
from lamina.protocol.control import LogitsUpdate, Penalties, SamplingRequest
from lamina.tools.check.agreement import ERROR_ALLOWED, MARGIN_FACTOR
from lamina.tools.drill.client_streams import StreamRecord
from lamina.tools.drill.stream_verdicts import (
    CLOSE_LOGPROB,
    MOST,
    Divergence,
    difference_text,
    error_of,
    first_divergence,
    is_numeric_tie,
    only_choice,
    verdict,
    with_logit_bias,
)

VOCABULARY, TOKENS = 24, 16
NOISE = 1e-3  # of logits, where KV was built again
SAMPLER = Sampler(1)
# By index and the token before.
LOGITS = torch.randn(TOKENS, VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))
DRAWN: dict[str, Any] = {"temperature": 0.8}
BEST: dict[str, Any] = {"temperature": 0.0}
SHARE: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9}
TOLD = StreamRecord(
    {0: "abc", 1: "de"},
    {0: [1, 2], 1: [3, 4, 5]},
    {0: [("a", -0.5), ("bc", -1.0)]},
    {0: "length", 1: "stop"},
    5,
    "",
)


@pytest.mark.parametrize(
    ("told", "word"),
    [
        (TOLD, "right"),
        (replace(TOLD, scores={0: [("a", -0.501), ("bc", -1.0)]}), "right"),
        (replace(TOLD, scores={0: [("a", -0.6), ("bc", -1.0)]}), "wrong"),
        (replace(TOLD, scores={0: [("a", -0.5), ("b", -1.0)]}), "wrong"),
        (replace(TOLD, scores={}), "wrong"),
        (replace(TOLD, texts={0: "abd", 1: "de"}), "wrong"),
        (replace(TOLD, ids={0: [1, 2], 1: [3, 4, 6]}), "wrong"),
        (replace(TOLD, ids={0: [1, 2], 1: [9]}, tokens=3), "wrong"),  # what parts may end elsewhere
        (replace(TOLD, reasons={0: "length", 1: "length"}), "wrong"),
        (replace(TOLD, ids={0: [1, 2], 1: [3, 4]}, tokens=4), "lost"),
        (replace(TOLD, ids={0: [1, 2], 1: [3, 4]}), "lost"),
        (replace(TOLD, ids={0: [1, 2, 2], 1: [3, 4, 5]}, tokens=6), "twice"),
        (replace(TOLD, ids={0: [1, 2, 2], 1: [3, 4, 5]}), "twice"),
        (replace(TOLD, error="status 503"), "lost"),
        (StreamRecord(), "lost"),
    ],
)
def test_what_a_stream_was_told_is_judged(told: StreamRecord, word: str) -> None:
    assert verdict(told, TOLD) == word


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (replace(TOLD, error="status 503"), "status 503"),
        (replace(TOLD, ids={0: [1, 2], 1: [3, 9, 5]}), "token 1 of choice 1 is 9 in place of 4"),
        (replace(TOLD, ids={0: [1, 2], 1: [3, 4]}, tokens=4), "4 tokens, ended by .* in place of 5"),
    ],
)
def test_how_a_stream_differs_is_said(told: StreamRecord, words: str) -> None:
    assert re.match(words, difference_text(told, TOLD))


def test_of_a_stream_without_a_seed_the_length_is_judged() -> None:
    other = replace(TOLD, texts={0: "xyz", 1: "uv"}, ids={0: [7, 8], 1: [9, 9, 9]}, scores={0: [("x", 0.1), ("y", 3)]})
    assert verdict(other, TOLD) == "wrong"
    assert verdict(other, TOLD, exactly=False) == "right"
    assert verdict(replace(other, scores={0: [("x", -0.1)]}), TOLD, exactly=False) == "wrong"
    assert verdict(replace(other, ids={0: [7], 1: [9, 9, 9]}, tokens=4), TOLD, exactly=False) == "lost"
    assert verdict(replace(other, ids={0: [7] * 3, 1: [9] * 3}, tokens=6), TOLD, exactly=False) == "twice"
    assert verdict(replace(other, error="gone"), TOLD, exactly=False) == "lost"


def test_errors_are_of_the_tokens_that_are_the_same() -> None:
    other = replace(TOLD, ids={0: [1, 7], 1: [3, 4, 5]}, scores={0: [("a", -0.5001), ("x", -9.0)]})
    assert error_of(other, TOLD) == pytest.approx(0.0001)
    assert first_divergence(other, TOLD) == Divergence(0, 1, 2, 7)
    assert first_divergence(replace(TOLD, ids={0: [1, 2], 1: [3]}), TOLD) is None


def test_no_more_is_a_tie_than_check_allows() -> None:
    assert (MOST, CLOSE_LOGPROB) == (MARGIN_FACTOR, ERROR_ALLOWED)


def tell(body: dict[str, Any], noisy: int = 0, first: int | None = None) -> StreamRecord:
    """A text of which each token depends on the one before it, drawn as Lamina draws. ``noisy``: so many of the first
    tokens have NOISE in their logits. ``first``: that token to begin with, whatever was drawn.
    """
    bias = {int(token): by for token, by in body.get("logit_bias", {}).items()}
    penalties = Penalties(presence=0.0, frequency=0.0, repetition=1.0, logit_bias=bias, prompt_token_ids=[])
    seen, random = TokenHistory(penalties).logit_changes(0, None), torch.Generator().manual_seed(body["seed"])
    ids, scores, last = list[int](), list[tuple[str, float]](), body["seed"] % VOCABULARY
    for index in range(TOKENS):
        logits = LOGITS[index, last] + NOISE * (index < noisy) * (2.0 * torch.rand(VOCABULARY, generator=random) - 1.0)
        draw = SamplingRequest(
            row=0,
            sequence=0,
            temperature=body["temperature"],
            top_k=0,
            top_p=body.get("top_p", 1.0),
            seed=body["seed"],
            output_index=index,
            logprobs=0,
            logits_update=LogitsUpdate(num_known_tokens=0, tokens=[], penalties=penalties),
        )
        (drawn,) = SAMPLER.sample(logits[None], [draw], {0: seen})
        last = first if first is not None and not index else drawn.token_id
        ids.append(last)
        scores.append((str(last), drawn.logprobs[0][1]))
    return StreamRecord({0: " ".join(map(str, ids))}, {0: ids}, {0: scores}, {0: "length"}, TOKENS, "")


@pytest.mark.long(but=["best"])
@pytest.mark.parametrize("kind", [DRAWN, BEST, SHARE], ids=["drawn", "best", "share"])
def test_where_rounding_decides_it_is_an_edge(kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if not kind["temperature"]:  # the two best are nearly as good
        ties = LOGITS.clone()
        ties[0, :, 5] = ties[0].amax(-1) + NOISE * torch.linspace(-1.0, 1.0, VOCABULARY)
        monkeypatch.setitem(globals(), "LOGITS", ties)
    parted = 0
    for seed in range(250 if kind["temperature"] else 20):
        body = {**kind, "seed": seed}
        wanted, told = tell(body), tell(body, TOKENS if kind["temperature"] else 1)
        if (fork := first_divergence(told, wanted)) is None:
            continue
        parted += 1
        error = NOISE
        assert verdict(told, wanted) == "wrong"
        assert is_numeric_tie(told, wanted, body, error, tell), seed
        assert not is_numeric_tie(told, wanted, body, 1e-9, tell), "that is no error of rounding"
        assert not is_numeric_tie(told, wanted, body, 2.0 * CLOSE_LOGPROB, tell), "that error is none of rounding"
        # From the other token on the text must be the one that follows that.
        late = replace(told, ids={0: [*told.ids[0][:-1], (told.ids[0][-1] + 1) % VOCABULARY]})
        assert first_divergence(late, wanted) == fork
        assert not is_numeric_tie(late, wanted, body, error, tell)
    assert parted > 3


@pytest.mark.parametrize("other", [6, 4])
def test_the_other_token_may_have_a_far_smaller_share_than_pushes_move(other: int) -> None:
    """So that pushes of fixed sizes pass it by: it is looked for between too little and too much."""
    begins, share = 4.37 * NOISE, 1e-3 * NOISE

    def read(body: dict[str, Any]) -> StreamRecord:
        by = max(map(abs, body.get("logit_bias", {"0": 0.0}).values()))
        token = 5 if by < begins else other if by < begins + share else 2 * other - 5
        return StreamRecord({0: ""}, {0: [1, token, 3]}, {}, {0: "length"}, 3, "")

    wanted, told = read(DRAWN), read({"logit_bias": {"0": begins}})
    assert (wanted.ids, told.ids) == ({0: [1, 5, 3]}, {0: [1, other, 3]})
    assert is_numeric_tie(told, wanted, DRAWN, NOISE, read)
    assert not is_numeric_tie(told, wanted, DRAWN, NOISE / 3, read), "so much is none of rounding"
    assert not is_numeric_tie(replace(told, ids={0: [1, other, 4]}), wanted, DRAWN, NOISE, read)


@pytest.mark.parametrize("other", [6, 4])
def test_the_least_push_of_all_may_be_too_much(other: int) -> None:
    """Logits in float32 have no place between two pushes: fewer tokens are pushed then."""

    def read(body: dict[str, Any]) -> StreamRecord:
        moved = sum(abs(by) > NOISE / 100 for by in body.get("logit_bias", {}).values())
        token = 5 if moved < 3 else other if moved == 3 else 2 * other - 5
        return StreamRecord({0: ""}, {0: [1, token, 3]}, {}, {0: "length"}, 3, "")

    wanted, told = read(DRAWN), read({"logit_bias": dict.fromkeys("012", NOISE)})
    assert (wanted.ids, told.ids) == ({0: [1, 5, 3]}, {0: [1, other, 3]})
    assert is_numeric_tie(told, wanted, DRAWN, NOISE, read)
    assert not is_numeric_tie(replace(told, ids={0: [1, other, 4]}), wanted, DRAWN, NOISE, read)


@pytest.mark.parametrize("other", [7, 4])
@pytest.mark.parametrize(("each", "begins"), [(4.0, 8.5), (0.1, 9.0)], ids=["others go on", "others go back"])
def test_one_tokens_share_may_move_farther_than_the_other_token_is(other: int, each: float, begins: float) -> None:
    """Its logit has a last place, too: the others make up for it."""

    def read(body: dict[str, Any]) -> StreamRecord:
        by = {int(t): (x if other < 5 else -x) / NOISE for t, x in body.get("logit_bias", {}).items()}
        place = 10.0 * (by.get(1, 0.0) > 0.5) + sum(each * by.get(t, 0.0) for t in (0, 2, 3))
        token = 5 if place < begins else other if place < begins + 1e-2 else 2 * other - 5
        return StreamRecord({0: ""}, {0: [1, token, 3]}, {}, {0: "length"}, 3, "")

    wanted = read(DRAWN)
    told = replace(wanted, ids={0: [1, other, 3]})
    assert is_numeric_tie(told, wanted, DRAWN, NOISE, read)
    assert not is_numeric_tie(replace(told, ids={0: [1, other, 4]}), wanted, DRAWN, NOISE, read)
    assert not is_numeric_tie(told, wanted, DRAWN, NOISE / 100, read), "so much is none of rounding"


def test_a_push_that_parts_the_streams_earlier_is_too_much() -> None:
    """The token that it samples at the fork is of another text, and may fall on either side."""

    def read(body: dict[str, Any]) -> StreamRecord:
        by = max(map(abs, body.get("logit_bias", {"0": 0.0}).values()))
        ids = [1, 5, 3] if by < NOISE else [1, 6, 3] if by < 2 * NOISE else [2, 0, 0]
        return StreamRecord({0: ""}, {0: ids}, {}, {0: "length"}, 3, "")

    assert is_numeric_tie(read({"logit_bias": {"0": NOISE}}), read(DRAWN), DRAWN, NOISE, read)


def test_choices_part_each_for_itself() -> None:
    each = ((b, tell(b, TOKENS), tell(b)) for b in ({**DRAWN, "seed": seed} for seed in range(250)))
    (first, *one), (second, *other) = islice((x for x in each if first_divergence(*x[1:])), 2)

    def both(each: list[StreamRecord]) -> StreamRecord:
        parts = [[getattr(x, name)[0] for x in each] for name in ("texts", "ids", "scores", "reasons")]
        return StreamRecord(*(dict(enumerate(part)) for part in parts), 2 * TOKENS, "")  # type: ignore[arg-type]

    def read(body: dict[str, Any]) -> StreamRecord:
        return both([tell({**body, "seed": of["seed"]}) for of in (first, second)])

    told, wanted = both([one[0], other[0]]), both([one[1], other[1]])
    assert only_choice(told, 1).ids == {1: other[0].ids[0]}
    assert is_numeric_tie(told, wanted, DRAWN, NOISE, read)
    assert not is_numeric_tie(both([one[0], replace(other[0], texts={0: ""})]), wanted, DRAWN, NOISE, read)
    assert not is_numeric_tie(both([replace(one[1], texts={0: ""}), other[0]]), wanted, DRAWN, NOISE, read)


@pytest.mark.long(but=["drawn", "best", "share"])
@pytest.mark.parametrize("kind", [DRAWN, BEST, SHARE], ids=["drawn", "best", "share"])
def test_where_it_does_not_it_is_wrong(kind: dict[str, Any]) -> None:
    edges = 0
    for seed in range(40):
        body = {**kind, "seed": seed}
        wanted = tell(body)
        first = (wanted.ids[0][0] + 1 + seed % (VOCABULARY - 1)) % VOCABULARY
        told = partial(tell, first=first)(body)
        assert verdict(told, wanted) == "wrong"
        edges += is_numeric_tie(told, wanted, body, 1e-6, tell)
    assert not edges


def test_the_other_token_is_pushed_alone_where_the_best_is_taken() -> None:
    assert with_logit_bias(BEST, Divergence(0, 0, 7, 2), 0.5)["logit_bias"] == {"2": 0.5}
    assert with_logit_bias(DRAWN, Divergence(0, 0, 1, 3), 0.5)["logit_bias"] == {"0": -0.5, "1": -0.5, "2": -0.5}
    assert with_logit_bias(DRAWN, Divergence(0, 0, 3, 1), 0.5)["logit_bias"] == {"0": 0.5, "1": 0.5}
