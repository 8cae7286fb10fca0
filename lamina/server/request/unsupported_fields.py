"""The fields that a request may have. An unknown field is refused, with the nearest known name. A known field that is
not supported is refused unless its value requests nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from lamina.server.errors import ApiError

# Field -> the values that request nothing; null always does. Used if an endpoint does not have the field itself.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": ("",),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "guided_decoding_backend": ("",),
    "guided_whitespace_pattern": ("",),
    "regex": ("",),
    "json_schema": ("",),
    "ebnf": ("",),
    "grammar": ("",),
    "chat_template": (),
    "documents": ([],),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "moderation": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "num_beams": (1,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "do_sample": (True,),
    "typical_p": (1,),
    "top_a": (0,),
    "tfs": (1,),
    "no_repeat_ngram_size": (0,),
    "prompt_embeds": (),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "watermarking": (False,),
    "repetition_detection": (),
    "stream_interval": (1,),
    "return_token_offsets": (False,),
    "return_prompt_text": (False,),
    "return_mm_kwargs": (True,),
    "mm_payload": ("tensors",),
    "ec_transfer_params": ({},),
    "routed_experts_prompt_start": (0,),
    "spaces_between_special_tokens": (True,),
    "return_token_strs": (False,),
    "return_hidden_states": (False,),
    "lora_path": ("",),
    "verbosity": ("medium",),
    # of one endpoint, in a request to another
    "priority": (0,),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "top_logprobs": (0,),
    "max_completion_tokens": (),
    "chat_template_kwargs": ({},),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "thinking_token_budget": (),
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "request_id": ("",),
    "kv_transfer_params": ({},),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "vllm_xargs": ({},),
}
# Fields for a client's own bookkeeping, without an effect on a reply.
IGNORED = frozenset({"metadata", "safety_identifier"})
# The same for nested objects.
STREAM_OPTIONS: dict[str, tuple[Any, ...]] = {"include_obfuscation": (False,)}
MESSAGE: dict[str, tuple[Any, ...]] = {
    "function_call": (),
    "refusal": ("",),
    "audio": (),
    "annotations": ([],),
    "thinking_blocks": ([],),
    "provider_specific_fields": ({},),
}
PART: dict[str, tuple[Any, ...]] = {"annotations": ([],), "cache_control": ({"type": "ephemeral"},)}
# Words of vLLM, llama.cpp, TGI and Ollama for fields that requests have here.
WORDS = {
    **dict.fromkeys(("max_new_tokens", "n_predict", "num_predict", "max_length", "max_gen_len"), "max_tokens"),
    "min_new_tokens": "min_tokens",
    **dict.fromkeys(("repeat_penalty", "rep_pen"), "repetition_penalty"),
    **dict.fromkeys(("stop_sequences", "stop_strings"), "stop"),
    **dict.fromkeys(("inputs", "input", "text"), "prompt"),
    "conversation": "messages",
    "random_seed": "seed",
    **dict.fromkeys(("n_probs", "decoder_input_details"), "logprobs"),
    "top_n_tokens": "top_logprobs",
    "truncate": "truncate_prompt_tokens",
    "return_full_text": "echo",
    "enable_thinking": "chat_template_kwargs",
    "content": "tokens",
    "num_beams": "n",
}
_INSTEAD = {
    f"guided_{key}": f'"structured_outputs": {{"{key}": ...}}' for key in ("json", "regex", "choice", "grammar")
}
_TOGETHER = {"tools": "tool_choice", "functions": "function_call"}  # a field -> one that means nothing without it
MAX_LOGGED_NAMES = 1000  # names remembered, so that clients cannot fill the memory with them
logger = logging.getLogger(__name__)


class UnknownFields:
    """Checks fields. If unknown ones are allowed, it remembers which of them have been logged."""

    def __init__(self, *, allowed: bool = False) -> None:
        self._allowed = allowed
        self._seen: set[str] = set()

    def check_name(self, name: str, known: Collection[str], where: str = "") -> None:
        """Raises ApiError for a field that is in no table. ``known``: fields of the same object; ``where``: such as
        "messages.".
        """
        full = f"{where}{name[:64]}"
        if self._allowed:
            if full not in self._seen and len(self._seen) < MAX_LOGGED_NAMES:
                self._seen.add(full)
                logger.info("ignoring the unknown field %r; logged once", full)
            return
        text = f"unknown field {full!r}: leave it out; a server with --allow-unknown-fields ignores it"
        if near := _nearest(name[:64], known):
            text = text.replace("leave", f"did you mean {where}{near}? Correct it or leave", 1)
        raise ApiError(400, text, param=full, code="unknown_field")

    def check_inner(
        self, given: Mapping[str, Any], known: Collection[str], neutral: Mapping[str, tuple[Any, ...]], where: str
    ) -> None:
        """Check the fields of an object within the body. Raises ApiError."""
        for name, value in given.items():
            if name in neutral:
                check_neutral(f"{where}{name}", value, neutral[name])
            elif name not in known:
                self.check_name(name, known, where)


def _nearest(name: str, known: Collection[str]) -> str | None:
    """Return the known field that has another server's name, or perhaps a mistake in its name."""
    if (word := WORDS.get(name)) is not None:
        return word if word in known else None
    return next(iter(get_close_matches(name, known, n=1, cutoff=0.75)), None)


def check_neutral(name: str, value: Any, neutral: tuple[Any, ...]) -> None:
    """Raises ApiError if an unsupported field requests something."""
    if value is not None and value not in neutral:
        hint = f", or send {json.dumps(neutral[0])}" if neutral and neutral[0] not in ("", [], {}) else ""
        hint = f", and {_TOGETHER[name]} with it" if name in _TOGETHER else hint
        text = f"{name} is not supported by this server: leave it out{hint}"
        if instead := _INSTEAD.get(name):  # older words of vLLM
            text = f"{name} is not supported by this server: send {instead}"
        raise ApiError(400, text, param=name, code="unsupported_value")
