"""The sampling defaults in a model's own files reach requests that set none, by the rule of vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig

from lamina.models.errors import ModelError
from lamina.models.generation_defaults import default_sampling_params

SAYS = {
    "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1, "max_new_tokens": 7,
    "do_sample": True, "eos_token_id": 1, "transformers_version": "5", "no_repeat_ngram_size": 3,
}  # fmt: skip
FIELDS = {
    "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1, "max_tokens": 7,
}  # fmt: skip


def model_dir(path: Path, says: Any = None) -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    if says is not None:
        (path / "generation_config.json").write_text(says if isinstance(says, str) else json.dumps(says))
    return str(path)


def test_its_own_file_a_folder_or_none(tmp_path: Path) -> None:
    model, silent = model_dir(tmp_path / "a", SAYS), model_dir(tmp_path / "b")
    assert default_sampling_params(model) == FIELDS
    assert default_sampling_params(silent) == {}
    assert default_sampling_params(model, "none") == {}
    assert default_sampling_params(silent, model) == FIELDS
    assert default_sampling_params(model_dir(tmp_path / "c", {"temperature": None, "top_k": 5})) == {"top_k": 5}


def test_a_module_has_a_configuration_of_its_own() -> None:
    module: Any = SimpleNamespace(generation_config=GenerationConfig(temperature=0.6, max_new_tokens=5))
    assert default_sampling_params(module) == {"temperature": 0.6, "max_tokens": 5}
    assert default_sampling_params(SimpleNamespace()) == {}


def test_files_that_say_nothing_useful_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"generation_config.json: top_p must lie in \(0, 1\], not 1.5; correct it"):
        default_sampling_params(model_dir(tmp_path / "a", {"top_p": 1.5}))
    with pytest.raises(ModelError, match=r"generation_config.json cannot be read"):
        default_sampling_params(model_dir(tmp_path / "b", "{"))
    with pytest.raises(ValueError, match=r"nowhere has no generation_config.json: give a directory that has one"):
        default_sampling_params(model_dir(tmp_path / "c"), f"{tmp_path}/nowhere")
