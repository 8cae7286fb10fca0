"""The planner's facts about a model: bytes and FLOPs of a step. From a capture, which is kept, or from sizes."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from lamina import __version__
from lamina.config.option import parse_size
from lamina.facts.hardware import entries
from lamina.netstack.cached_file import CachedFile, cache_directory

from .tables import DATA

_PAPER = "arXiv 2405.01814, table 3"
_SIZES = ("layers", "hidden", "heads", "group", "ffn", "itemsize")
_MAX_BYTES, _MAX_FILES = 1 << 20, 64  # of kept facts
_DENSE = 0.75  # a larger share of its weights that a row needs is all of them


class GemmGroup(msgspec.Struct, frozen=True):
    """``count`` equal products with weights: bytes of all weights of one, bytes of a weight, FLOPs of a row."""

    count: int
    weight_bytes: int
    itemsize: int
    flops_per_row: int

    def work(self, rows: float) -> tuple[float, float]:
        """Return the bytes of weights that some row needs, all of which are read, and FLOPs.

        With experts a row needs a share of the weights, and few rows need less than all. If each expert is equally
        likely, a part (1 - share) ** rows of the weights is needed by no row.
        """
        share = self.flops_per_row / 2 * self.itemsize / self.weight_bytes
        share = 1.0 if share > _DENSE else share  # packed weights have scales, too
        part = 1 - (1 - share) ** rows if share < 1 else min(1.0, rows * share)
        return self.count * self.weight_bytes * part, self.count * self.flops_per_row * rows


class AttentionGroup(msgspec.Struct, frozen=True):
    """``count`` layers with equal attention. Bytes of a token: as stored K and V, and of its messages. flops: of a
    query for a stored token; window: tokens that it attends, 0 = all.
    """

    count: int
    heads: int
    kv_heads: int
    kv_bytes: int
    q_bytes: int
    kv_message_bytes: int
    o_bytes: int
    flops: int
    window: int

    def copies(self, ranks: int) -> float:
        """Return the copies of K and V on so many ranks that attend: more than one if there are fewer KV heads than
        ranks.
        """
        return max(1.0, ranks / self.kv_heads)


class ModelFacts(msgspec.Struct, frozen=True):
    """The facts of a model. ``hidden_bytes``: a row of the residual stream. ``between``: share of the weights that are
    read between the sends of Q and of K, V. ``max_len``: tokens of a sequence, 0 = not stated. ``source``: origin of
    all facts.
    """

    name: str
    source: str
    weight_bytes: int
    hidden_bytes: int
    between: float
    products: list[GemmGroup]
    attentions: list[AttentionGroup]
    max_len: int = 0

    @property
    def num_layers(self) -> int:
        """Number of attention operators."""
        return sum(a.count for a in self.attentions)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of stored K and V of a token, in all layers."""
        return sum(a.count * a.kv_bytes for a in self.attentions)

    @property
    def windows(self) -> list[int]:
        """The windows of the model's layers, each once; 0 = no window."""
        return sorted({a.window for a in self.attentions})

    def kv_bytes(self, stored: Mapping[int, float]) -> float:
        """Return the bytes of sequences with so many stored tokens: window -> tokens that its layers keep."""
        return sum(a.count * a.kv_bytes * stored[a.window] for a in self.attentions)

    @property
    def message_bytes(self) -> int:
        """Bytes of the messages of a row, in all layers."""
        return sum(a.count * (a.q_bytes + a.kv_message_bytes + a.o_bytes) for a in self.attentions)


def model_facts(
    model: str,
    *,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    packed: bool = False,
    quantization: str = "",
) -> ModelFacts:
    """Return the facts of ``model``: a directory, a hub id or a configuration file; or one of the paper's names, if
    there is no such path. ``packed``: linear layers of a quantised checkpoint take their packed bytes, as on CPUs; else
    those of ``dtype``, as on GPUs. ``quantization``: of packed weights, as an option of an engine. Raises ValueError
    for a model that cannot be served.
    """
    shipped = paper_models()
    if model in shipped and not Path(model).exists():
        if dtype != "auto":
            raise ValueError(f"--dtype {dtype}: {model} is known by the paper's sizes alone: leave --dtype out")
        if quantization:
            raise ValueError(f"--quantization: {model} is known by the paper's sizes alone: leave it out")
        return shipped[model]
    kept = _kept(model, dtype) if not packed else None
    if kept is not None and (data := kept.read()) is not None:
        return msgspec.json.decode(data, type=ModelFacts)
    facts = captured_facts(model, dtype, trust_remote_code, packed=packed, quantization=quantization)
    if kept is not None:
        kept.write(msgspec.json.encode(facts))
    return facts


