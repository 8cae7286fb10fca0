"""The facts of a reply that are known before it begins: its id, its kind, and the request."""

from __future__ import annotations

import secrets
import time
from typing import Any, Literal

from lamina import __version__
from lamina.request import SamplingParams
from lamina.scheduler.sessions.token_ranges import parse_ranges
from lamina.server.journal.journal_records import AcceptedRecord
from lamina.server.request.openai_protocol import Sampling

FINGERPRINT = f"lamina-{__version__}"


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
        discard=parse_ranges(body.kv_discard or ()),
    )


def usage_of(prompt: int, completion: int, cached: int, *, details_always: bool = False) -> dict[str, Any]:
    """Return token counts in OpenAI's format. ``cached``: prompt tokens whose KV was cached; a count of 0 is left out
    without ``details_always``.
    """
    details = {"prompt_tokens_details": {"cached_tokens": cached}} if cached or details_always else {}
    total = prompt + completion
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total, **details}


def head_of(record: AcceptedRecord) -> dict[str, Any]:
    """Return the fields that begin the reply and each of its chunks; the caller fills in ``object``."""
    return {
        "id": record.id,
        "object": "",
        "created": record.created,
        "model": record.model,
        "system_fingerprint": FINGERPRINT,
    }
