"""A model of integers. What is stored at a position depends on all that it saw: a wrong block shows ever after."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lamina.ops.sampling.token_history import PendingHistory
from lamina.protocol.control import SampledToken, SamplingRequest

VOCAB, EOS = 97, 96
PRIME = 1_000_003
ODDS = 13  # in one of so many draws the model ends the text


def value(token: int, position: int, seen: int) -> int:
    """Stored at ``position``; ``seen``: the sum over what its attention sees."""
    return (token * 31 + (position + 1) * 1009 + seen * 7 + 13) % PRIME


def drawn(draw: SamplingRequest, seen: int, due: Mapping[int, PendingHistory], pending: int | None) -> SampledToken:
    """A token; a pure function of what the row has seen, the draw's fields and the tokens that penalties count."""
    if draw.prompt_logprob_token >= 0:
        return SampledToken(
            draw.sequence, draw.prompt_logprob_token, [(draw.prompt_logprob_token, -float(seen % 1000), 1 + seen % 7)]
        )
    number = seen + draw.seed % PRIME * (draw.output_index + 1)
    forbidden = set(draw.banned_token_ids)
    if draw.logits_update is not None:
        state = due[draw.sequence]
        rules = state.history.logit_changes(state.num_tokens, pending)
        forbidden |= {*rules.banned_token_ids}
        for mask in rules.masks:
            forbidden |= {*range(EOS)} - {*(mask.few_token_ids or range(EOS))}
        counted = [*state.history.token_ids[: state.num_tokens], *([] if pending is None else [pending])]
        number += sum((i + 1) * (t + 1) for i, t in enumerate(counted)) * 3
    token = EOS if number % ODDS == 0 else number % EOS
    while token in forbidden:
        token = (token + 1) % EOS
    logprobs = [(token, -float(number % 1000), 1 + number % 7)] if draw.logprobs >= 0 else []
    return SampledToken(draw.sequence, token, logprobs)


def letters(tokens: Iterable[int]) -> str:
    """The text of tokens."""
    return "".join(chr(97 + t % 26) for t in tokens)


class Letters:
    """The model's detokenizer, as models.tokenizer.Detokenizer is for a real one."""

    def push(self, token_ids: Iterable[int]) -> str:
        return letters(token_ids)

    def finish(self) -> str:
        return ""

    def special_tokens(self, texts: Sequence[str]) -> dict[int, str]:
        return {}
