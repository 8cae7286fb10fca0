"""The allow-list of what may be read in a model's directory, which is not trusted.

transformers follows keys of a model's files to Python code, kernels and models of a hub, and other files. Each such key
is refused by name, and so are links out of the directory, devices, and texts too large or too deeply nested to read.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import ModelError

READ = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken")  # patterns of all files that are read
CONFIGS = (
    "config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "model.safetensors.index.json",
)  # fmt: skip
_FOLDERS = ("", "additional_chat_templates")
MAX_CONFIG = 64 << 20  # bytes; the index of a model of 10^12 parameters has 20 MB
MAX_VOCABULARY = 512 << 20
MAX_DEPTH = 64
_COUNT = re.compile(r".*(layers?|experts|blocks|depth)")  # of modules that are made one by one
_MAX_COUNT = 10_000
_LONGEST_CAUSE = 240  # characters
_CODE, _HUB, _FILE = "its own code", "a model or kernels of a hub", "another file"
_KEYS = {
    "auto_map": _CODE, "custom_generate": _CODE, "custom_pipelines": _CODE,
    "kernel_config": _HUB, "use_kernels": _HUB, "use_pretrained_backbone": _HUB,
    "fusion_config": "other layers", "configuration_files": _FILE, "fast_tokenizer_files": _FILE,
    "transformers_weights": _FILE, "gguf_file": _FILE, "mecab_kwargs": _FILE, "sudachi_kwargs": _FILE,
    "jumanpp_kwargs": _FILE,
}  # fmt: skip
# Names of kernels: plain ones are harmless, since Lamina chooses by itself.
_CHOICES = re.compile(r"_?(attn|experts)_implementation(_internal)?")
_CHOICE = re.compile(r"[\w|]*")


def check_files(directory: Path, *, trust_remote_code: bool = False) -> None:
    """Raise ModelError, which names file and key, for what may not be read in a model's directory.
    ``trust_remote_code``: keys and links may name code, a hub and other files.
    """
    inside = _inside(directory)
    for file in sorted(path for folder in _FOLDERS for pattern in READ for path in (directory / folder).glob(pattern)):
        if not os.path.exists(file):  # unlike Path.exists, it raises nothing for a path that this user may not follow
            continue
        if not stat.S_ISREG((state := file.stat()).st_mode):
            raise ModelError(f"{file} is not a regular file: put a copy of its content there")
        target = os.path.realpath(file)
        # Weights are data alone, and operators link them: their format is checked before they are mapped.
        if not (trust_remote_code or file.suffix == ".safetensors" or _is_in(target, inside)):
            raise ModelError(
                f"{file} is a link to {target}, outside of the model's directory: put a copy there, or pass "
                f"--trust-remote-code"
            )
        if file.suffix != ".safetensors" and state.st_size > (most := _most_bytes(file)):
            raise ModelError(f"{file} has {state.st_size} bytes: at most {most} are read")
    for name in CONFIGS:
        if (directory / name).exists():
            value = read_json(directory / name, "")
            if not trust_remote_code:
                _check_keys(directory, name, value, inside)


def check_keys(directory: Path, flag: str, value: dict[str, Any], *, trust_remote_code: bool) -> None:
    """Raise ModelError for entries of ``flag``, which replace entries of config.json, that the file may not have."""
    if max((len(path) for path, _ in entries(value)), default=0) > MAX_DEPTH:
        raise ModelError(f"{flag} is nested too deeply: at most {MAX_DEPTH} levels are read")
    for path, inner in () if trust_remote_code else entries(value):
        if inner and (names := _named(directory, "config.json", path[-1], inner, _inside(directory))):
            raise ModelError(
                f"{flag} names {names} ({'.'.join(path)}), which is not used by default: pass --trust-remote-code if "
                f"you trust it, or leave it out"
            )


def _inside(directory: Path) -> list[str]:
    """Return the folders that a model's files may be in."""
    place = Path(os.path.realpath(directory))
    inside = [str(place)]
    if place.parent.name == "snapshots":  # the hub's cache: its files are links into this folder
        inside.append(os.path.realpath(place.parent.parent / "blobs"))
    return inside


