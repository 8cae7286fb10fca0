"""One completion on its way: when it ends, which rows it wants, what a preemption takes from it."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.request import CompletionOutput, SamplingParams
from lamina.scheduler.sequence import KvTransfer, Sequence

STOP, OTHER = 7, 8


def sequence(**changes: Any) -> Sequence:
    params = SamplingParams(max_tokens=9, min_tokens=changes.pop("min_tokens", 0))
    made = Sequence(1, params, 0, [1, 2, 3], CompletionOutput(0), changes.pop("max_len", 6), frozenset([STOP]))
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_it_begins_with_a_copy_of_its_prompt() -> None:
    prompt = [1, 2]
    one = Sequence(1, SamplingParams(), 0, prompt, CompletionOutput(0), 9, frozenset())
    one.append(5)
    assert (prompt, one.tokens, one.num_output_tokens) == ([1, 2], [1, 2, 5], 1)


@pytest.mark.parametrize(("min_tokens", "ends_at"), [(0, 1), (1, 2), (2, 3)])
def test_a_stop_token_counts_once_there_are_enough(min_tokens: int, ends_at: int) -> None:
    one = sequence(min_tokens=min_tokens, max_len=100)
    while not one.finished:
        one.append(STOP)
    assert (one.num_output_tokens, one.output.finish_reason, one.output.stop_reason) == (ends_at, "stop", None)


def test_its_length_ends_it_and_a_stop_token_at_the_end_is_a_stop() -> None:
    by_length, by_stop = sequence(), sequence()
    for one, last in ((by_length, OTHER), (by_stop, STOP)):
        for token in (OTHER, OTHER, last):
            assert not one.finished
            one.append(token)
        assert one.finished
    assert (by_length.output.finish_reason, by_length.output.stop_reason) == ("length", None)
    assert (by_stop.output.finish_reason, by_stop.output.stop_reason) == ("stop", None)


def test_a_stop_token_that_the_request_names_is_the_reason_an_end_token_is_none() -> None:
    for named, reason in (([STOP], STOP), ([OTHER], None)):
        one = sequence()
        one.params.stop_token_ids = named
        one.append(STOP)
        assert (one.output.finish_reason, one.output.stop_reason) == ("stop", reason)


def test_the_first_reason_stays() -> None:
    one = sequence()
    one.finish("abort", "word")
    one.finish("length")
    assert (one.finished, one.output.finish_reason, one.output.stop_reason) == (True, "abort", "word")


def test_a_drawn_token_is_no_longer_being_drawn() -> None:
    one = sequence(num_output_placeholders=2)
    assert one.num_tokens_with_placeholders == 5
    one.append(OTHER)
    assert (one.num_output_placeholders, one.num_tokens_with_placeholders) == (1, 5)


@pytest.mark.parametrize(
    ("state", "wants"),
    [
        ({}, True),
        ({"num_computed_tokens": 2}, True),
        ({"num_computed_tokens": 3}, False),
        ({"num_computed_tokens": 3, "num_output_placeholders": 1}, True),
        ({"num_computed_tokens": 3, "num_output_placeholders": 2}, True),
        ({"num_computed_tokens": 4, "num_output_placeholders": 3}, False),
        # the last token that it may have is being drawn
        ({"finished": True}, False),
        ({"transfer": KvTransfer(on_side_worker=True)}, False),
    ],
)
def test_which_rows_it_wants(state: dict[str, Any], wants: bool) -> None:
    assert sequence(**state).is_schedulable == wants


def test_a_row_has_its_token_or_none_yet() -> None:
    one = sequence(num_output_placeholders=1)
    assert one.tokens_at(0, 4) == [1, 2, 3, -1]


def test_a_restart_keeps_what_is_known_and_forgets_what_was_scheduled() -> None:
    one = sequence(id=4, num_computed_tokens=3, num_tokens_in_penalties=2, num_scored_prompt_tokens=1)
    one.append(OTHER)
    one.reset_computed()
    assert (one.id, one.num_computed_tokens, one.num_tokens_in_penalties) == (-1, 0, -1)
    assert (one.tokens, one.num_scored_prompt_tokens) == ([1, 2, 3, OTHER], 1)


@pytest.mark.parametrize("drawn", [1, 2])
def test_what_was_drawn_while_it_was_loaded_is_drawn_again(drawn: int) -> None:
    """The rows are done, and the report of the load's end is lost: memory workers have KV of all rows, also of tokens
    that were never reported.
    """
    one = sequence(
        transfer=KvTransfer(loading_tokens=2),
        num_cached_tokens=2,
        num_computed_tokens=2 + drawn,
        num_output_placeholders=drawn,
    )
    one.roll_back(2 + drawn)
    assert (one.num_computed_tokens, one.num_output_placeholders, one.is_schedulable) == (2, 0, True)


def test_logits_that_come_behind_a_choice_are_of_the_token_before() -> None:
    """A choice may arrive for a held sequence that is computed again, while its row is in flight: no client may see
    these logits.
    """
    one = sequence(external_sampling=True, max_len=100)
    one.num_computed_tokens, one.num_output_placeholders = 3, 1
    one.on_logits_ready()
    assert one.awaits_external_token
    one.roll_back(3)
    assert (one.awaits_external_token, one.num_computed_tokens) == (False, 2)
    one.num_computed_tokens, one.num_output_placeholders = 3, 1
    one.set_external_token(OTHER)
    one.on_logits_ready()
    assert not one.awaits_external_token, "behind the prompt, where the token behind it is chosen"
    one.num_computed_tokens, one.num_output_placeholders = 4, 1
    one.on_logits_ready()
    assert one.awaits_external_token


@pytest.mark.parametrize(
    ("transfer", "awaits_report", "writes_blocks", "lacks_kv"),
    [
        (KvTransfer(), False, False, False),
        (KvTransfer(loading_tokens=3), True, True, True),
        (KvTransfer(on_side_worker=True), False, False, True),
        (KvTransfer(on_side_worker=True, unstored_chunks=1), False, True, True),
        (KvTransfer(is_scored=True), True, False, False),
        (KvTransfer(is_migrating=True), True, False, False),
    ],
)
def test_what_is_awaited_decides_whether_blocks_can_be_freed_and_kv_is_whole(
    transfer: KvTransfer, awaits_report: bool, writes_blocks: bool, lacks_kv: bool
) -> None:
    assert (transfer.awaits_report, transfer.writes_blocks, transfer.lacks_kv) == (
        awaits_report,
        writes_blocks,
        lacks_kv,
    )


def test_a_sequence_has_rows_only_where_no_transfer_holds_them() -> None:
    one = sequence(num_computed_tokens=2)
    assert one.is_schedulable
    for part in ({"on_side_worker": True}, {"is_scored": True}, {"is_migrating": True}, {"loading_tokens": 3}):
        one.transfer = KvTransfer(**part)
        assert not one.is_schedulable, part
    one.transfer = KvTransfer(loading_tokens=2)
    assert one.is_schedulable, "its first rows, as enough is loaded"
    one.set_transfer(is_migrating=True)
    assert one.transfer == KvTransfer(loading_tokens=2, is_migrating=True)
    one.reset_computed()
    assert one.transfer == KvTransfer()
