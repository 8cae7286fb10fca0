"""The chat template: read from the operator's file, if given, and the variables that requests may set in it."""

from __future__ import annotations

import re
from pathlib import Path

# Variables that Hugging Face fills itself, and words that its function would take as other arguments.
RESERVED = frozenset(
    {"messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "padding",
     "truncation", "continue_final_message", "tokenize", "max_length", "return_tensors", "return_dict",
     "tokenizer_kwargs", "return_assistant_tokens_mask", "sanitize_control_tokens"}
)  # fmt: skip
_GIVEN = RESERVED | {"raise_exception", "strftime_now", "bos_token", "eos_token", "pad_token", "unk_token"}
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # Hugging Face's own tag, which marks a part


def read_template(path: str) -> str:
    """Return the chat template in a file. Raises ValueError that names the flag."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "not UTF-8"
        raise ValueError(f"--chat-template {path}: {reason}") from e
    variables_of(text, path)
    return text


def variables_of(template: str, path: str = "of the model") -> frozenset[str]:
    """Return the variables of a template that only a request can fill. Raises ValueError."""
    import jinja2
    from jinja2 import meta

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        parsed = environment.parse(_GENERATION.sub("", template))
    except jinja2.TemplateSyntaxError as e:
        raise ValueError(f"--chat-template {path}: line {e.lineno}: {e.message}") from e
    return frozenset(meta.find_undeclared_variables(parsed)) - _GIVEN
