"""Memory for a reply, taken before the request is accepted: a reply is in memory until its client has read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lamina.config.flag_groups import flag_name
from lamina.facts.report import size_text
from lamina.server.engine_client.messages import EngineReady
from lamina.server.errors import ApiError
from lamina.server.journal.journal_records import AcceptedRecord
from lamina.server.memory_budget import Holding, MemoryBudget
from lamina.server.memory_limits import ANSWER_TOKEN, PROMPT_SCORE, SCORE

RETRY_AFTER_S = 1


def answer_costs(record: AcceptedRecord, lengths: Sequence[int], ready: EngineReady) -> dict[str, int]:
    """Return the bytes that a reply may take, by the field that asks for them. ``lengths``: tokens of each prompt.

    The first completion counts nothing without log-probabilities: the KV pool and --max-num-queued-reqs bound these.
    """
    params, limit = record.params, ready.max_model_len
    most = [min(params.max_tokens or limit, max(1, limit - length)) for length in lengths]
    each = sum(most)
    costs = {"n" if params.n > 1 else "prompt": (params.n * each - max(most)) * ANSWER_TOKEN}
    if params.logprobs is not None:
        name = "logprobs" if record.kind == "cmpl" else "top_logprobs"
        costs[name] = params.n * each * _alternatives(params.logprobs, ready) * SCORE
    if params.prompt_logprobs is not None:
        name = "echo" if record.echo else "prompt_logprobs"
        tokens = sum(min(length, limit) for length in lengths)
        costs[name] = tokens * _alternatives(params.prompt_logprobs, ready) * PROMPT_SCORE
    return costs


def _alternatives(count: int, ready: EngineReady) -> int:
    """Return the log-probabilities for a token with ``count`` alternatives; -1 = the whole vocabulary."""
    return 1 + (ready.vocab_size if count < 0 else count)


def reserve_answer(
    budget: MemoryBudget, costs: dict[str, int], refused: Callable[[str], None], tenant: bytes = b""
) -> Holding:
    """Take memory for a reply to ``tenant``, until the holding is closed. ``refused``: gets the reason of a 503, in one
    word. Raises ApiError: 400 for a reply that never fits, 503 if other replies take the memory now.
    """
    total, holding = sum(costs.values()), budget.hold(tenant)
    if holding.resize(total):
        return holding
    if total > (most := budget.most(tenant=tenant)):
        param = max(costs, key=lambda name: costs[name])
        text = (
            f"{param} requests too much at once: the reply may take {size_text(total)} of memory, more than "
            f"{size_text(most)} ({flag_name('answer_total')}): ask for fewer prompts, tokens or alternatives"
        )
        raise ApiError(400, text, param=param, code="answer_too_large")
    refused("answers")
    text = f"replies to other requests fill the memory for them ({flag_name('answer_total')}): ask again"
    raise ApiError(503, text, code="no_room_for_answer", retry_after_s=RETRY_AFTER_S)
