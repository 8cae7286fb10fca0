"""A step whose logits are too long for one frame of a control link comes in parts, and is one again."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
from test_worker_registry import Ended, members

from lamina import LLM, SamplingParams
from lamina.protocol import control
from lamina.protocol.control import (
    ControlLink,
    SampledToken,
    StatsRequest,
    StepDone,
    StepDoneAssembler,
    split_step_done,
)

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny_lm" / "model"


def step(*sizes: int, number: int = 3, view: int = 1) -> StepDone:
    drawn = [SampledToken(i, i, [(i, -1.0, 1)], bytes([i]) * size) for i, size in enumerate(sizes)]
    return StepDone(epoch=view, batch=2, step=number, sampled_tokens=drawn)


def test_a_step_is_parted_by_what_its_tokens_take() -> None:
    whole = step(500, 500, 900, 5000, 10)
    found = list(split_step_done(whole, 1500))
    assert [[d.token_id for d in part.sampled_tokens] for part in found] == [[0, 1], [2], [3], [4]]
    assert [part.has_more for part in found] == [True, True, True, False]
    assert {(part.epoch, part.batch, part.step) for part in found} == {(1, 2, 3)}
    parts = StepDoneAssembler()
    assert [parts.add(part) for part in found] == [None, None, None, whole]
    assert parts.add(found[-1]) == found[-1], "nothing is left of it"


def test_many_log_probabilities_are_long_too() -> None:
    drawn = [SampledToken(i, 0, [(0, -1.0, 1)] * 100) for i in range(4)]
    found = list(split_step_done(StepDone(batch=0, step=0, sampled_tokens=drawn), 4500))
    assert [len(part.sampled_tokens) for part in found] == [2, 2]


@pytest.mark.parametrize("whole", [step(), step(0), step(10, 10, 10)])
def test_what_is_short_is_sent_as_it_is(whole: StepDone) -> None:
    assert list(split_step_done(whole, 1500)) == [whole]
    assert StepDoneAssembler().add(whole) is whole


def test_parts_of_a_step_that_was_never_ended_go() -> None:
    parts, (first, *_) = StepDoneAssembler(), split_step_done(step(500, 500), 600)
    assert parts.add(first) is None
    other = list(split_step_done(step(500, 500, view=2), 600))
    assert [parts.add(part) for part in other] == [None, step(500, 500, view=2)]
    assert parts.add(first) is None
    assert parts.add(step(1, number=4)) == step(1, number=4)
    assert parts.add(parted_end := list(split_step_done(step(500, 500), 600))[1]) == parted_end


def test_a_driver_hears_of_a_step_once_it_is_whole() -> None:
    quiet, told = socket.socketpair()
    pools, (member,) = members(Ended("compute"))
    member.link, theirs = ControlLink(quiet, StepDone), ControlLink(told, StatsRequest)
    first, *others = split_step_done(step(500, 500, 500), 600)
    theirs.send(first)
    assert pools.take_arrived(StepDone) == []
    for part in others:
        theirs.send(part)
    assert pools.wait_for([member], StepDone, 1.0, "for a step") == step(500, 500, 500)


@pytest.mark.long
def test_whole_logits_of_many_rows_pass_a_link_of_short_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(MODEL), transport="loopback", max_logprobs=-1, dtype="float32") as llm:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1)
        (short,) = llm.generate([list(range(5, 25))], params)
        rows = [[token] for token in range(5, 25)]
        with llm.lockstep(rows, 1) as lockstep:
            wanted = lockstep.logits()
        monkeypatch.setattr(control, "MAX_FRAME", 1 << 16)  # of 20 rows of 2048 logits or log-probabilities
        with llm.lockstep(rows, 1) as lockstep:
            assert lockstep.logits() == wanted
        (again,) = llm.generate([list(range(5, 25))], params)
    assert again.prompt_logprobs == short.prompt_logprobs
    assert torch.frombuffer(bytearray(wanted[0]), dtype=torch.float32).isfinite().all()
