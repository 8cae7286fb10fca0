"""Makers of the calls of ``features``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from desk import DRAWS, NEW, PROMPT, After, Call, Desk, Plus, Shares, Sink
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)


def single(**settings: Any) -> Call:
    return lambda m, d: d.one(m, **settings)


def batched(**settings: Any) -> Call:
    return lambda m, d: d.all(m, **settings)


def drawn(**settings: Any) -> Call:
    """Many draws of a wrapped model; of transformers, what it draws from."""

    def call(m: Any, d: Desk) -> Shares:
        settings.setdefault("max_new_tokens", 1)
        if hasattr(m, "llm"):
            return Shares.of(d.one(m, do_sample=True, num_return_sequences=DRAWS, **settings)[:, d.ids.shape[1]])
        out = d.one(m, do_sample=True, return_dict_in_generate=True, output_scores=True, **settings)
        return Shares(out.scores[0][0].softmax(0))

    return call


def seeded(**settings: Any) -> Call:
    """Takes the seed: ``output_logits`` has the token drawn here, as transformers does."""
    return lambda m, d: d.all(m, do_sample=True, return_dict_in_generate=True, output_logits=True, **settings).sequences


def as_dict(*names: str, **settings: Any) -> Call:
    def call(m: Any, d: Desk) -> Any:
        out = d.all(m, return_dict_in_generate=True, **settings)
        return [getattr(out, name) for name in names]

    return call


def config(m: Any) -> Any:
    return GenerationConfig(max_new_tokens=3, pad_token_id=1, eos_token_id=1)


def with_own_config(m: Any, d: Desk) -> Any:
    model = getattr(m, "model", None) if hasattr(m, "llm") else m
    assert model is not None
    saved = model.generation_config
    try:
        model.generation_config = GenerationConfig(max_new_tokens=2, pad_token_id=1, repetition_penalty=1.4)
        return m.generate(**d.batch)
    finally:
        model.generation_config = saved


def processor(**settings: Any) -> Call:
    def call(m: Any, d: Desk) -> Any:
        plus = Plus()
        return d.all(m, logits_processor=LogitsProcessorList([plus]), **settings), plus.shapes

    return call


def stop(**settings: Any) -> Call:
    def call(m: Any, d: Desk) -> Any:
        length = d.batch["input_ids"].shape[1]
        return d.all(m, stopping_criteria=StoppingCriteriaList([After(length)]), **settings)

    return call


def stream(**settings: Any) -> Call:
    def call(m: Any, d: Desk) -> Any:
        sink = Sink()
        return d.one(m, streamer=sink, **settings), sink.got

    return call


def streamed_batch(m: Any, d: Desk) -> Any:
    sink = Sink()
    return d.all(m, streamer=sink), sink.got


def text_streamer(m: Any, d: Desk) -> Any:
    texts: list[str] = []

    class Kept(TextStreamer):  # type: ignore[misc]
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            texts.append(text)

    d.one(m, streamer=Kept(d.tokenizer, skip_prompt=True))
    return texts


def iterated(m: Any, d: Desk, **settings: Any) -> str:
    streamer = TextIteratorStreamer(d.tokenizer, timeout=60)
    thread = threading.Thread(target=lambda: d.one(m, streamer=streamer, **settings), daemon=True)
    thread.start()
    text = "".join(streamer)
    thread.join(60)
    return text


def together(call: Callable[[int], Any]) -> list[Any]:
    """Returns the outputs of two threads that begin at once."""
    got: list[Any] = [None, None]
    gate = threading.Barrier(2)

    def run(index: int) -> None:
        gate.wait(60)
        try:
            got[index] = call(index)
        except Exception as e:  # noqa: BLE001 - compared
            got[index] = e

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for each in got:
        if isinstance(each, Exception):
            raise each
    return got


def two_threads(m: Any, d: Desk) -> Any:
    return together(lambda i: d.all(m) if i else d.one(m, max_new_tokens=16))


def two_users(m: Any, d: Desk) -> Any:
    def user(index: int) -> list[Any]:
        sink = Sink()
        d.one(m, streamer=sink, max_new_tokens=8 + index)
        return sink.got

    return together(user)


def within_a_processor(m: Any, d: Desk) -> Any:
    def again(input_ids: Tensor, scores: Tensor) -> Tensor:
        better = d.one(m, max_new_tokens=1)[0, -1]
        scores = scores.clone()
        scores[:, better] += 1.0
        return scores

    return d.all(m, logits_processor=[again], max_new_tokens=3)


def odd(input_ids: Tensor, scores: Tensor) -> Tensor:
    """A function is a processor, too."""
    scores = scores.clone()
    scores[:, ::2] = float("-inf")
    return scores


def ids_dtype(m: Any, d: Desk) -> Any:
    return m.generate(d.ids.int(), attention_mask=d.mask, max_new_tokens=3)


def masked(mask: list[int]) -> Call:
    def call(m: Any, d: Desk) -> Any:
        ids = d.ids.repeat(2, 1)
        full = torch.ones_like(ids)
        full[1, mask] = 0
        return m.generate(ids, attention_mask=full, max_new_tokens=3)

    return call


def positions(shift: int) -> Call:
    return lambda m, d: d.one(m, position_ids=torch.arange(d.ids.shape[1])[None] * 2**shift)


def piped(*args: Any, **settings: Any) -> Call:
    def call(m: Any, d: Desk) -> Any:
        pipe = pipeline("text-generation", model=m, tokenizer=d.tokenizer)
        return pipe(*(args or (PROMPT,)), **{"max_new_tokens": NEW, "do_sample": False} | settings)

    return call


def raises(m: Any, d: Desk) -> Any:
    """A processor that fails ends its own call alone."""

    def fail(input_ids: Tensor, scores: Tensor) -> Tensor:
        raise ZeroDivisionError("mine")

    try:
        d.all(m, logits_processor=[fail])
    except ZeroDivisionError as e:
        return str(e), d.all(m)
    return None


def repeats(m: Any, d: Desk) -> Any:
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(d.all(m, do_sample=True, temperature=1.5, max_new_tokens=4))
    return torch.equal(drawn[0], drawn[1]), torch.equal(drawn[0], drawn[2])


def shorter(d: Desk) -> Any:

    return StoppingCriteriaList([MaxLengthCriteria(max_length=d.ids.shape[1] + 2)])


def transitions(m: Any, d: Desk) -> Any:
    out = d.all(m, return_dict_in_generate=True, output_scores=True)
    return m.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)


def set_config(m: Any, d: Desk) -> Any:
    saved = m.generation_config
    try:
        m.generation_config = GenerationConfig(max_new_tokens=2, pad_token_id=1)
        return m.generate(**d.batch)
    finally:
        m.generation_config = saved
