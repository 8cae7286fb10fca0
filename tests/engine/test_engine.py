"""The engine over a wire that has no workers (``fake_wire``).

Covers: lamina/request/outputs.py.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from engine_api import make_engine, run
from fake_executor import VOCAB, FakeWire, Letters, continuation

from lamina.protocol.control import NO_TOKEN, RunStep, SampledToken, StepDone
from lamina.request import SamplingParams
from lamina.request.outputs import ResumedCompletion
from lamina.scheduler.kv_manager.prefix_cache import PrefixCache
from lamina.scheduler.sessions.cache_options import CacheOptions


@pytest.mark.parametrize("pipeline", [1, 2, 3])
def test_tokens_times_and_blocks(pipeline: int) -> None:
    wire = FakeWire()
    engine = make_engine(wire, prefill_chunk=8, max_num_seqs=3, pipeline=pipeline)
    prompts = [[1, 2, 3], [5] * 30, [7], [9, 8], [4] * 11]
    ids = [engine.add(p, SamplingParams(max_tokens=9)) for p in prompts]
    done = run(engine)
    assert [done[i].outputs[0].token_ids for i in ids] == [continuation(p, 9) for p in prompts]
    assert engine.free_blocks == (64,)
    assert wire.tables.free_blocks == (64,)
    for output in done.values():
        times = output.times
        assert times.first_token_s is not None
        assert times.finished_s is not None
        assert times.arrival_s < times.first_token_s < times.finished_s


def test_a_stop_string_ends_the_text_before_it() -> None:
    tokens = continuation([1, 2, 3], 20)
    text = Letters().push(tokens)
    stop = text[7:10]
    at = text.find(stop)
    engine = make_engine()
    engine.add([1, 2, 3], SamplingParams(max_tokens=20, stop=stop), make_detokenizer=Letters)
    seen = []
    while engine.has_work:
        seen += [o.outputs[0].text for o in engine.step()]
    assert seen[-1] == text[:at]
    assert all(b.startswith(a) for a, b in pairwise(seen)), "shown text never shrinks"
    assert all(text[:at].startswith(s) for s in seen), "no part of the stop string is ever shown"


class WireThatFails(FakeWire):
    """The seventh token is none."""

    def execute(self, step: RunStep) -> StepDone:
        done = super().execute(step)
        drawn = [
            SampledToken(d.sequence, NO_TOKEN) if i.output_index == 6 else d
            for i, d in zip(step.sampling_requests, done.sampled_tokens, strict=True)
        ]
        return msgspec.structs.replace(done, sampled_tokens=drawn)


@pytest.mark.parametrize("end", ["error", "abort"])
def test_an_end_that_no_token_brings_shows_the_text_that_was_held_back(end: str) -> None:
    text = Letters().push(continuation([1, 2, 3], 6))
    engine = make_engine(WireThatFails() if end == "error" else None)
    request = engine.add([1, 2, 3], SamplingParams(max_tokens=20, stop=text[3:] + "~"), make_detokenizer=Letters)
    output, count = None, 0
    while count < 6:
        for output in engine.step():
            count = len(output.outputs[0].token_ids)
    assert output is not None
    assert output.outputs[0].text == text[:3], "it might become the stop string"
    ended = run(engine)[request] if end == "error" else engine.cancel(request)
    assert ended is not None
    assert (ended.outputs[0].finish_reason, ended.outputs[0].text) == (end, text)


def test_stop_reasons() -> None:
    tokens = continuation([1, 2, 3], 20)
    engine = make_engine()
    by_token = engine.add(
        [1, 2, 3], SamplingParams(max_tokens=20, stop_token_ids=[tokens[4]]), make_detokenizer=Letters
    )
    by_length = engine.add([1, 2, 3], SamplingParams(max_tokens=6), make_detokenizer=Letters)
    by_string = engine.add(
        [1, 2, 3], SamplingParams(max_tokens=20, stop=["~", "A", "B", "C", "D"]), make_detokenizer=Letters
    )
    done = {i: o.outputs[0] for i, o in run(engine).items()}
    first = tokens.index(tokens[4])
    assert (done[by_token].finish_reason, done[by_token].stop_reason) == ("stop", tokens[4])
    assert done[by_token].token_ids == tokens[: first + 1]
    assert done[by_token].text == Letters().push(tokens[:first]), "a stop token has no text"
    assert (done[by_length].finish_reason, done[by_length].stop_reason) == ("length", None)
    assert done[by_string].finish_reason == "stop"
    assert done[by_string].stop_reason in ("A", "B", "C", "D")


def test_min_tokens_bans_stop_tokens_before() -> None:
    tokens = continuation([1, 2, 3], 3)
    engine = make_engine()
    request = engine.add([1, 2, 3], SamplingParams(max_tokens=8, min_tokens=4, stop_token_ids=[tokens[2]]))
    output = run(engine)[request].outputs[0]
    assert tokens[2] not in output.token_ids[:4]
    assert len(output.token_ids) >= 4


def test_cancel_frees_and_others_go_on() -> None:
    wire = FakeWire()
    engine = make_engine(wire)
    gone = engine.add([1] * 20, SamplingParams(max_tokens=90))
    kept = engine.add([2, 3], SamplingParams(max_tokens=30))
    for _ in range(6):
        engine.step()
    engine.cancel(gone)
    engine.cancel(gone)
    engine.cancel(12345)
    done = run(engine)
    assert done.keys() == {kept}
    assert done[kept].outputs[0].token_ids == continuation([2, 3], 30)
    assert wire.tables.free_blocks == (64,)


@pytest.mark.parametrize("pipeline", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_blocks_run_out_and_nothing_is_lost(pipeline: int, seed: int) -> None:
    engine = make_engine(FakeWire(num_blocks=34, seed=seed), max_num_seqs=8, pipeline=pipeline)
    prompts = [[i, i + 1, i + 2] * 4 for i in range(6)]
    ids = [engine.add(p, SamplingParams(max_tokens=40)) for p in prompts]
    done = run(engine)
    assert engine.scheduler.num_preemptions > 0
    assert [done[i].outputs[0].token_ids for i in ids] == [continuation(p, 40) for p in prompts]


def test_a_text_ends_at_the_models_length() -> None:
    engine = make_engine()
    request = engine.add([1] * 120, SamplingParams(max_tokens=None))
    output = run(engine)[request].outputs[0]
    assert len(output.token_ids) == 8
    assert output.finish_reason == "length"


@pytest.mark.parametrize("told", [8, 12])
@pytest.mark.parametrize("cancelled", [False, True])
def test_who_has_heard_all_that_there_can_be_is_told_the_end(told: int, cancelled: bool) -> None:
    """This happens after a server's death, in one whose --max-model-len is smaller."""
    engine, tokens = make_engine(), continuation([1] * 120, told)
    request = engine.add(
        [1] * 120, SamplingParams(max_tokens=20), resume_from=[ResumedCompletion(index=0, token_ids=[*tokens])]
    )
    other = engine.add([2, 3], SamplingParams(max_tokens=5))
    if cancelled:
        engine.cancel(request)
    done = run(engine)
    assert done.keys() == {other} | ({request} if not cancelled else set())
    assert done[other].outputs[0].token_ids == continuation([2, 3], 5)
    if not cancelled:
        assert done[request].outputs[0].token_ids[:8] == tokens[:8]
        assert done[request].outputs[0].finish_reason == "length"
    engine.release_idle_blocks()
    assert engine.free_blocks == make_engine().free_blocks


@pytest.mark.parametrize(
    ("prompt", "words"), [([], "empty"), ([1] * 128, "--max-model-len"), ([VOCAB], "vocabulary"), ([-1], "vocabulary")]
)
def test_bad_prompts(prompt: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_engine().add(prompt, SamplingParams())


def test_requests_share_kv_within_a_salt_only() -> None:
    """Whatever number of completions they have."""
    engine, prompt = make_engine(max_num_seqs=4, enable_prefix_caching=True), [5] * 30
    found = []
    for salt, n in ((b"a", 1), (b"b", 2), (b"a", 2), (b"b", 1), (b"", 1)):
        request = engine.add(prompt, SamplingParams(max_tokens=3, n=n), terms=CacheOptions(salt))
        output = run(engine)[request]
        assert [o.token_ids for o in output.outputs] == [continuation(prompt, 3)] * n
        found.append(output.num_cached_tokens)
    assert found == [0, 0, 29, 29, 0]
    hits = engine.scheduler.features[PrefixCache].num_hit_tokens
    assert 4 * 28 < hits <= 4 * 29, "all sequences but the first of each salt, to the token where that is there"
