"""Penalty counts reach all replicas by and by; each counts what the driver knows, whichever replica samples."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
import torch

from lamina.ops.sampling.token_history import MAX_TOKEN_ID, TokenHistories, TokenHistory, logit_changes_of
from lamina.protocol.control import LogitsUpdate, Penalties, SamplingRequest
from lamina.protocol.step_plan import Free, New
from lamina.request import CompletionOutput, SamplingParams
from lamina.scheduler.sampling_requests import sampling_request_of
from lamina.scheduler.sequence import Sequence


def sequence(prompt: list[int], **options: float) -> Sequence:
    params = SamplingParams(**{"presence_penalty": 0.5, "repetition_penalty": 1.2, **options})  # type: ignore[arg-type]
    made = Sequence(0, params, 1, prompt, CompletionOutput(0), 99_999, frozenset())
    made.id = 4
    return made


def next_draw(of: Sequence, *, apart: bool = False) -> SamplingRequest:
    of.num_output_placeholders += 1
    return sampling_request_of(of, 0, by_prefill_worker=apart)


def test_replicas_that_draw_in_turn_count_what_the_driver_knows() -> None:
    """Sampling is one step ahead: each draw is announced before the token of the step before is known."""
    made, replicas = sequence([7, 8, 7]), [TokenHistories(), TokenHistories()]
    ahead = []
    for step in range(12):
        draw = next_draw(made)
        known = list(made.tokens[3:])
        due = [replica.note([New(4)] if step == 0 else [], [draw]) for replica in replicas]
        ahead.append((due[step % 2], draw.has_pending_token, known))
        if len(ahead) == 2:  # the older step samples only now, when the next one has been announced
            mine, pending, counted = ahead.pop(0)
            token = 7 if step % 3 else 20 + step
            seen = logit_changes_of(mine, {4: token} if pending else {})[4]
            wanted = Counter(counted) + Counter([token] if pending else [])
            assert seen.counts == wanted
            assert sorted(seen.tokens.tolist()) == sorted({7, 8, *wanted})
            made.append(token)
    assert len(made.tokens) == 14


def test_a_draw_of_a_long_sequence_is_short() -> None:
    made = sequence(list(range(8000)))
    first = msgspec.msgpack.encode(next_draw(made))
    made.append(3)
    second = msgspec.msgpack.encode(next_draw(made))
    assert len(first) > 8000
    assert len(second) < 120


def test_a_restarted_sequence_tells_all_again() -> None:
    made = sequence([7, 8])
    for token in (1, 2, 3):
        next_draw(made)
        made.append(token)
    made.reset_computed()
    made.id = 9
    draw = next_draw(made)
    assert draw.logits_update is not None
    assert (draw.logits_update.num_known_tokens, draw.logits_update.tokens) == (0, [1, 2, 3])
    assert logit_changes_of(TokenHistories().note([], [draw]), {})[9].counts == {1: 1, 2: 1, 3: 1}


def test_a_prefill_worker_is_told_all_and_the_others_later() -> None:
    made, prefill, decode = sequence([7, 8]), TokenHistories(), TokenHistories()
    logit_changes_of(prefill.note([], [next_draw(made, apart=True)]), {})
    made.append(5)
    draw = next_draw(made)
    assert logit_changes_of(decode.note([], [draw]), {})[4].counts == {5: 1}
    assert draw.logits_update is not None
    assert draw.logits_update.penalties is not None


def adjusted(since: int, tokens: list[int], start: Penalties | None = None) -> SamplingRequest:
    fields = {"row": 0, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0, "output_index": 0, "logprobs": -1}
    return SamplingRequest(
        sequence=4, logits_update=LogitsUpdate(num_known_tokens=since, tokens=tokens, penalties=start), **fields
    )  # type: ignore[arg-type]


START = Penalties(presence=1.0, frequency=0.0, repetition=1.0, logit_bias={}, prompt_token_ids=[])


def test_what_was_not_told_is_named() -> None:
    histories = TokenHistories()
    with pytest.raises(
        ValueError, match="^penalties of sequence 4: a draw builds on 2 counted tokens, .* has nothing$"
    ):
        histories.note([], [adjusted(2, [5])])
    histories.note([], [adjusted(0, [5], START)])
    for since in (0, 2):
        with pytest.raises(ValueError, match=f"builds on {since} counted tokens, this worker has 1 tokens"):
            histories.note([], [adjusted(since, [5])])


@pytest.mark.parametrize("token", [-1, 1 << 31])
def test_tokens_that_are_none_are_refused(token: int) -> None:
    histories = TokenHistories()
    for bad in (adjusted(0, [token], START), adjusted(0, [], msgspec.structs.replace(START, logit_bias={token: 1.0}))):
        with pytest.raises(ValueError, match=f"the token {token}, which is not valid"):
            histories.note([], [bad])


def test_a_freed_sequence_is_forgotten_though_a_draw_is_still_due() -> None:
    histories = TokenHistories()
    due = histories.note([], [adjusted(0, [5, 5], START)])
    histories.note([Free(4)], [])
    assert len(histories) == 0
    assert logit_changes_of(due, {})[4].counts == {5: 2}


def plain(*prompt: int) -> TokenHistory:
    return TokenHistory(
        Penalties(presence=1.0, frequency=0.0, repetition=1.0, logit_bias={}, prompt_token_ids=list(prompt))
    )


def test_the_largest_id_and_the_one_that_is_none() -> None:
    assert plain(0, MAX_TOKEN_ID).logit_changes(0, None).max_token_id == MAX_TOKEN_ID
    for ids, named in (
        ([0, MAX_TOKEN_ID + 1], MAX_TOKEN_ID + 1),
        ([5, MAX_TOKEN_ID + 1], MAX_TOKEN_ID + 1),
        ([-1, 5], -1),
    ):
        with pytest.raises(ValueError) as refused:
            plain(*ids)
        assert str(refused.value) == f"penalties name the token {named}, which is not valid"


def test_nothing_counted_is_no_token_of_whole_numbers() -> None:
    seen = plain().logit_changes(0, None)
    assert (seen.max_token_id, seen.counts, seen.tokens.tolist(), seen.tokens.dtype) == (-1, {}, [], torch.int64)
    assert plain(3).logit_changes(0, None).tokens.dtype == torch.int64
    assert plain().logit_changes(0, 0).max_token_id == 0


def test_a_draw_that_is_made_again_counts_what_there_was() -> None:
    history = plain()
    history.append([1, 2, 2])
    for count, counts in ((3, {1: 1, 2: 2}), (1, {1: 1}), (2, {1: 1, 2: 1}), (0, {}), (3, {1: 1, 2: 2})):
        assert history.logit_changes(count, None).counts == counts


def test_a_sequence_without_penalties_is_freed_too() -> None:
    histories = TokenHistories()
    assert histories.note([Free(9)], []) == {}
