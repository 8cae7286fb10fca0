"""The rule by which Lamina's greedy tokens are compared with those of ``transformers``.

Tokens must be equal wherever the reference's two best logits are further apart than ten times the measured logit error.
A smaller distance is a tie: rounding decides, so the comparison continues after Lamina's token. Ties may be at most 1 %
of all tokens. The logit error itself must be small: the rule is for fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lamina.request import RequestOutput

MARGIN_FACTOR = 10.0
TIES_ALLOWED = 0.01
ERROR_ALLOWED = 0.01  # in natural-log units: a larger error would make everything a tie


@dataclass
class Agreement:
    """The result of a comparison. Logits are natural-log units before softmax."""

    num_tokens: int = 0
    num_ties: int = 0  # tokens that differ where the reference itself is undecided
    num_wrong: int = 0  # tokens that differ although the reference is sure
    num_same_as_generate: int = 0  # completions equal, token for token, to model.generate's
    num_completions: int = 0
    logit_error: float = 0.0  # largest difference of a chosen token's log-probability
    worst_margin: float = 0.0  # largest distance from the reference's best logit to that of a chosen token

    @property
    def identical(self) -> bool:
        """True if the rule holds."""
        few_ties = self.num_ties <= TIES_ALLOWED * self.num_tokens
        return self.num_tokens > 0 and self.num_wrong == 0 and few_ties and self.logit_error <= ERROR_ALLOWED

    @property
    def share(self) -> float:
        """The share of tokens that are the reference's first choice."""
        return 1.0 - (self.num_ties + self.num_wrong) / max(self.num_tokens, 1)


@torch.inference_mode()
def compare(model: Any, outputs: Sequence[RequestOutput]) -> Agreement:
    """Compare greedy completions, generated with ``logprobs``, with the same ``model`` run by transformers. ``model``
    is in eval mode and on one device. Every completion is checked against ``model.generate`` and, position by position,
    against the model's logits after exactly the tokens that Lamina chose.
    """
    result = Agreement()
    gaps: list[float] = []  # reference's best logit minus that of Lamina's token, where they differ
    for output in outputs:
        for completion in output.outputs:
            _compare_one(model, output.prompt_token_ids, completion.token_ids, completion.logprobs or [], result, gaps)
    result.worst_margin = max(gaps, default=0.0)
    result.num_ties = sum(gap <= MARGIN_FACTOR * result.logit_error for gap in gaps)
    result.num_wrong = len(gaps) - result.num_ties
    return result


def _compare_one(
    model: Any, prompt: list[int], tokens: list[int], logprobs: Sequence[Any], result: Agreement, gaps: list[float]
) -> None:
    ids = torch.tensor([prompt])
    reference = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(tokens), do_sample=False, num_beams=1
    )
    result.num_same_as_generate += reference[0, len(prompt) :].tolist() == tokens
    result.num_completions += 1
    result.num_tokens += len(tokens)
    logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :].float()
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    gaps += [float(g) for g in logits.max(-1).values - chosen if not g <= 0]  # NaN is a gap that nothing excuses
    expected = chosen - torch.logsumexp(logits, -1)
    for token, value, entry in zip(tokens, expected.tolist(), logprobs, strict=True):
        error = abs(value - entry[token].logprob)
        result.logit_error = max(result.logit_error, math.inf if math.isnan(error) else error)
