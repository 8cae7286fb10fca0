"""A model's directory: finds or downloads it, reads its configuration, and checks its weights before a model is
built.
"""

from __future__ import annotations

import json
import os
import re
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from lamina.config.engine_config import ONLINE, ModelOptions

from . import config_overrides, quantization
from .errors import ModelError, UnsupportedModelError
from .model_files import READ, check_counts, check_files, one_line, own_class_text, read_json
from .quantization import gguf_file

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_TIMEOUT_S = 20.0
_ADAPTER = "adapter_config.json"
_EXPORT = "hf_quant_config.json"  # of modelopt
QUANTIZED = "quantized"
_FLOAT_BITS = {"F64": 64, "F32": 32, "BF16": 16, "F16": 16}  # by the format's names


class FileStamp(NamedTuple):
    """The identity of a file, and the time of its last change in ns."""

    path: str
    device: int
    inode: int
    size: int
    changed_ns: int


class StoredWeight(NamedTuple):
    """A tensor by the header of a safetensors file, or a weight for which several tensors stand (``quantized``).
    ``dtype``: by the format's name, such as BF16; QUANTIZED for several tensors.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    quantized: quantization.QuantizedTensor | None = None


def find_checkpoint(source: str | os.PathLike[str], *, trust_remote_code: bool = False, weights: bool = True) -> Path:
    """Return the directory of a model: ``source`` itself, or the place in the hub's cache, after a download if needed.
    A GGUF file stands for such a directory in all functions here. Raises ModelError, also for files that may not be
    read: see ``check_files``.
    """
    directory = _find(source, trust_remote_code, weights)
    if gguf_file.is_gguf(directory):
        gguf_file.check_file(directory)
        return directory
    check_files(directory, trust_remote_code=trust_remote_code)
    return directory


def _find(source: str | os.PathLike[str], trust_remote_code: bool, weights: bool) -> Path:
    name = os.fspath(source)
    if not name:
        raise ModelError("model is empty: give a directory or a hub id")
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        if gguf_file.is_gguf(path):
            return path
        raise ModelError(f"{name} is a file: give the directory that holds its config.json")
    if not _HUB_ID.fullmatch(name):
        kind = "GGUF file" if name.lower().endswith(".gguf") else "model directory"
        raise ModelError(f"no such {kind}: {name}")
    patterns = [p for p in READ if weights or p != "*.safetensors"] + (["*.py"] if trust_remote_code else [])
    return _download(name, patterns)


def check_source(source: str) -> None:
    """Check, before anything is started, that a model's directory exists or that the hub or its cache has the model.
    Raises ModelError.
    """
    if not Path(source).expanduser().exists() and _HUB_ID.fullmatch(source):
        from huggingface_hub import try_to_load_from_cache

        if not isinstance(try_to_load_from_cache(source, "config.json"), str):
            _download(source, ["config.json"])


def peek_config(source: str | os.PathLike[str], options: ModelOptions) -> dict[str, Any]:
    """Return the content of a model directory's config.json, with the entries of --hf-overrides; empty for a hub id,
    whose file may not be here yet. It reports faults of a directory before any import or start, and a --quantization
    that it does not have. Raises ModelError.
    """
    if not Path(source).expanduser().exists() and _HUB_ID.fullmatch(os.fspath(source)):
        return {}
    directory = find_checkpoint(source, trust_remote_code=options.trust_remote_code)
    raw = _raw_config(directory, options.hf_overrides, options.trust_remote_code)
    check_quantization(directory, options.quantization)
    return raw


def read_config(directory: Path, *, trust_remote_code: bool = False, hf_overrides: str = "") -> Any:
    """Return the configuration in a model directory, of a causal LM that transformers supports. ``hf_overrides``: a
    JSON object as text, whose entries replace those of config.json. Raises ModelError.
    """
    if gguf_file.is_gguf(directory):
        from .quantization import gguf_weights

        if hf_overrides:
            raise ModelError(
                f"--hf-overrides replaces entries of a config.json, and {directory} has none: leave it out"
            )
        return gguf_weights.read_config(directory)
    raw = _raw_config(directory, hf_overrides, trust_remote_code)
    from transformers import AutoConfig

    _check_architecture(directory, raw)
    try:
        if hf_overrides:
            config = config_overrides.read_overridden(directory, raw, trust_remote_code=trust_remote_code)
        else:
            config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code, local_files_only=True)
        parts = (getattr(config, name, None) for name in config.sub_configs)
        for part in (config, *(part for part in parts if part is not None)):
            vars(part).pop("quantization_config", None)  # Lamina reads the weights itself
        if not trust_remote_code:  # Lamina chooses: another choice may load a kernel
            config._attn_implementation = config._experts_implementation = None
            vars(config).pop("auto_map", None)  # transformers' own class is used
    except Exception as error:  # any class, as architectures have their own checks
        with_them = " with --hf-overrides" if hf_overrides else ""
        own = own_class_text(raw) if "auto_map" in raw else ""
        raise ModelError(
            f"{directory}/config.json{with_them} is not a valid configuration: {one_line(error)}{own}"
        ) from error
    if hf_overrides:
        config_overrides.check_known(directory, read_json(directory / "config.json", ""), hf_overrides, config)
    return config


def _raw_config(directory: Path, hf_overrides: str = "", trust_remote_code: bool = False) -> dict[str, Any]:
    if gguf_file.is_gguf(directory):
        return {}  # reading it takes imports
    if not (directory / "config.json").exists():
        raise ModelError(_other_kind(directory) or f"{directory} is no model directory: it has no config.json")
    raw = read_json(directory / "config.json", "")
    raw = config_overrides.overridden(directory, raw, hf_overrides, trust_remote_code=trust_remote_code)
    stored_format(directory, raw)
    check_counts(f"{directory}/config.json", raw)
    if raw.get("is_encoder_decoder"):
        raise UnsupportedModelError(f"{directory} is an encoder-decoder: only decoder-only models can be served")
    return raw


def check_weights(directory: Path) -> None:
    """Raise ModelError unless the directory has complete safetensors files."""
    from safetensors import SafetensorError, safe_open

    if gguf_file.is_gguf(directory):
        stored_weights(directory)
        return
    if (directory / _ADAPTER).exists():  # transformers would load what it names, too
        raise ModelError(_other_kind(directory))
    files = weight_files(directory)
    if not files:
        others = sorted(p.name for p in directory.glob("*.safetensors"))
        left_out = f"; no model.safetensors.index.json names {others[0]}" if others else ""
        raise ModelError(_other_kind(directory) or f"{directory} has no weights: no model.safetensors{left_out}")
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file} is missing: {file.parent.name} is incomplete, fetch it again")
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} is truncated or corrupt, fetch it again: {one_line(error)}") from error


def _other_kind(directory: Path) -> str:
    """Return a message on a directory that is not a model's: what it is, and how to make a model of it. "": unknown."""
    if (directory / _ADAPTER).exists():
        base = read_json(directory / _ADAPTER, "").get("base_model_name_or_path") or "another model"
        return (
            f"{directory} is a LoRA adapter of {base}, not a model: merge the two once with peft, by "
            f"PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(...)"
        )
    if gguf := sorted(directory.glob("*.gguf"), key=lambda path: ("mmproj" in path.name.lower(), path)):
        lacks = "model.safetensors" if (directory / "config.json").exists() else "config.json"
        return f"{directory} has no {lacks}: give its GGUF file, as {gguf[0]}"
    if pickled := sorted(p.name for ext in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in directory.glob(ext)):
        return (
            f"{directory} has pickled weights ({pickled[0]}), which can run code and are refused: where you trust "
            f"them, convert them once with AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    return ""


def is_quantized(directory: Path) -> bool:
    """Return whether weights are stored in a format that Lamina reads itself. Raises ModelError."""
    return gguf_file.is_gguf(directory) or stored_format(directory) is not None


def stored_format(directory: Path, raw: dict[str, Any] | None = None) -> quantization.StoredFormat | None:
    """Return the format of quantised weights, by ``raw``, the content of config.json; None if weights are plain. Raises
    ModelError.
    """
    if gguf_file.is_gguf(directory):
        return None
    settings = _quantization_settings(directory, raw)
    return quantization.open_format(str(directory), settings) if settings else None


def check_quantization(directory: Path, asked: str, compute: str = "auto") -> None:
    """Raise ModelError unless ``asked``, the value of --quantization, and ``compute``, that of --quantization-compute,
    suit the stored weights.
    """
    is_asked = asked or compute == "int8"
    settings = None if gguf_file.is_gguf(directory) or not is_asked else _quantization_settings(directory)
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    method = "gguf" if gguf_file.is_gguf(directory) else str(method) if settings else ""
    quantization.check_agrees(str(directory), method, asked, compute)


def _quantization_settings(directory: Path, raw: dict[str, Any] | None = None) -> Any:
    if raw is None:
        raw = read_json(directory / "config.json", "")
    text = raw.get("text_config")
    settings = raw.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    if not settings and (directory / _EXPORT).exists():
        said = read_json(directory / _EXPORT, "").get("quantization")
        settings = {**(said if isinstance(said, dict) else {}), "quant_method": "modelopt"}
    return settings


def stored_weights(directory: Path) -> list[StoredWeight]:
    """Return all weights of files that ``check_weights`` accepted, from their headers. Tensors of quantised weights are
    replaced by the weights for which they stand. Raises ModelError if these do not fit together.
    """
    if gguf_file.is_gguf(directory):
        from .quantization import gguf_weights  # not above: processes that only tokenize start without torch

        return [StoredWeight(each.name, QUANTIZED, each.shape, each) for each in gguf_weights.stored_weights(directory)]
    tensors = stored_tensors(directory)
    if not (directory / "config.json").exists() or (layout := stored_format(directory)) is None:
        return list(tensors.values())
    quantized = [StoredWeight(each.name, QUANTIZED, each.shape, each) for each in layout.find(tensors)]
    if not quantized:
        raise ModelError(f"{directory}/config.json says that weights are quantised, and none is: fetch the model again")
    taken = {part for weight in quantized if weight.quantized for part in weight.quantized.parts}
    plain = [w for w in tensors.values() if w.name not in taken and not _is_cache_scale(w.name)]
    return [*plain, *quantized]


def stored_tensors(directory: Path) -> dict[str, StoredWeight]:
    """Return all tensors of files that ``check_weights`` accepted, by name; reads only their headers."""
    tensors: dict[str, StoredWeight] = {}
    for path in weight_files(directory):
        with open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__":
                tensors[name] = StoredWeight(name, entry["dtype"], tuple(entry["shape"]))
    return tensors


def holds_zeros(directory: Path, name: str) -> bool:
    """Return whether the tensor ``name`` of safetensors files, which it reads, holds zeros alone."""
    from safetensors import safe_open

    for path in [] if gguf_file.is_gguf(directory) else weight_files(directory):
        with safe_open(path, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118 - it is no dict
                return not bool(file.get_tensor(name).any())
    return False


def _is_cache_scale(name: str) -> bool:
    return name.rpartition(".")[2] in quantization.CACHE_SCALES


def check_room(directory: Path, copies: int, free: int, quantization: str = "") -> None:
    """Raise ModelError unless ``free`` bytes hold ``copies`` copies of the weights. Matrices that ``quantization``
    rounds count without their scales.
    """
    weights = sum(file.stat().st_size for file in weight_files(directory))
    if quantization in ONLINE:
        bits = int(quantization.removeprefix("int"))
        matrices = (w for w in stored_weights(directory) if len(w.shape) == 2 and w.dtype in _FLOAT_BITS)
        weights -= sum(prod(w.shape) * (_FLOAT_BITS[w.dtype] - bits) // 8 for w in matrices)
    if weights * copies > free:
        raise ModelError(
            f"{copies} x {weights / 1e9:.1f} GB of weights do not fit in the {free / 1e9:.1f} GB of memory that are "
            f"free: --pipeline N takes N - 1 copies, --prefill-workers one each"
        )


def _check_architecture(directory: Path, raw: dict[str, Any]) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )

    kind = raw.get("model_type")
    if "auto_map" in raw:
        return
    if not isinstance(kind, str):
        raise ModelError(f"{directory}/config.json names no model_type")
    if kind not in CONFIG_MAPPING_NAMES:
        raise UnsupportedModelError(f"{directory}: transformers has no architecture {kind!r}{own_class_text(raw)}")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES:
        raise UnsupportedModelError(f"{directory}: {kind!r} is not a causal language model")


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint that transformers reads, even if they are missing, or its GGUF file.
    Others in the directory do not count. Raises ModelError.
    """
    if gguf_file.is_gguf(directory):
        return gguf_file.parts_of(directory)
    whole = directory / "model.safetensors"
    index = directory / "model.safetensors.index.json"
    if whole.exists():
        return [whole]
    if index.exists():
        shards = read_json(index, "").get("weight_map", {})
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise ModelError(f"{index} has no weight_map from weights to files: fetch it again")
        if outside := [name for name in shards.values() if ".." in Path(name).parts or Path(name).is_absolute()]:
            raise ModelError(f"{index} names {outside[0]}, outside of the model's directory: fetch it again")
        return sorted({directory / name for name in shards.values()})
    return []


def file_stamps(directory: Path) -> tuple[FileStamp, ...]:
    """Return stamps of the files of weights as they are now; each write to a file changes its stamp. Raises OSError."""
    stats = [(file, file.stat()) for file in weight_files(directory)]
    return tuple(FileStamp(str(file.resolve()), s.st_dev, s.st_ino, s.st_size, s.st_ctime_ns) for file, s in stats)


def _download(name: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(name, allow_patterns=patterns, etag_timeout=_HUB_TIMEOUT_S))
    except GatedRepoError as error:
        raise ModelError(
            f"{name} is gated on the hub: accept its terms there and log in with `hf auth login`"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelError(f"{name} is neither a directory here nor a model on the hub") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelError(
            f"{name} is not a directory here, and the hub cannot be reached: give a model directory, or fetch it into "
            f"the hub's cache while online"
        ) from error
