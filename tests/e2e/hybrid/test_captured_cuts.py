"""Ranks of a hybrid model together compute what the whole does, each with its share of the weights and heads.

Covers: lamina/models/recurrent/captured_cuts.py, lamina/models/recurrent/mixer_division.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.families import VOCAB
from support.models.hybrids import HYBRIDS, build_hybrid
from torch import Tensor, nn

from lamina.converter import SlicedProgram
from lamina.converter.rows import stand_in_attention
from lamina.models.convert import convert_model, recurrent_layers
from lamina.models.errors import ModelError
from lamina.models.load import from_config, load
from lamina.models.tensor_parallel_shard import plan_shard
from lamina.ops import collective
from lamina.ops.recurrence.spec import RecurrenceSpec

MAX_LEN, ROWS, SIZE = 64, 6, 2


class Rank:
    """One of several threads that lay down what they have and look at what lies there."""

    wait_s = 0.0

    def __init__(self, barrier: threading.Barrier, places: list[Any], rank: int) -> None:
        self._barrier, self._places, self.rank, self.size = barrier, places, rank, len(places)

    def _all(self, x: Tensor) -> list[Tensor]:
        self._places[self.rank] = x
        self._barrier.wait()
        found = list(self._places)
        self._barrier.wait()
        return found

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._all(x)).sum(0)

    def all_gather(self, x: Tensor, size: int) -> Tensor:
        assert size == self.size
        return torch.cat(self._all(x), -1)

    def broadcast(self, x: Tensor) -> Tensor:
        return self._all(x)[0]


class Messages:
    def __init__(self) -> None:
        self.attended: list[Tensor] = []
        self.mixed: Sequence[Tensor] = []

    def q(self, call: int, q: Tensor) -> None:
        self.attended = [q]

    def kv(self, call: int, k: Tensor, v: Tensor) -> None:
        self.attended += [k, v]

    def mix(self, call: int, *inputs: Tensor) -> None:
        self.mixed = inputs


def stand_in(spec: RecurrenceSpec, x: Tensor, *others: Tensor) -> Tensor:
    """A cheap function of each head's value, of its group's q and k, and of its own other inputs."""
    ranges = spec.channel_ranges
    parts = {name: x[:, first : first + size] for name, (first, size) in ranges.items()}
    value = parts.pop("v").reshape(ROWS, spec.heads, spec.value_dim)
    gate = torch.ones(ROWS, spec.heads)
    groups = (torch.arange(spec.heads) + spec.first_head) // spec.heads_per_group
    for part in parts.values():
        gate = gate + part.reshape(ROWS, spec.groups, -1).mean(-1)[:, groups].tanh()
    for other in others:
        gate = gate + other.reshape(ROWS, spec.heads, -1).mean(-1).tanh()
    return value * gate[..., None]


def run(program: SlicedProgram) -> Tensor:
    """Logits of a few tokens from all over the vocabulary."""
    carry: Sequence[Tensor] = (torch.arange(ROWS)[:, None] * (VOCAB // ROWS) + 5, torch.arange(ROWS)[:, None])
    attentions, mixers = {call.index for call in program.calls}, {mixer.index: mixer for mixer in program.mixers}
    for piece in program.slices[:-1]:
        messages = Messages()
        carry = piece(*carry, messages)
        if piece.index in attentions:
            carry = (*carry, stand_in_attention(*messages.attended))
        if (mixer := mixers.get(piece.index)) is not None:
            out = stand_in(RecurrenceSpec.decode(mixer.rest[2]), *messages.mixed)
            carry = (*carry, out.reshape(ROWS, *mixer.out.shape))
    (logits,) = program.slices[-1](*carry)
    return logits[:, -1]


def on_threads(work: Callable[[int], Tensor]) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    threads = [threading.Thread(target=lambda r=r: found.update({r: work(r)})) for r in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
    return [found[r] for r in range(SIZE)]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "bamba" else pytest.mark.slow) for n in sorted(HYBRIDS)]
)
def test_ranks_compute_what_the_whole_does_with_a_share_of_the_weights(name: str, tmp_path: Path) -> None:
    build_hybrid(name).save_pretrained(tmp_path)
    loaded = load(tmp_path)
    stored = sum(p.numel() for p in loaded.model.parameters())
    whole = convert_model(loaded.model, max_model_len=MAX_LEN)
    wanted, programs = run(whole), []
    for rank in range(SIZE):
        part = load(tmp_path, rank=rank, size=SIZE)
        assert sum(p.numel() for p in part.model.parameters()) <= 1.1 * stored / SIZE
        programs.append(convert_model(part.model, max_model_len=MAX_LEN, part=part.part))
    for program in programs:
        specs = zip(recurrent_layers(program).shapes, recurrent_layers(whole).shapes, strict=True)
        assert all(RecurrenceSpec.decode(p.spec).heads * SIZE == RecurrenceSpec.decode(w.spec).heads for p, w in specs)
    barrier, places = threading.Barrier(SIZE, timeout=60.0), [None] * SIZE
    bound = [collective.bind(program, Rank(barrier, places, r)) for r, program in enumerate(programs)]
    found = torch.cat(on_threads(lambda rank: run(bound[rank])), -1)
    assert float((found - wanted).abs().max()) < 2e-4 * float(wanted.abs().max())


def meta(name: str, **changes: Any) -> nn.Module:
    config = build_hybrid(name, **changes).config
    return from_config(config)


def test_heads_that_ranks_cannot_share_are_refused_with_what_can() -> None:
    with pytest.raises(ModelError, match=r"-size 3 does not divide the 2 KV heads of attention 0: use 1 or 2$"):
        plan_shard(meta("bamba"), 0, 3, MAX_LEN)


def test_a_gate_and_a_group_go_to_the_ranks_that_read_them() -> None:
    """In bamba, columns are those of the gate, the values, B and C of the one group, and dt."""
    cuts = plan_shard(meta("bamba"), 1, SIZE, MAX_LEN).sharded_dims
    assert cuts["model.layers.0.mamba.in_proj.weight"].ranges[1] == ((64, 128), (192, 288), (292, 296))
    assert cuts["model.layers.0.mamba.out_proj.weight"] == (-1, 1, ())
    assert "model.layers.0.mamba.norm.weight" not in cuts


def test_a_maximum_of_all_heads_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.bamba.modeling_bamba import BambaRMSNormGated

    monkeypatch.setattr(BambaRMSNormGated, "forward", lambda self, x, gate=None: x - x.amax(-1, keepdim=True))
    with pytest.raises(ModelError, match=r"computes amax of all heads of .*layers.0.mamba, which .* leave it at 1$"):
        plan_shard(meta("bamba"), 0, SIZE, MAX_LEN)


def layer_norm(self: Any, x: Tensor, gate: Tensor | None = None) -> Tensor:
    """Return what nn.LayerNorm computes, of single operators."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-6)


