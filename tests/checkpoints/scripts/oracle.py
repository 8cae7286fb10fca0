"""The answers in fp32 of models, for the scripts that write checkpoints of them."""

from __future__ import annotations

from typing import Any

import torch

PROMPT, TOKENS, LOGITS = [3, 17, 99, 4, 56, 140, 8], 12, 8


def oracle(model: Any) -> dict[str, Any] | None:
    """Returns what a model in fp32 computes: tokens by argmax, and logits of the last one. None for a near tie."""
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(TOKENS):
            logits = model(ids).logits[0, -1]
            top = logits.topk(2).values
            if float(top[0] - top[1]) < 0.02 * float(logits.std()):
                return None
            ids = torch.cat([ids, logits.argmax().view(1, 1)], 1)
    return {"prompt": PROMPT, "tokens": ids[0, len(PROMPT) :].tolist(), "logits": logits[:LOGITS].tolist()}
