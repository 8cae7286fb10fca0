"""Fields that change what a client gets and that this server does not have are refused; others are ignored, and said
so once.
"""

from __future__ import annotations

import logging
from typing import Any

from pydantic import BaseModel

from .errors import ApiError

# field -> the values that ask for nothing; null always does
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "verbosity": ("medium",),
}
# Fields without an effect on the tokens.
QUIET = frozenset({"store", "metadata", "service_tier", "parallel_tool_calls", "prompt_cache_key", "safety_identifier"})
MOST_NAMES = 1000  # remembered, so that nobody fills the memory with names
logger = logging.getLogger(__name__)


class UnknownFields:
    """Remembers which unknown fields have been logged."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def check(self, request: BaseModel) -> None:
        """Raises ApiError for a field that is not supported; logs the name of an unknown one, the first time."""
        for name, value in (request.model_extra or {}).items():
            if name in UNSUPPORTED:
                if value is not None and value not in UNSUPPORTED[name]:
                    raise ApiError(400, f"{name} is not supported by this server", param=name, code="unsupported_value")
            elif name not in QUIET and name not in self._seen and len(self._seen) < MOST_NAMES:
                self._seen.add(name)
                logger.info("ignoring the unknown field %r; said once", name[:64])