def paper_models() -> dict[str, ModelFacts]:
    """Return the paper's models by name, from their sizes alone."""
    return {name: _of_sizes(name, entry) for name, entry in entries(DATA / "models.toml")}


def _of_sizes(name: str, entry: Mapping[str, Any]) -> ModelFacts:
    """Return facts from sizes. All weights count as one product a layer; other weights, such as norms, are small."""
    layers, hidden, heads, group, ffn, e = (int(entry[k]) for k in _SIZES)
    weights = parse_size(entry["weights"], f"[{name}]: weights")
    kv_heads, head = heads // group, hidden // heads
    each = weights // layers
    attention = AttentionGroup(
        count=layers, heads=heads, kv_heads=kv_heads, kv_bytes=2 * e * kv_heads * head, q_bytes=e * hidden,
        kv_message_bytes=2 * e * kv_heads * head, o_bytes=e * hidden, flops=4 * hidden, window=0,
    )  # fmt: skip
    return ModelFacts(
        name=name,
        source=f"sizes of {_PAPER}",
        weight_bytes=weights,
        hidden_bytes=e * hidden,
        between=(2 / group) / (2 + 2 / group + 3 * ffn / hidden),
        products=[GemmGroup(layers, each, e, 2 * each // e)],
        attentions=[attention],
    )


def _kept(model: str, dtype: str) -> CachedFile | None:
    """Return the file of kept facts of a model with a local configuration: they depend on it and this version only."""
    path = Path(model).expanduser()
    path = path / "config.json" if path.is_dir() else path
    folder = cache_directory("facts")
    if folder is None or not path.is_file():
        return None
    text = b"\0".join([path.read_bytes(), dtype.encode(), model.encode(), __version__.encode(), _code()])
    return CachedFile(folder / f"{hashlib.sha256(text).hexdigest()}.json", largest=_MAX_BYTES, most_files=_MAX_FILES)


def _code() -> bytes:
    """Return the code that defines facts and how they are made."""
    package = Path(__file__).parents[2]
    return b"".join((package / name).read_bytes() for name in ("tools/plan/model_facts.py", "models/meta_capture.py"))


def captured_facts(
    model: str, dtype: str, trust_remote_code: bool, *, packed: bool = False, quantization: str = ""
) -> ModelFacts:
    from lamina.converter.explain import facts_of
    from lamina.models.load import max_model_len
    from lamina.models.meta_capture import attention_calls, check_plannable, configuration, plan_cuts
    from lamina.ops import gemm

    backend = gemm.get("auto", 1) if packed else None
    program = plan_cuts(
        model, dtype=dtype, trust_remote_code=trust_remote_code, backend=backend, quantization=quantization
    ).program
    check_plannable(program)
    config = configuration(model, trust_remote_code=trust_remote_code)
    slices = facts_of(program)
    gemms = Counter((g.weight_bytes, g.itemsize, g.flops_per_token) for each in slices for g in each.gemms)
    between = sum(each.gemm_bytes("between") for each in slices)
    return ModelFacts(
        name=model,
        source=f"captured from its configuration ({json.dumps(config.architectures or [config.model_type])})",
        weight_bytes=program.weight_bytes,
        hidden_bytes=config.get_text_config(decoder=True).hidden_size * program.calls[0].q.dtype.itemsize,
        between=between / program.weight_bytes,
        products=[GemmGroup(count, *fields) for fields, count in gemms.items()],
        attentions=[AttentionGroup(count, *fields) for fields, count in Counter(attention_calls(program)).items()],
        max_len=max_model_len(config),
    )
