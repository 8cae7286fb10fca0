"""Conversations longer than the context: the KV of a session is cut and moved. Decoding goes on as if transformers had
been handed the same keys at the same positions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import llama
from transformers import AutoModelForCausalLM, DynamicCache

from lamina import LLM, RequestOutput, SamplingParams
from lamina.scheduler.kv_manager.session_cache import SessionCache
from lamina.scheduler.sessions.cache_options import CacheOptions
from lamina.scheduler.sessions.session_table import SessionName

pytestmark = pytest.mark.usefixtures("no_child_left")
LIMIT, FIRST, STEP = 512, 128, 128
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "transport": "loopback", "dtype": "float32", "enable_prefix_caching": True, "max_model_len": LIMIT,
    "context_overflow": "truncate", "truncate_ratio": 0.25,
}  # fmt: skip


PREFILL: dict[str, Any] = {"prefill_workers": 1, "prefill_chunk": 64, "block_size": 32}
RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "transport": "shm"}


def text(number: int, length: int) -> list[int]:
    return [(number * 31 + i * (number + 3)) % 90 + 5 for i in range(length)]


class Mirror:
    """transformers, whose cache is cut and turned by hand."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.cache = DynamicCache(config=self.model.config)
        self.length = 0

    @torch.inference_mode()
    def take(self, tokens: list[int]) -> int:
        """Appends to what is there; returns the next token."""
        at = torch.arange(self.length, self.length + len(tokens))
        out = self.model(torch.tensor([tokens]), position_ids=at[None], past_key_values=self.cache, cache_position=at)
        self.length += len(tokens)
        return int(out.logits[0, -1].argmax())

    def answer(self, tokens: list[int], count: int) -> list[int]:
        found = [self.take(tokens)]
        while len(found) < count:
            found.append(self.take(found[-1:]))
        return found

    def keep(self, length: int) -> None:
        for layer in self.cache.layers:
            layer.keys, layer.values = (x[:, :, :length] for x in (layer.keys, layer.values))
        self.length = length

    def shift(self, first: int, count: int, *, turn: bool = True) -> None:
        """In fp64, by the formula of the paper of rotary embeddings."""
        frequencies = self.model.model.rotary_emb.inv_freq.double()
        angles = torch.cat([frequencies, frequencies]) * -count
        for layer in self.cache.layers:
            k, v = (torch.cat([x[:, :, :first], x[:, :, first + count :]], 2) for x in (layer.keys, layer.values))
            moved = k[:, :, first:].double()
            half = moved.shape[-1] // 2
            swapped = torch.cat([-moved[..., half:], moved[..., :half]], -1)
            if turn:
                k[:, :, first:] = (moved * angles.cos() + swapped * angles.sin()).float()
            layer.keys, layer.values = k, v
        self.length -= count


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "first", "step"),
    [
        ({"memory_workers": 2}, FIRST, STEP),
        ({"memory_workers": 2, "partition": "token", "truncate_ratio": 0.5, "keep_first": 0}, 0, 2 * STEP),
        ({"memory_workers": 1, "pipeline": 2, "keep_first": 0}, 0, STEP),
        ({"memory_workers": 2, **PREFILL}, FIRST, STEP),
        ({"memory_workers": 2, **PREFILL, "prefill_workers": 2, "prefill_pipeline": 2, "keep_first": 0}, 0, STEP),
        ({"memory_workers": 4, **RANKS}, FIRST, STEP),
        ({"memory_workers": 4, **RANKS, "partition": "token", "truncate_ratio": 0.5, "keep_first": 0}, 0, 2 * STEP),
        ({"memory_workers": 2, **RANKS, **PREFILL}, FIRST, STEP),
    ],
    ids=str,
)
def test_a_session_is_cut_and_goes_on(llama_path: Path, options: dict[str, Any], first: int, step: int) -> None:
    mirror, naive = Mirror(llama_path), Mirror(llama_path)
    with LLM(str(llama_path), **{**OPTIONS, **options}) as llm:
        said = text(1, 440)
        (output,) = llm.generate([said], PARAMS, session_id="mine")
        assert output.outputs[0].token_ids == mirror.answer(said, 12)
        naive.answer(said, 12)
        said += output.outputs[0].token_ids
        discarded, cached = 0, 451
        for number in range(2, 6):
            said += text(number, 100)
            (output,) = llm.generate([said], PARAMS, session_id="mine")
            if len(said) - discarded + 12 > LIMIT:
                mirror.keep(cached)
                naive.keep(cached)
                mirror.shift(first, step)
                naive.shift(first, step, turn=False)
                discarded, cached = discarded + step, cached - step
            assert output.num_cached_tokens == cached
            mirror.keep(cached)
            naive.keep(cached)
            rest = (said[:first] + said[first + discarded :])[cached:]
            assert output.outputs[0].token_ids == mirror.answer(rest, 12)
            naive.answer(rest, 12)
            said += output.outputs[0].token_ids
            cached = (len(said) - discarded - 1) // 32 * 32
        assert discarded == 512
        assert llm.engine.scheduler.features[SessionCache].num_shifts >= 2
        stats, prefill = llm.stats(), options.get("prefill_workers", 0)
        fetched = [stats[f"prefill-{n}"]["fetched_bytes"] for n in range(prefill)]
        assert all(fetched), "prefill workers compute the rest of turns, whose KV memory workers have moved"
        alike = [
            torch.allclose(a.keys, b.keys, atol=1e-2)
            for a, b in zip(mirror.cache.layers, naive.cache.layers, strict=True)
        ]
        assert not any(alike), "else the test would not see whether keys were turned"
        view = said[:first] + said[first + discarded :]
        (output,) = llm.generate([view], PARAMS)
        assert output.num_cached_tokens == 0, "its K and V have seen what was discarded: they are for nobody else"
        assert output.outputs[0].token_ids == Mirror(llama_path).answer(view, 12)
        llm.drop_session("mine")
        (output,) = llm.generate([said], PARAMS, session_id="mine")
        assert output.num_cached_tokens == 0


