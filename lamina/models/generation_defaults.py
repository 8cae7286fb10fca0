"""Sampling parameters of a model's own generation_config.json, for requests that do not set them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lamina.request import SamplingParams

from .checkpoint import find_checkpoint
from .errors import ModelError
from .model_files import read_json

FILE = "generation_config.json"
AUTO, NONE = "auto", "none"
# Names in generation_config.json -> fields of SamplingParams, as in vLLM, where do_sample is ignored, too.
_NAMES = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens",
}  # fmt: skip


def default_sampling_params(model: Any, source: str = AUTO, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """Return fields of SamplingParams by name. ``model``: a directory, a hub id, or a module, which has its own
    configuration. ``source``: "auto" for the model's own file if it has one, "none", or a directory with the file.
    Raises ValueError for a directory without the file, and for values that SamplingParams refuses.
    """
    if source == NONE:
        return {}
    if source != AUTO:
        where, values = f"{source}/{FILE}", _read(Path(source).expanduser())
        if values is None:
            raise ValueError(f"generation_config {source} has no {FILE}: give a directory that has one, auto or none")
    elif isinstance(model, str):
        directory = find_checkpoint(model, trust_remote_code=trust_remote_code, weights=False)
        where, values = f"{directory}/{FILE}", _read(directory) or {}
    else:
        where, config = "the model's generation_config", getattr(model, "generation_config", None)
        values = {} if config is None else config.to_dict()
    defaults = {ours: values[theirs] for theirs, ours in _NAMES.items() if values.get(theirs) is not None}
    try:
        SamplingParams(**defaults)
    except ValueError as e:
        raise ValueError(f"{where}: {e}; correct it, or give generation_config=none") from e
    return defaults


def _read(directory: Path) -> dict[str, Any] | None:
    try:
        return read_json(directory / FILE, FILE)
    except ModelError:
        if (directory / FILE).exists():
            raise
        return None
