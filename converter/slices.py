"""The result of a conversion: slices to call, the cuts between them, and the calls that they leave out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from .graph import RowTensor
from .render import render


class Send(Protocol):
    """Receives a slice's messages; ``call`` counts exchanges from 0. The caller implements it."""

    def q(self, call: int, q: Tensor, /) -> None:
        """Send q [R, Hq, 1, D]; called as soon as it exists."""

    def kv(self, call: int, k: Tensor, v: Tensor, /) -> None:
        """Send k [R, Hkv, 1, D] and v [R, Hkv, 1, Dv]; called before work that none of the three messages needs."""

    def mix(self, call: int, /, *inputs: Tensor) -> None:
        """Send all inputs of a mixer, each [R, ...]; only models with mixers call it."""


@dataclass(frozen=True)
class CutCall:
    """An attention call between slices ``index`` and ``index + 1``, in the exchange of that number.

    Shapes are those of one row, as the operator's arguments and result: q (Hq, 1, D), k (Hkv, 1, D), v (Hkv, 1, Dv),
    out (1, Hq, Dv). ``rest`` holds the operator's arguments after q, k and v: constants unchanged, tensors computed
    from the weights (the weights themselves where possible). ``name`` is the path of the calling module.
    """

    index: int
    name: str
    q: RowTensor
    k: RowTensor
    v: RowTensor
    out: RowTensor
    rest: tuple[Any, ...]

    @property
    def q_bytes(self) -> int:
        """Bytes of send Q per token."""
        return self.q.bytes_per_token

    @property
    def kv_bytes(self) -> int:
        """Bytes of send KV per token."""
        return self.k.bytes_per_token + self.v.bytes_per_token

    @property
    def out_bytes(self) -> int:
        """Bytes of receive O per token."""
        return self.out.bytes_per_token


@dataclass(frozen=True)
class MixerCall:
    """A call between slices ``index`` and ``index + 1`` of an operator with any number of inputs, in the exchange of
    that number. Shapes are those of one row. ``rest`` holds the operator's arguments after its inputs, as in CutCall.
    """

    index: int
    name: str
    inputs: tuple[RowTensor, ...]
    out: RowTensor
    rest: tuple[Any, ...]

    @property
    def input_bytes(self) -> int:
        """Bytes of the inputs per token."""
        return sum(x.bytes_per_token for x in self.inputs)

    @property
    def out_bytes(self) -> int:
        """Bytes of the output per token."""
        return self.out.bytes_per_token


@dataclass(frozen=True)
class Cut:
    """The tensors carried from slice ``index`` to slice ``index + 1`` on the compute side, in calling order.
    ``live_bytes_per_token``: the bytes if everything alive at the call were carried.
    """

    index: int
    tensors: tuple[RowTensor, ...]
    live_bytes_per_token: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of all carried tensors per row."""
        return sum(t.bytes_per_token for t in self.tensors)


@dataclass(frozen=True)
class Slice:
    """The model between two exchanges, for any number of rows.

    The first slice's arguments are (input_ids [R, 1] int64, position_ids [R, 1] int64, send). A middle one has
    (*carried, o [R, 1, Hq, Dv], send), the last one (*carried, o). In place of o there are all outputs of the exchange,
    attention's first. Results are the tensors of the next cut, or (logits [R, 1, V],). Rows are dimension 0 of every
    tensor and independent, so they may be dropped between slices. ``signature`` is equal for slices that differ only in
    their weights and layer numbers.
    """

    index: int
    module: fx.GraphModule
    signature: str
    weights: Mapping[str, Tensor]

    def __call__(self, *args: Any) -> tuple[Tensor, ...]:
        """Run the slice without recording gradients; messages leave through ``send`` while it runs."""
        with torch.no_grad():
            results: tuple[Tensor, ...] = self._forward(*args)
        return results

    @cached_property
    def _forward(self) -> Any:
        return self.module.forward

    @cached_property
    def code(self) -> str:
        """The program as readable text, with weights by name and shapes; ``module.code`` is what Python runs."""
        return render(self.module.graph, f"slice_{self.index}")

    @property
    def weight_bytes(self) -> int:
        """Bytes of the distinct weights that this slice reads."""
        return distinct_bytes(self.weights.values())


@dataclass(frozen=True)
class SlicedProgram:
    """A model as L + 1 slices around L exchanges: slice i, exchange i, slice i + 1; ``cuts[i]`` crosses exchange i.

    An exchange has an attention (of ``calls``), a mixer (of ``mixers``) or both; most models have attentions alone.
    ``timings`` are seconds of each stage. ``rows`` names how row independence was shown: "numeric" (by running and by
    rule) or "static" (by rule alone, as there were no weights to run). ``stamped`` counts the layers that
    were not captured but derived from equal ones; such a program is a plan and cannot run.
    """

    slices: tuple[Slice, ...]
    calls: tuple[CutCall, ...]
    cuts: tuple[Cut, ...]
    rows: str
    stamped: int = 0
    mixers: tuple[MixerCall, ...] = ()
    timings: dict[str, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.slices)

    def __iter__(self) -> Iterator[Slice]:
        return iter(self.slices)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the distinct weights of all slices; a tied weight counts once."""
        return distinct_bytes(t for s in self.slices for t in s.weights.values())

    @property
    def cut_bytes_per_token(self) -> int:
        """Bytes carried past all exchanges together, per token."""
        return sum(c.bytes_per_token for c in self.cuts)

    @property
    def message_bytes_per_token(self) -> int:
        """Bytes of all messages of one step, per token."""
        attended = sum(c.q_bytes + c.kv_bytes + c.out_bytes for c in self.calls)
        return attended + sum(m.input_bytes + m.out_bytes for m in self.mixers)


def distinct_bytes(tensors: Any) -> int:
    """Return the bytes of ``tensors``; the same piece of a storage counts once."""
    extents = {(t.untyped_storage()._cdata, t.storage_offset(), t.shape): t.numel() * t.element_size() for t in tensors}
    return sum(extents.values())