@pytest.mark.long
@pytest.mark.parametrize("first", [0, 128])
def test_three_processes_that_divide_the_tokens_cut_a_session(first: int, tmp_path: Path) -> None:
    """The step is one stripe of each. The conversation outgrows two contexts; then a prompt without a session."""
    limit, step = 768, 384
    llama(max_position_embeddings=limit).save_pretrained(tmp_path)
    own = {"max_model_len": limit, "truncate_ratio": 0.5, "keep_first": first, "transport": "shm"}
    mirror, said, discarded = Mirror(tmp_path), text(1, 700), 0
    with LLM(str(tmp_path), **{**OPTIONS, **own}, memory_workers=3, partition="token") as llm:
        (output,) = llm.generate([said], PARAMS, session_id="mine")
        assert output.outputs[0].token_ids == mirror.answer(said, 12)
        for number in range(2, 8):
            before = len(said) - discarded
            said += [*output.outputs[0].token_ids, *text(number, 150)]
            (output,) = llm.generate([said], PARAMS, session_id="mine")
            cached, is_cut = output.num_cached_tokens or 0, len(said) - discarded + 12 > limit
            assert cached >= before - 32 - step * is_cut, "all but the last block of the last turn is kept"
            mirror.keep(cached + step * is_cut)
            if is_cut:
                mirror.shift(first, step)
                discarded += step
            rest = (said[:first] + said[first + discarded :])[cached:]
            assert output.outputs[0].token_ids == mirror.answer(rest, 12)
        assert discarded == 3 * step
        assert len(said) > 2 * limit
        assert all(llm.stats()[f"memory-{n}"]["stored_bytes"] for n in range(3)), "each has a part of the tokens"
        alone = text(9, 1000)
        (output,) = llm.generate([alone], PARAMS)
        assert output.outputs[0].token_ids == Mirror(tmp_path).answer(alone[:first] + alone[first + step :], 12)


