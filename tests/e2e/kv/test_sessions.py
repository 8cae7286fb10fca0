"""Conversations that have a name: they stay in the pool or are offloaded, continue, and are forgotten whole.

Covers: lamina/cli/operate/sessions.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lamina import LLM, SamplingParams
from lamina.engine.streams import RequestOutputCollector
from lamina.scheduler.sessions.cache_options import CacheOptions
from lamina.scheduler.sessions.session_table import SessionInfo, SessionName
from lamina.scheduler.sessions.session_turns import SessionBusyError, prompt_transcript

pytestmark = pytest.mark.usefixtures("no_child_left")
Reference = Callable[[list[int], int], list[int]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
OPTIONS: dict[str, Any] = {"transport": "loopback", "dtype": "float32", "enable_prefix_caching": True}
BLOCK = 32


def text(number: int, length: int) -> list[int]:
    return [(number * 31 + i) % 90 + 5 for i in range(length)]


def turn(llm: LLM, name: str | None, prompt: list[int]) -> tuple[list[int], int]:
    """Returns the conversation after the turn, and the tokens whose KV was there."""
    (output,) = llm.generate([prompt], PARAMS, session_id=name)
    return [*prompt, *output.outputs[0].token_ids], output.num_cached_tokens or 0


@pytest.mark.long
def test_a_session_outlives_what_has_no_name(llama_path: Path, reference: Reference) -> None:
    """The pool has room for one more long prompt: a named session is evicted last, and forgets nothing."""
    with LLM(str(llama_path), memory_workers=2, kv_memory="262144", max_model_len=512, **OPTIONS) as llm:
        blocks = llm.engine.free_blocks
        said, _ = turn(llm, "mine", text(1, 150))
        for number in range(2, 8):
            turn(llm, None, text(number, 150))
        assert llm.sessions() == [SessionInfo("mine", 1, 161, "pool")]
        more, cached = turn(llm, "mine", [*said, *text(9, 20)])
        assert cached == 161
        assert more[-12:] == reference(more[:-12], 12)
        assert llm.sessions() == [SessionInfo("mine", 2, 193, "pool")]
        assert dict(llm.engine.sessions.hits) == {"pool": 1}
        (waited,) = llm.engine.sessions.waits.items()
        assert waited[0] == "pool"
        assert waited[1] > 0.0
        assert llm.drop_session("mine")
        assert not llm.drop_session("mine")
        assert turn(llm, "mine", [*more, *text(9, 20)])[1] == 0, "its pages went with it"
        llm.reset_prefix_cache()
        turn(llm, None, text(1, 3))
        assert llm.engine.free_blocks == blocks


def test_what_others_share_stays(llama_path: Path) -> None:
    with LLM(str(llama_path), memory_workers=1, kv_offloading_size="16MiB", **OPTIONS) as llm:
        system = text(0, 256)
        first, _ = turn(llm, "a", [*system, *text(1, 130)])
        second, cached = turn(llm, "b", [*system, *text(2, 130)])
        assert cached == 256
        llm.drop_session("a")
        llm.engine.finish_in_flight()  # pages in flight to storage are there
        llm.engine.scheduler.evict_retained()
        _, cached = turn(llm, None, [*first, 7])
        assert cached == 256, "two pages are the other's too, the third one was its own"
        llm.engine.finish_in_flight()  # pages in flight to storage are there
        llm.engine.scheduler.evict_retained()
        assert turn(llm, "b", [*second, 7])[1] == len(second) - 1
        assert dict(llm.engine.sessions.hits) == {"host": 1}


def test_one_that_was_put_out_of_the_pool_wakes_from_beside_it(llama_path: Path, reference: Reference) -> None:
    with LLM(str(llama_path), memory_workers=2, kv_offloading_size="16MiB", **OPTIONS) as llm:
        said, _ = turn(llm, "mine", text(1, 270))
        assert llm.sessions()[0].tier == "pool"
        llm.engine.finish_in_flight()  # pages in flight to storage are there
        llm.engine.scheduler.evict_retained()
        turn(llm, None, text(3, 40))
        assert llm.sessions()[0].tier == "host"
        more, cached = turn(llm, "mine", [*said, *text(9, 20)])
        assert cached == len(said) - 1
        assert more[-12:] == reference(more[:-12], 12)


def test_refusals_leave_the_session_as_it_was(llama_path: Path) -> None:
    with LLM(str(llama_path), memory_workers=1, **OPTIONS) as llm:
        said, _ = turn(llm, "mine", text(1, 40))
        for prompt in (text(2, 60), said[:39]):
            with pytest.raises(ValueError, match="session_id 'mine'.*does not begin with the tokens of its last turn"):
                turn(llm, "mine", prompt)
        with pytest.raises(ValueError, match="n must be 1 with session_id, not 2"):
            llm.generate([said], SamplingParams(n=2), session_id="mine")
        with pytest.raises(ValueError, match="one prompt, not 2"):
            llm.generate([said, said], PARAMS, session_id="mine")
        of_session = CacheOptions(session=SessionName(b"", "mine"))
        begun = replace(
            llm.front.engine_request(said, PARAMS), cache_options=of_session, transcript=prompt_transcript(said)
        )
        reader = RequestOutputCollector()
        llm.front.streams.add([begun], reader)
        for call in (lambda: turn(llm, "mine", said), lambda: llm.drop_session("mine")):
            with pytest.raises(SessionBusyError, match="under way"):
                call()
        llm.front.streams.drop(reader)
        turn(llm, "mine", said)
        assert llm.sessions()[0].turns == 2, "the one that was broken off had not begun"


@pytest.mark.long
def test_a_replay_goes_on_behind_a_restart_with_other_workers(
    llama_path: Path, tmp_path: Path, reference: Reference
) -> None:
    """Two conversations, in turns: by head over two workers, then by token over three. Each turn has the tokens that it
    would have had. The first turns after the restart are found on the disk, though no worker knows the names.
    """
    said, where = {name: text(number, 140) for number, name in enumerate("ab")}, {"kv_store_dir": str(tmp_path / "kv")}
    for start in ({"memory_workers": 2}, {"memory_workers": 3, "partition": "token", "block_size": 16}):
        with LLM(str(llama_path), **OPTIONS, **where, **start) as llm:
            assert llm.sessions() == []
            found = list[int]()
            for number in range(2):
                for name in said:
                    prompt = said[name] if len(said[name]) == 140 else [*said[name], *text(7 + number, 9)]
                    said[name], cached = turn(llm, name, prompt)
                    assert said[name][len(prompt) :] == reference(prompt, 12)
                    found.append(cached)
            llm.engine.finish_in_flight()  # what is on its way to the directory is there
        assert found[:2] == ([0, 0] if "partition" not in start else [172, 172])
        assert min(found[2:]) >= 128, "the second turn of each wakes in the pool"
