"""GGUF files: a configuration, a tokenizer and blocks of weights in one file. No other file of its folder is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .errors import ModelError, UnsupportedModelError
from .model_files import one_line

SUFFIX, MAGIC = ".gguf", b"GGUF"


def is_gguf(path: Path) -> bool:
    """Return whether a path names a GGUF file, by its suffix."""
    return path.suffix == SUFFIX and not path.is_dir()


def check_file(path: Path) -> None:
    """Raise ModelError unless the file begins as GGUF files do. Imports nothing."""
    try:
        with open(path, "rb") as file:
            head = file.read(len(MAGIC))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {one_line(error)}") from error
    if head != MAGIC:
        raise ModelError(f"{path} is no GGUF file: it does not begin with {MAGIC.decode()}")
    if "-of-" in path.stem:
        raise UnsupportedModelError(f"{path} is a part of a GGUF file: join the parts with llama-gguf-split --merge")


def load_tokenizer(path: Path) -> Any:
    """Return the tokenizer in a file. Raises ModelError."""
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    check_file(path)
    try:
        architecture, vocabulary, settings = get_gguf_tokenizer(str(path))
        tokenizer, more = convert_gguf_tokenizer(architecture, vocabulary)
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{**settings, **more})
    except Exception as error:  # any class: the file is not trusted
        raise ModelError(f"the tokenizer in {path} cannot be loaded: {one_line(error)}") from error
