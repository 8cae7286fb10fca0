"""Measures of a causal LM of the transformers library: bits per byte of text, and recall over a distance."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from .corpus import held_out_text
from .recall import RecallTask


@torch.inference_mode()
def bits_per_byte(model: Any, tokenizer: Any, text: str, *, window: int = 1024) -> float:
    """Mean bits per UTF-8 byte of ``text``; every token is predicted once, from window/2 to window tokens of context.

    The first token of the text is predicted from the tokenizer's beginning-of-text token.
    """
    ids = torch.tensor([tokenizer.bos_token_id, *tokenizer.encode(text, add_special_tokens=False, verbose=False)])
    bits, done = 0.0, 1
    while done < len(ids):
        start = max(0, done - window // 2)
        piece = ids[start : start + window]
        logits = model(input_ids=piece[None, :-1].to(model.device), use_cache=False).logits[0].float().cpu()
        losses = F.cross_entropy(logits, piece[1:], reduction="none")
        bits += float(losses[done - start - 1 :].double().sum()) / np.log(2)
        done = start + len(piece)
    return bits / len(text.encode())


@torch.inference_mode()
def recall(
    model: Any,
    tokenizer: Any,
    distance: int,
    *,
    prompts: int = 64,
    pairs: int = 4,
    seed: int = 0,
    filler: str | None = None,
    batch: int = 8,
) -> float:
    """Share of questions whose whole answer greedy decoding would give, ``distance`` tokens after the statements.

    ``filler``: ordinary text between statements and question; the held-out standard library by default. A model that
    picks a stated value blindly is right once in ``pairs``.
    """
    ids = np.array(tokenizer.encode(filler or held_out_text(), add_special_tokens=False, verbose=False))
    questions = RecallTask(tokenizer).prompts(ids, distance, count=prompts, pairs=pairs, seed=seed)
    right = 0
    for first in range(0, prompts, batch):
        # Forcing the true answer gives the verdict of greedy decoding: both agree up to the first wrong token.
        chunk = torch.tensor([prompt.tokens + prompt.answer for prompt in questions[first : first + batch]])
        answers = torch.tensor([prompt.answer for prompt in questions[first : first + batch]])
        logits = model(input_ids=chunk[:, :-1].to(model.device), use_cache=False).logits
        guesses = logits[:, -answers.shape[1] :].argmax(-1).cpu()
        right += int((guesses == answers).all(-1).sum())
    return right / prompts
