"""Two users of one page, as Gradio serves them: each has a streamer of its own, and a thread that generates into it."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

import lamina

MODEL = Path(__file__).resolve().parents[3] / "examples" / "tiny_lm" / "model"
TEXTS = ("import os\n", "class Stack:\n")
NEW = 12


def test_each_reads_its_own_text_while_the_other_is_served() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    asked = [tokenizer(text, return_tensors="pt") for text in TEXTS]
    settings = [{"max_new_tokens": NEW}, {"max_new_tokens": NEW, "no_repeat_ngram_size": 2}]  # both paths of decoding
    expected = [
        tokenizer.decode(model.generate(**a, **s)[0, a.input_ids.shape[1] :])
        for a, s in zip(asked, settings, strict=True)
    ]
    got = [list[str](), list[str]()]
    with lamina.wrap(model, transport="loopback", max_model_len=128) as split:

        def serve(user: int) -> None:
            streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
            told = {**asked[user], **settings[user], "streamer": streamer}
            thread = threading.Thread(target=split.generate, kwargs=told, daemon=True)
            thread.start()
            got[user].extend(streamer)
            thread.join(60)

        for _ in range(2):  # a page is used more than once
            users = [threading.Thread(target=serve, args=(user,), daemon=True) for user in range(2)]
            for user in users:
                user.start()
            for user in users:
                user.join(120)
    assert ["".join(pieces) for pieces in got] == [text * 2 for text in expected]
    assert min(map(len, got)) > 4, "in pieces, as it grows"