def interleaved(self: Any, x: Tensor, gate: Tensor | None = None) -> Tensor:
    """Return the first number of all heads, then their second one, and so on."""
    return x.unflatten(-1, (8, -1)).transpose(-1, -2).flatten(-2)


def test_a_norm_of_differences_from_the_mean_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean is not 0 on a rank, so its differences are not 0 in the places of other ranks' heads."""
    from transformers.models.bamba.modeling_bamba import BambaRMSNormGated

    monkeypatch.setattr(BambaRMSNormGated, "forward", layer_norm)
    with pytest.raises(ModelError, match=r"computes mean of all heads of .*layers.0.mamba, which .* leave it at 1$"):
        plan_shard(meta("bamba"), 0, SIZE, MAX_LEN)


@pytest.mark.parametrize("plan", [{}, {"layers.*.mamba.out_proj": "rowwise"}])
def test_rows_across_heads_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, plan: dict[str, str]) -> None:
    """Each rank's share of the inputs of out_proj has numbers of all heads, even if a plan says to divide them."""
    from transformers.models.bamba.modeling_bamba import BambaRMSNormGated

    monkeypatch.setattr(BambaRMSNormGated, "forward", interleaved)
    config: Any = build_hybrid("bamba").config
    config.base_model_tp_plan = {**(config.base_model_tp_plan or {}), **plan}
    with pytest.raises(ModelError, match=r"layers.0.mamba.out_proj reads heads of .*layers.0.mamba .* leave it at 1$"):
        plan_shard(from_config(config), 0, SIZE, MAX_LEN)


def test_heads_added_to_the_residual_stream_are_refused_by_name() -> None:
    model: Any = meta("bamba")
    mixer, streams = model.model.layers[0].mamba, list[Tensor]()

    def keep(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        streams.append(kwargs["hidden_states"])

    def add(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        return (args[0] + torch.cat([streams[-1]] * (args[0].shape[-1] // streams[-1].shape[-1]), -1),)

    mixer.register_forward_pre_hook(keep, with_kwargs=True)
    mixer.out_proj.register_forward_pre_hook(add)
    with pytest.raises(ModelError, match=r"layers.0.mamba.out_proj reads heads of .*layers.0.mamba .* leave it at 1$"):
        plan_shard(model, 0, SIZE, MAX_LEN)
