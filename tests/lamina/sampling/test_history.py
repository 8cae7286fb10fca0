"""Penalty counts are told to all replicas by and by; each counts what the driver knows, whoever draws."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
import torch

from lamina.engine.draws import draw_of
from lamina.engine.sequence import Sequence
from lamina.protocol.control import Adjust, Draw, Penalties
from lamina.protocol.plan import Free, New
from lamina.request import CompletionOutput, SamplingParams
from lamina.sampling.history import MOST_ID, Histories, History, seen_of


def sequence(prompt: list[int], **options: float) -> Sequence:
    params = SamplingParams(**{"presence_penalty": 0.5, "repetition_penalty": 1.2, **options})  # type: ignore[arg-type]
    made = Sequence(0, params, 1, prompt, CompletionOutput(0), 99_999, frozenset())
    made.id = 4
    return made


def next_draw(of: Sequence, *, apart: bool = False) -> Draw:
    of.num_drawing += 1
    return draw_of(of, 0, apart=apart)


def test_replicas_that_draw_in_turn_count_what_the_driver_knows() -> None:
    """One step ahead: each draw is told before the token of the step before is known."""
    made, replicas = sequence([7, 8, 7]), [Histories(), Histories()]
    ahead = []
    for step in range(12):
        draw = next_draw(made)
        known = list(made.tokens[3:])
        due = [replica.learn([New(4)] if step == 0 else [], [draw]) for replica in replicas]
        ahead.append((due[step % 2], draw.pending, known))
        if len(ahead) == 2:  # the older step draws only now, when the next one has been told
            mine, pending, counted = ahead.pop(0)
            token = 7 if step % 3 else 20 + step
            seen = seen_of(mine, {4: token} if pending else {})[4]
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
    made.restart()
    made.id = 9
    draw = next_draw(made)
    assert draw.adjust is not None
    assert (draw.adjust.since, draw.adjust.tokens) == (0, [1, 2, 3])
    assert seen_of(Histories().learn([], [draw]), {})[9].counts == {1: 1, 2: 1, 3: 1}


def test_a_prefill_worker_is_told_all_and_the_others_later() -> None:
    made, prefill, decode = sequence([7, 8]), Histories(), Histories()
    seen_of(prefill.learn([], [next_draw(made, apart=True)]), {})
    made.append(5)
    draw = next_draw(made)
    assert seen_of(decode.learn([], [draw]), {})[4].counts == {5: 1}
    assert draw.adjust is not None
    assert draw.adjust.start is not None


def adjusted(since: int, tokens: list[int], start: Penalties | None = None) -> Draw:
    fields = {"row": 0, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0, "index": 0, "logprobs": -1}
    return Draw(sequence=4, adjust=Adjust(since=since, tokens=tokens, start=start), **fields)  # type: ignore[arg-type]


START = Penalties(presence=1.0, frequency=0.0, repetition=1.0, bias={}, prompt=[])


def test_what_was_not_told_is_named() -> None:
    histories = Histories()
    with pytest.raises(
        ValueError, match="^penalties of sequence 4: a draw builds on 2 counted tokens, .* told nothing$"
    ):
        histories.learn([], [adjusted(2, [5])])
    histories.learn([], [adjusted(0, [5], START)])
    for since in (0, 2):
        with pytest.raises(ValueError, match=f"builds on {since} counted tokens, this worker was told 1 tokens"):
            histories.learn([], [adjusted(since, [5])])


@pytest.mark.parametrize("token", [-1, 1 << 31])
def test_tokens_that_are_none_are_refused(token: int) -> None:
    histories = Histories()
    for bad in (adjusted(0, [token], START), adjusted(0, [], msgspec.structs.replace(START, bias={token: 1.0}))):
        with pytest.raises(ValueError, match=f"the token {token}, which is none"):
            histories.learn([], [bad])


def test_a_freed_sequence_is_forgotten_though_a_draw_is_still_due() -> None:
    histories = Histories()
    due = histories.learn([], [adjusted(0, [5, 5], START)])
    histories.learn([Free(4)], [])
    assert len(histories) == 0
    assert seen_of(due, {})[4].counts == {5: 2}


def plain(*prompt: int) -> History:
    return History(Penalties(presence=1.0, frequency=0.0, repetition=1.0, bias={}, prompt=list(prompt)))


def test_the_largest_id_and_the_one_that_is_none() -> None:
    assert plain(0, MOST_ID).seen(0, None).most == MOST_ID
    for ids, named in (([0, MOST_ID + 1], MOST_ID + 1), ([5, MOST_ID + 1], MOST_ID + 1), ([-1, 5], -1)):
        with pytest.raises(ValueError) as refused:
            plain(*ids)
        assert str(refused.value) == f"penalties name the token {named}, which is none"


def test_nothing_counted_is_no_token_of_whole_numbers() -> None:
    seen = plain().seen(0, None)
    assert (seen.most, seen.counts, seen.tokens.tolist(), seen.tokens.dtype) == (-1, {}, [], torch.int64)
    assert plain(3).seen(0, None).tokens.dtype == torch.int64
    assert plain().seen(0, 0).most == 0


def test_a_draw_that_is_made_again_counts_what_there_was() -> None:
    history = plain()
    history.tell([1, 2, 2])
    for count, counts in ((3, {1: 1, 2: 2}), (1, {1: 1}), (2, {1: 1, 2: 1}), (0, {}), (3, {1: 1, 2: 2})):
        assert history.seen(count, None).counts == counts


def test_a_sequence_without_penalties_is_freed_too() -> None:
    histories = Histories()
    assert histories.learn([Free(9)], []) == {}