@pytest.mark.long
def test_tokens_that_are_named_go_from_the_middle_of_a_session(llama_path: Path) -> None:
    """And with a later turn more of them; what is left is moved, not computed again."""
    mirror = Mirror(llama_path)
    with LLM(str(llama_path), **OPTIONS, memory_workers=2) as llm:
        said = text(1, 440)
        (output,) = llm.generate([said], PARAMS, session_id="mine")
        assert output.outputs[0].token_ids == mirror.answer(said, 12)
        said += output.outputs[0].token_ids
        mirror.keep(451)
        gone = 0
        for number, named in ((2, [(256, 384)]), (3, []), (4, [(128, 256), (256, 384)])):
            said += text(number, 20)
            (output,) = llm.generate([said], PARAMS, session_id="mine", kv_discard=named)
            if number == 2:
                mirror.shift(256, 128)
            elif number == 4:
                mirror.shift(128, 128)
            gone += 128 * (number != 3)
            assert output.num_cached_tokens == mirror.length
            left = [*said[:128], *said[384:]] if number == 4 else [*said[:256], *said[384:]]
            assert output.outputs[0].token_ids == mirror.answer(left[mirror.length :], 12)
            said += output.outputs[0].token_ids
            mirror.keep((len(said) - gone - 1) // 32 * 32)
        assert llm.engine.scheduler.features[SessionCache].num_shifts == 2
        for wrong, words in (((200, 328), "multiple of 128"), ((0, 128), "keep-first"), ((256, 2048), "between")):
            with pytest.raises(ValueError, match=words):
                llm.generate([said], PARAMS, session_id="mine", kv_discard=[wrong])
        with pytest.raises(ValueError, match="one prompt"):
            llm.generate([said, said], PARAMS, kv_discard=[(128, 256)])
    with LLM(str(llama_path), memory_workers=1) as llm, pytest.raises(ValueError, match="--context-overflow truncate"):
        llm.generate([said[:100]], PARAMS, kv_discard=[(128, 256)])


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"memory_workers": 1},
        {"memory_workers": 2, "partition": "request"},
        {"memory_workers": 2, **PREFILL},
        {"memory_workers": 2, **RANKS},
    ],
    ids=str,
)
def test_a_session_that_has_lost_tokens_wakes_from_a_directory(
    llama_path: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    """In another engine: pages lie there as they were saved, and come with K at the positions that they have now."""
    mirror, said, store = Mirror(llama_path), text(1, 440), {"kv_store_dir": str(tmp_path / "kv")}
    with LLM(str(llama_path), **OPTIONS, **store, memory_workers=2) as llm:
        (output,) = llm.generate([said], PARAMS, session_id="mine")
        said += output.outputs[0].token_ids
        llm.engine.release_idle_blocks()
        llm.engine.finish_in_flight()
    assert output.outputs[0].token_ids == mirror.answer(said[:440], 12)
    mirror.keep(384)
    mirror.shift(128, 128)
    with LLM(str(llama_path), **{**OPTIONS, **store, **options}) as llm:
        said += text(2, 20)
        (output,) = llm.generate([said], PARAMS, session_id="mine", kv_discard=[(128, 256)])
        assert output.num_cached_tokens == mirror.length == 256
        assert output.outputs[0].token_ids == mirror.answer([*said[:128], *said[256:]][256:], 12)
        if "prefill_workers" in options:
            assert llm.stats()["prefill-0"]["fetched_bytes"] > 0
        (output,) = llm.generate([[*said[:128], *said[256:]]], PARAMS)
        assert (output.num_cached_tokens or 0) <= 128, "a prompt like it finds no more than the page before the gap"


def test_a_long_prompt_without_a_session_is_computed_from_what_is_left(llama_path: Path) -> None:
    with LLM(str(llama_path), **OPTIONS, memory_workers=1) as llm:
        said = text(1, 600)
        (output,) = llm.generate([said], PARAMS)
        left = said[:FIRST] + said[FIRST + STEP :]
        assert output.outputs[0].token_ids == Mirror(llama_path).answer(left, 12)
        assert output.prompt_token_ids == said
        with pytest.raises(ValueError, match="600"):
            llm.generate([said], SamplingParams(max_tokens=1, prompt_logprobs=1))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"keep_first": 100}, "keep_first=100 is not whole pages"),
        ({"keep_first": 384}, "no room after keep-first=384"),
    ],
    ids=str,
)
def test_keep_first_that_has_no_room(llama_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        LLM(str(llama_path), **{**OPTIONS, **options})


def test_the_next_turn_may_come_at_once_and_its_salt_counts(llama_path: Path) -> None:
    """It may come before the engine has settled after the turn: an idle server does so a moment later."""
    name = SessionName(b"", "mine")
    with LLM(str(llama_path), memory_workers=1, **OPTIONS) as llm:

        def turn(prompt: list[int], salt: bytes) -> RequestOutput:
            number = llm.engine.add(prompt, PARAMS, terms=CacheOptions(salt, name))
            while True:
                for output in llm.engine.step():
                    if output.request_id == number and output.finished:
                        return output

        said = text(1, 440)
        for salt, cached in ((b"a", False), (b"a", True), (b"b", False)):
            output = turn(said, salt)
            assert bool(output.num_cached_tokens) == cached
            said += [*output.outputs[0].token_ids, *text(2, 100)]
        llm.engine.release_idle_blocks()