def read_json(file: Path, absent: str) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ModelError, with the text ``absent`` if there is no file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        deepest = max((len(path) for path, _ in entries(value)), default=0)
    except FileNotFoundError as error:
        raise ModelError(absent) from error
    except RecursionError:
        deepest = MAX_DEPTH + 1
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {one_line(error)}") from error
    if deepest > MAX_DEPTH:
        raise ModelError(f"{file} is nested too deeply: at most {MAX_DEPTH} levels are read")
    if not isinstance(value, dict):
        raise ModelError(f"{file} is not a JSON object")
    return value


def one_line(error: BaseException) -> str:
    """Return the text of another library's exception, for the end of a one-line message."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST_CAUSE else f"{text[:_LONGEST_CAUSE]}..."


def entries(value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the values within a JSON value, each with the keys that lead to it; a list counts as a level."""
    rest: list[tuple[tuple[str, ...], Any]] = [((), value)]
    while rest:
        path, value = rest.pop()
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, inner in items:
            entry = ((*path, str(key)), inner)
            yield entry
            if isinstance(inner, dict | list) and len(entry[0]) <= MAX_DEPTH:
                rest.append(entry)


def check_counts(where: str, config: dict[str, Any]) -> None:
    """Raise ModelError if the configuration of ``where`` has more modules than are made."""
    for path, value in entries(config):
        if _COUNT.fullmatch(path[-1]) and type(value) is int and value > _MAX_COUNT:
            raise ModelError(f"{where} has {'.'.join(path)} {value}: at most {_MAX_COUNT} are made")


def _check_keys(directory: Path, name: str, value: dict[str, Any], inside: list[str]) -> None:
    for path, inner in entries(value):
        if path == ("auto_map",) and _is_native(name, value):
            continue
        if inner and (names := _named(directory, name, path[-1], inner, inside)):
            own = own_class_text(value) if path == ("auto_map",) and name == "config.json" else ""
            raise ModelError(
                f"{directory} names {names} ({'.'.join(path)} in {name}), which is not used by default: pass "
                f"--trust-remote-code if you trust it, or remove the key{own}"
            )


def _is_native(name: str, config: dict[str, Any]) -> bool:
    """Return True if transformers has the architecture or tokenizer class that a configuration names. Then the code in
    the directory is not needed, such as that of Phi-3.
    """
    if name == "tokenizer_config.json":
        from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

        own = config.get("tokenizer_class")
        return isinstance(own, str) and tokenizer_class_from_name(own) is not None
    if name != "config.json":
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = config.get("model_type")
    return isinstance(kind, str) and config.get("architectures") == [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)]


def own_class_text(config: dict[str, Any]) -> str:
    """Return text on how to use the class of transformers that a configuration of another type names; "" if there is
    none. Whether the two compute the same is for the user to know.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    classes = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    names = config.get("architectures")
    own = (
        next((name for name in names if isinstance(name, str) and name in classes), "")
        if isinstance(names, list)
        else ""
    )
    if not own:
        return ""
    kind = getattr(transformers, own).config_class.model_type  # other types may share the class
    if kind == config.get("model_type"):
        return ""
    override = json.dumps({"model_type": kind})
    return f"; transformers has {own} itself: --hf-overrides '{override}' uses that, if it is the same"


def _named(directory: Path, name: str, key: str, value: Any, inside: list[str]) -> str:
    """Return text on what an entry names that may not be read; "" = nothing."""
    if key in _KEYS:
        return _KEYS[key]
    if _CHOICES.fullmatch(key):
        choices = value.values() if isinstance(value, dict) else [value]
        return "" if all(c is None or (isinstance(c, str) and _CHOICE.fullmatch(c)) for c in choices) else _HUB
    if name == "config.json" and key == "backbone" and isinstance(value, str) and "/" in value:
        return _HUB
    if name == "special_tokens_map.json" and key.endswith("_file"):
        return _FILE
    if name == "tokenizer_config.json" and key.endswith("_file") and key != "special_tokens_map_file":
        # Old versions of transformers have stored paths of their own hosts, which are nowhere here.
        other = directory / str(value)
        return _FILE if os.path.exists(other) and not _is_in(os.path.realpath(other), inside) else ""
    return ""


def _is_in(path: str, folders: list[str]) -> bool:
    return any(os.path.commonpath([path, folder]) == folder for folder in folders)


def _most_bytes(file: Path) -> int:
    return MAX_CONFIG if file.name in CONFIGS or file.suffix == ".jinja" else MAX_VOCABULARY
