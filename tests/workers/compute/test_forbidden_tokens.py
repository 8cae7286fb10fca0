"""Bad words and allowed tokens: the tokens that a worker forbids after others, and that all workers that sample do the
same.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tensor_parallel_ranks import Alike, plain

from lamina.engine.intake import check_token_ids
from lamina.engine.request import all_tokens_banned_message
from lamina.ops.sampling.sampler import Sampler
from lamina.ops.sampling.token_history import BadWords, TokenHistories, logit_changes_of
from lamina.protocol.control import ALL_TOKENS_BANNED, LogitsUpdate, Penalties, SamplingRequest
from lamina.request import CompletionOutput, SamplingParams
from lamina.scheduler.sampling_requests import sampling_request_of
from lamina.scheduler.sequence import Sequence
from lamina.workers.compute.tensor_parallel import LogitCandidates

ROW = torch.tensor([[4.0, 3.5, 3.0, 2.0, 1.0, 0.0]])


@pytest.fixture(params=["native", "plain"])
def sampler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sampler:
    if request.param == "plain":
        monkeypatch.setitem(sys.modules, "lamina.ops.sampling.native", None)
    else:
        pytest.importorskip("lamina.ops.sampling.native")
    return Sampler(1)


def told(tokens: list[int], pending: int | None = None, **options: Any) -> tuple[SamplingRequest, Any]:
    fields = {"presence": 0.0, "frequency": 0.0, "repetition": 1.0, "logit_bias": {}, "prompt_token_ids": []}
    more = {k: options.pop(k) for k in ("bad_words_token_ids", "allowed_token_ids", *fields) if k in options}
    adjust = LogitsUpdate(num_known_tokens=0, tokens=tokens, penalties=Penalties(**{**fields, **more}))
    draw = plain(logits_update=adjust, has_pending_token=pending is not None, **options)
    return draw, logit_changes_of(TokenHistories().note([], [draw]), {} if pending is None else {0: pending})


def token(sampler: Sampler, tokens: list[int], pending: int | None = None, **options: Any) -> int:
    draw, seen = told(tokens, pending, **options)
    return sampler.sample(ROW, [draw], seen)[0].token_id


def test_a_word_of_one_token_is_always_forbidden(sampler: Sampler) -> None:
    assert token(sampler, [], bad_words_token_ids=[[0]]) == 1
    assert token(sampler, [5], bad_words_token_ids=[[1], [0]]) == 2


def test_the_last_token_of_a_word_is_forbidden_behind_the_others_alone(sampler: Sampler) -> None:
    words = [[2, 3, 0], [3, 1]]
    assert token(sampler, [2, 3], bad_words_token_ids=words) == 2
    assert token(sampler, [3], bad_words_token_ids=words) == 0, "2 is missing"
    assert token(sampler, [2], bad_words_token_ids=words) == 0
    assert token(sampler, [2, 3, 5], bad_words_token_ids=words) == 0
    assert token(sampler, [], bad_words_token_ids=words) == 0


def test_the_token_that_is_being_drawn_counts(sampler: Sampler) -> None:
    words = [[2, 3, 0]]
    assert token(sampler, [2], 3, bad_words_token_ids=words) == 1
    assert token(sampler, [5, 2], 3, bad_words_token_ids=words) == 1
    assert token(sampler, [2, 3], 5, bad_words_token_ids=words) == 0, "the end has moved on"
    assert token(sampler, [2], 4, bad_words_token_ids=words) == 0


def test_no_word_is_found_where_two_histories_meet() -> None:
    """Words of a sequence are matched with the tokens of its own completion, each token after the last one."""
    histories, found = TokenHistories(), []
    start = Penalties(
        presence=0.0, frequency=0.0, repetition=1.0, logit_bias={}, prompt_token_ids=[], bad_words_token_ids=[[7, 8]]
    )
    for since, tokens, first in ((0, [], start), (0, [7], None), (1, [8, 7], None), (3, [1], None)):
        draw = plain(logits_update=LogitsUpdate(num_known_tokens=since, tokens=tokens, penalties=first))
        found.append(list(logit_changes_of(histories.note([], [draw]), {})[0].banned_token_ids))
    assert found == [[], [8], [8], []]


@pytest.mark.parametrize("ids", [[-1], [1 << 31]])
def test_a_bad_word_of_no_token_is_named(ids: list[int], sampler: Sampler) -> None:
    for options in ({"bad_words_token_ids": [[0, *ids]]}, {"allowed_token_ids": ids}):
        with pytest.raises(ValueError, match="penalties name the token"):
            told([], **options)
    with pytest.raises(ValueError, match="penalties name the token 6, there are 6"):
        token(sampler, [], allowed_token_ids=[0, 6])
    with pytest.raises(ValueError, match="a bad word without tokens"):
        BadWords([[1], []])


def test_allowed_tokens_alone_are_drawn(sampler: Sampler) -> None:
    assert token(sampler, [], allowed_token_ids=[5, 3]) == 3
    assert token(sampler, [], allowed_token_ids=[5, 3, 3], logit_bias={3: -3.0}) == 5
    assert token(sampler, [], allowed_token_ids=[5], logit_bias={0: 100.0}) == 5
    assert token(sampler, [], allowed_token_ids=[5, 3], banned_token_ids=[3]) == 5
    assert token(sampler, [], allowed_token_ids=[5, 3], bad_words_token_ids=[[3]]) == 5
    draws = [told([], allowed_token_ids=[5, 3], temperature=5.0, seed=1, output_index=i) for i in range(200)]
    assert {sampler.sample(ROW, [draw], seen)[0].token_id for draw, seen in draws} == {3, 5}


def test_log_probabilities_are_those_of_all_tokens(sampler: Sampler) -> None:
    draw, seen = told([], allowed_token_ids=[5], logprobs=2)
    (found,) = sampler.sample(ROW, [draw], seen)
    exact = torch.log_softmax(ROW[0].double(), -1)
    assert [(t, rank) for t, _, rank in found.logprobs] == [(5, 6), (0, 1), (1, 2)]
    assert [v for _, v, _ in found.logprobs] == pytest.approx([float(exact[t]) for t in (5, 0, 1)])


def test_of_equals_the_lower_token_ranks_first(sampler: Sampler) -> None:
    row = torch.tensor([[1.0, 2.0, 1.0, 1.0]])
    for known, rank in ((0, 2), (1, 1), (2, 3), (3, 4)):
        (found,) = sampler.sample(row, [plain(prompt_logprob_token=known, logprobs=1)])
        assert [(t, r) for t, _, r in found.logprobs] == [(known, rank), (1, 1)]
    (found,) = sampler.sample(row, [plain(prompt_logprob_token=3, logprobs=(1 << 31) - 1)])
    assert [(t, r) for t, _, r in found.logprobs] == [(3, 4), (1, 1), (0, 2), (2, 3), (3, 4)]


def test_nothing_is_left_of_what_is_allowed(sampler: Sampler) -> None:
    assert token(sampler, [], allowed_token_ids=[3], bad_words_token_ids=[[3]]) == ALL_TOKENS_BANNED


FULL = 64
ids = st.integers(0, FULL - 1)


@pytest.mark.no_retry
@settings(max_examples=150, deadline=None)
@given(
    words=st.lists(st.lists(ids, min_size=1, max_size=2), max_size=3),
    allowed=st.lists(ids, max_size=5, unique=True),
    tokens=st.lists(ids, max_size=3),
    logit_bias=st.dictionaries(ids, st.sampled_from([-5.0, 5.0]), max_size=2),
    temperature=st.sampled_from([0.0, 0.9]),
    top_k=st.sampled_from([0, 2]),
    logprobs=st.sampled_from([-1, 0, 3]),
    seed=st.integers(0, 1000),
)
def test_ranks_draw_what_one_worker_draws(
    seed: int, words: Any, allowed: list[int], tokens: list[int], **options: Any
) -> None:
    logits = (torch.randn(1, FULL, generator=torch.Generator().manual_seed(seed)) * 8).round() / 4
    options["logit_bias"] = {**options["logit_bias"], **dict.fromkeys(allowed[:1], 1.0)}
    draw, seen = told(tokens, bad_words_token_ids=words, allowed_token_ids=allowed, seed=seed, **options)
    few = LogitCandidates.needed_for([draw], FULL, seen)
    if few is None:
        assert not allowed
        return
    sampler = Sampler(1)
    known = Alike(list(logits.split(FULL // 2, -1))).gathered(few, [draw], seen)
    (wanted,), (found,) = (
        sampler.sample(logits, [draw], seen),
        sampler.sample(known, [draw], seen, logits.logsumexp(-1)),
    )
    assert found.token_id == wanted.token_id
    assert [(t, r) for t, _, r in found.logprobs[1:]] == [(t, r) for t, _, r in wanted.logprobs[1:]]


def sequence(**params: Any) -> Sequence:
    made = Sequence(1, SamplingParams(**params), 77, [11, 12], CompletionOutput(0), 99, frozenset([6]))
    made.id, made.num_output_placeholders = 3, 1
    return made


def test_what_is_forbidden_goes_into_the_first_draw() -> None:
    one = sequence(bad_words=["x"], bad_words_token_ids=[[5, 6], [7]], allowed_token_ids=[9, 7])
    adjust = sampling_request_of(one, 0).logits_update
    assert adjust is not None
    assert adjust.penalties == Penalties(
        presence=0.0,
        frequency=0.0,
        repetition=1.0,
        logit_bias={},
        prompt_token_ids=[],
        bad_words_token_ids=[[5, 6], [7]],
        allowed_token_ids=[9, 7],
    )
    one.tokens.append(5)
    assert sampling_request_of(one, 0).logits_update == LogitsUpdate(num_known_tokens=0, tokens=[5], penalties=None)
    assert sampling_request_of(sequence(), 0).logits_update is None
    assert sampling_request_of(sequence(bad_words_token_ids=[[5]]), 0).logits_update is not None
    assert sampling_request_of(sequence(allowed_token_ids=[5]), 0).logits_update is not None


def test_the_whole_vocabulary_is_as_many_as_there_are() -> None:
    assert sampling_request_of(sequence(logprobs=-1), 0).logprobs == (1 << 31) - 1
    assert sampling_request_of(sequence(logprobs=0), 0).logprobs == 0
    assert sampling_request_of(sequence(), 0).logprobs == -1


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"stop_token_ids": [97]}, "stop_token_ids: token id 97 is out of vocabulary: it has 97 tokens"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias: token id -1 is out of vocabulary: it has 97 tokens"),
        ({"allowed_token_ids": [0, 98]}, "allowed_token_ids: token id 98 is out of vocabulary: it has 97 tokens"),
        ({"bad_words_token_ids": [[0], [1, 97]]}, "bad_words: token id 97 is out of vocabulary: it has 97 tokens"),
        ({"bad_words": ["x"]}, "bad_words need a tokenizer: pass tokenizer=, or name their"),
    ],
)  # fmt: skip
def test_tokens_that_there_are_not_are_named(params: dict[str, Any], words: str) -> None:
    fine = SamplingParams(bad_words=["x"], bad_words_token_ids=[[96]], allowed_token_ids=[0, 96], logit_bias={0: 1.0})
    check_token_ids([0, 96], fine, 97)
    with pytest.raises(ValueError) as refused:
        check_token_ids([1], SamplingParams(**params), 97)
    assert str(refused.value).startswith(words)
    with pytest.raises(ValueError, match="the prompt: token id 97 is out of vocabulary: it has 97 tokens"):
        check_token_ids([97], fine, 97)


def test_who_forbids_all_is_told_by_which_fields() -> None:
    assert all_tokens_banned_message(SamplingParams(min_tokens=3), 2).startswith(
        "min_tokens 3 bans the stop tokens so far, and the model"
    )
    both = SamplingParams(allowed_token_ids=[1], bad_words=["x"], bad_words_token_ids=[[1]], min_tokens=3)
    assert all_tokens_banned_message(both, 2).startswith(
        "allowed_token_ids and bad_words and min_tokens forbid every token"
    )
    assert all_tokens_banned_message(both, 3) == (  # there are so many: it is not to blame
        "allowed_token_ids and bad_words forbid every token that the model gives: allow more tokens, or forbid fewer"
    )
