"""The record of a request: all that its reply depends on. A journal keeps it."""

from __future__ import annotations

import secrets
import time
from typing import Literal

from lamina.request import SamplingParams
from lamina.scheduler.sessions.token_ranges import parse_ranges
from lamina.server.journal.journal_records import AcceptedRecord, ToolUse

from .openai_protocol import Sampling


def new_accepted_request(
    kind: Literal["cmpl", "chatcmpl"],
    model: str,
    params: SamplingParams,
    body: Sampling,
    salt: bytes,
    *,
    tokens_as_ids: bool = False,
    echo: bool = False,
    only_prompt: bool = False,
    tool_use: ToolUse | None = None,
    reasoning: str = "",
) -> AcceptedRecord:
    """Return a new request's record, without its prompts. ``model``: the name that its client used. ``salt``: see
    salt_of. ``tokens_as_ids``: used if the request does not set it.
    """
    return AcceptedRecord(
        id=f"{kind}-{secrets.token_hex(16)}",
        kind=kind,
        model=model,
        created=int(time.time()),
        params=params,
        prompts=[],
        echo=echo,
        only_prompt=only_prompt,
        tokens_as_ids=tokens_as_ids if body.return_tokens_as_token_ids is None else body.return_tokens_as_token_ids,
        token_ids=bool(body.return_token_ids),
        salt=salt,
        priority=body.priority or 0,
        tool_use=tool_use,
        reasoning=reasoning,
        discard=parse_ranges(body.kv_discard or ()),
    )
