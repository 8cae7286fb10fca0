"""The field ``generation_config``, in which `transformers chat` sends a GenerationConfig as JSON within the JSON."""

from __future__ import annotations

from typing import Any

import msgspec

from lamina.server.errors import ApiError

from .json_decoding import MAX_FIELD
from .unsupported_fields import UNSUPPORTED, check_neutral

NAME = "generation_config"
_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "stop_strings": "stop"}
_SAME = frozenset({"temperature", "top_k", "top_p", "min_p", "repetition_penalty"})
# Fields about the origin, or that repeat the server's own values for the model.
_QUIET = frozenset(
    {"transformers_version", "_from_model_config", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache"}
)


def fields_of(value: Any) -> dict[str, Any]:
    """Return the request fields that it stands for. Raises ApiError if it sets something that is not supported."""
    try:
        config = msgspec.json.decode(value) if isinstance(value, str) and len(value) <= MAX_FIELD else value
    except (msgspec.DecodeError, RecursionError) as e:
        raise ApiError(400, f"{NAME} is not JSON: {e}", param=NAME, code="invalid_value") from e
    if not isinstance(config, dict):
        raise ApiError(400, f"{NAME} must be an object, or JSON of one", param=NAME, code="invalid_value")
    fields: dict[str, Any] = {_RENAMED.get(str(k), str(k)): v for k, v in config.items() if k in _RENAMED or k in _SAME}
    if config.get("do_sample") is False:
        fields["temperature"] = 0.0
    for name, asked in config.items():
        if name not in _RENAMED and name not in _SAME and name not in _QUIET and name != "do_sample":
            check_neutral(f"{NAME}.{name[:64]}", asked, UNSUPPORTED.get(name, ()))
    return fields
