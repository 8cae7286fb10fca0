"""Entries that replace those of a model's config.json, as --hf-overrides of vLLM has them.

An object replaces the entry of its name. In a nested configuration, such as text_config, single entries are replaced.
Overrides are no more trusted than the file: they pass the same checks.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from .errors import ModelError
from .model_files import check_keys

_NESTED = "_config"  # the end of the names of nested configurations
_OF_FILES = ("quantization_config", "compression_config")
_ROPE, _OLD_ROPE = "rope_parameters", "rope_scaling"
_KEPT_OF_ROPE = ("rope_theta", "partial_rotary_factor")  # which an override of the scaling need not repeat
_EXAMPLE = '{"rope_type": "linear", "factor": 2}'
_KNOWN = {"dtype", "torch_dtype", "architectures", "auto_map"}
_KNOWN_OF_TEXT = {_ROPE, _OLD_ROPE, *_KEPT_OF_ROPE}


def overridden(directory: Path, raw: dict[str, Any], overrides: str, *, trust_remote_code: bool) -> dict[str, Any]:
    """Return ``raw``, the content of config.json, with the entries of ``overrides``, a JSON object as text. Raises
    ModelError for entries that may not be read, as for those of the file.
    """
    if not overrides:
        return raw
    given = json.loads(overrides)
    check_keys(directory, "--hf-overrides", given, trust_remote_code=trust_remote_code)
    merged = _merged(raw, given)
    if not trust_remote_code or "model_type" in given:
        merged.pop("auto_map", None)  # transformers' own class is used
    return merged


def _merged(raw: dict[str, Any], given: dict[str, Any], where: str = "") -> dict[str, Any]:
    merged = dict(raw)
    for key, value in given.items():
        name = f"{where}{key}"
        if key in _OF_FILES:
            raise ModelError(f"--hf-overrides {name}: weights are read as their files have them: leave it out")
        old = raw.get(key)
        if key.endswith(_NESTED) and isinstance(value, dict):
            merged[key] = _merged(old if isinstance(old, dict) else {}, value, f"{name}.")
        elif key in (_ROPE, _OLD_ROPE):
            _replace_rope(merged, raw, value, f"--hf-overrides {name}")
        else:
            merged[key] = value
    for key in _KEPT_OF_ROPE:
        if key in given:
            _replace_in_rope(merged, given, key, f"--hf-overrides {where}{key}")
    return merged


def _replace_in_rope(merged: dict[str, Any], given: dict[str, Any], key: str, where: str) -> None:
    """Put an override into the parameters of rotary embeddings too: where these have ``key``, transformers reads no
    other entry.
    """
    for name in (_ROPE, _OLD_ROPE):
        rope, own = merged.get(name), given.get(_ROPE) or given.get(_OLD_ROPE) or {}
        if not isinstance(rope, dict) or not rope or key in own:
            continue
        if any(isinstance(each, dict) for each in rope.values()):
            raise ModelError(f"{where}: layers have several in {name}: give {name}, by types of layers")
        merged[name] = {**rope, key: given[key]}


def _replace_rope(merged: dict[str, Any], raw: dict[str, Any], value: Any, where: str) -> None:
    """Replace the parameters of rotary embeddings, under either of the names that they have."""
    if value is not None and not isinstance(value, dict):
        raise ModelError(f"{where} is {value!r}: it must be an object, such as {_EXAMPLE}")
    old = raw.get(_ROPE) or raw.get(_OLD_ROPE) or {}
    kept = {
        key: entry[key] for key in _KEPT_OF_ROPE for entry in (raw, old) if isinstance(entry, dict) and key in entry
    }
    for key in (_ROPE, _OLD_ROPE):
        merged.pop(key, None)
    if value and any(isinstance(each, dict) for each in value.values()):  # one set for each type of layer
        sets = old if isinstance(old, dict) else {}
        merged[_ROPE] = {key: _with(sets.get(key), each, kept) for key, each in {**sets, **value}.items()}
    else:
        merged[_ROPE] = {**kept, **(value or {"rope_type": "default"})}


def _with(old: Any, new: Any, kept: dict[str, Any]) -> Any:
    own = {key: old[key] for key in _KEPT_OF_ROPE if key in old} if isinstance(old, dict) else {}
    return {**kept, **own, **new} if isinstance(new, dict) else new


def read_overridden(directory: Path, merged: dict[str, Any], *, trust_remote_code: bool) -> Any:
    """Return the transformers configuration of ``merged``, which ``overridden`` made for ``directory``. Raises what
    transformers raises.
    """
    from transformers import AutoConfig

    if trust_remote_code and "auto_map" in merged:
        own = AutoConfig.from_pretrained(directory, trust_remote_code=True, local_files_only=True)
        config: Any = type(own).from_dict(merged)
    else:
        with tempfile.TemporaryDirectory(prefix="lamina-config-") as folder:
            (Path(folder) / "config.json").write_text(json.dumps(merged), encoding="utf-8")
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    config._name_or_path = str(directory)
    return config


def check_known(directory: Path, raw: dict[str, Any], overrides: str, config: Any) -> None:
    """Raise ModelError for an override that neither ``raw``, the content of config.json, nor a configuration of its
    class has: it would do nothing. ``config``: with the overrides.
    """
    for path, known, text in _entries(json.loads(overrides), raw, config):
        own = path[-1]
        if own not in known:
            inner = text if own in _KNOWN_OF_TEXT else ""
            near = [f"{inner}.{own}"] if inner else get_close_matches(own, sorted(known), n=1)
            hint = f"did you mean {near[0]}?" if near else "leave it out"
            raise ModelError(f"--hf-overrides {'.'.join(path)}: {directory}/config.json has no such entry; {hint}")


def _entries(
    given: dict[str, Any], raw: Any, config: Any, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], set[str], str]]:
    """Yield the path of each override, the entries that its owner knows, and the name of the owner's text part."""
    stored = raw if isinstance(raw, dict) else {}
    text = _text_part(stored, config)
    known = {*stored, *_KNOWN, *_defaults(config), *(getattr(config, "attribute_map", None) or {})}
    known |= set() if text else _KNOWN_OF_TEXT
    for key, value in given.items():
        yield (*path, key), known, text
        if key.endswith(_NESTED) and isinstance(value, dict):
            yield from _entries(value, stored.get(key), getattr(config, key, None), (*path, key))


def _text_part(stored: dict[str, Any], config: Any) -> str:
    """Return the name of the nested configuration in which ``stored`` has the text model's entries; "": it has none."""
    if not hasattr(config, "get_text_config") or (text := config.get_text_config(decoder=True)) is config:
        return ""
    return next((name for name in stored if getattr(config, name, None) is text), "")


def _defaults(config: Any) -> set[str]:
    """Return the entries that a configuration of this class has by itself."""
    if config is None:
        return set()
    with suppress(Exception):  # any class: some need arguments
        return set(vars(type(config)()))
    return set(vars(config))
