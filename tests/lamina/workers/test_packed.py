"""Weights of a program packed: which, with how many bytes, where, and with the results of weights as they lie."""

from __future__ import annotations

import os
import secrets
import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from lamina import gemm
from lamina.cli.explain import plan
from lamina.compute.compiled import compiled
from lamina.compute.packed import Packed, linear_weights, pack, pack_for, packed_bytes, place_of
from lamina.config import make_config
from lamina.converter import SlicedProgram
from lamina.facts.room import has_room_to_pack
from lamina.gemm import LinearBackend
from lamina.models.convert import convert_model
from lamina.protocol.control import StartCompute

GB = 10**9
native = gemm.get("native", 1)
CONFIG = LlamaConfig(
    hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=80, max_position_embeddings=64, pad_token_id=0, tie_word_embeddings=True,
)  # fmt: skip
LAYER = 64 * (64 + 2 * 32 + 64) + 3 * 64 * 96  # q, k, v, o; gate, up, down

packs = pytest.mark.skipif(
    not (native.packing and native.packing.nbytes(torch.ones(1, 1, dtype=torch.bfloat16))),
    reason=f"{native.packing and native.packing.name} has no order of its own for bf16",
)


def program(dtype: torch.dtype = torch.bfloat16) -> SlicedProgram:
    torch.manual_seed(0)
    return convert_model(AutoModelForCausalLM.from_config(CONFIG, dtype=dtype).eval(), max_model_len=64)


class Sent:
    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def q(self, call: int, q: Tensor) -> None:
        self.tensors.append(q)

    def kv(self, call: int, k: Tensor, v: Tensor) -> None:
        self.tensors.extend((k, v))


@torch.inference_mode()
def middle(some: SlicedProgram, rows: int) -> list[Tensor]:
    """Results and messages of slice 1."""
    generator = torch.Generator().manual_seed(rows)
    sent = Sent()
    hidden, o = (torch.randn(rows, 1, *s, generator=generator).bfloat16() for s in ((64,), (4, 16)))
    return [*some.slices[1](hidden, torch.arange(rows)[:, None, None].float(), o, sent), *sent.tensors]


def room() -> None:
    pass


def no_room() -> None:
    raise OSError(12, "there is no room for 1 GB more")


def test_every_linear_layer_is_packed_once_and_nothing_else() -> None:
    found = linear_weights(program())
    assert sum(w.numel() for w in found) == 3 * LAYER + 80 * 64
    assert [tuple(w.shape) for w in found[:3]] == [(64, 64), (32, 64), (32, 64)], "in the order of their use"
    twice = program()
    assert len(linear_weights(replace(twice, slices=(*twice.slices, *twice.slices)))) == len(found)


@packs
def test_a_plan_without_weights_says_what_packing_takes(tmp_path: Path) -> None:
    """Also of a deep model, most of whose layers are not captured."""
    deep = LlamaConfig.from_dict({**CONFIG.to_dict(), "num_hidden_layers": 12, "torch_dtype": "bfloat16"})
    deep.save_pretrained(tmp_path)
    facts = {"trust_remote_code": False, "hoist": False, "tensor_parallel_size": 1}
    found = plan(Namespace(model=str(tmp_path), dtype="bfloat16", **facts)).program
    assert found.stamped
    assert packed_bytes(found, native) == 2 * (12 * LAYER + 80 * 64)
    assert packed_bytes(program(), native) == 2 * (3 * LAYER + 80 * 64)
    assert packed_bytes(program(), gemm.get("torch", 1)) == 0
    assert packed_bytes(program(torch.float32), native) == 0


@packs
@pytest.mark.parametrize("shared", [False, True])
def test_packed_weights_change_no_bit(*, shared: bool) -> None:
    place = f"lamina-test-{secrets.token_hex(8)}" if shared else ""
    lying = gemm.bind(program(), gemm.get("native", 2))
    some, backend = program(), gemm.get("native", 2)
    done = pack(some, backend, room, place, 30.0)
    assert done.nbytes == packed_bytes(some, backend) > 0
    assert done.why == f"packed: 194.6 kB more, {'shared by the replicas of this host' if shared else 'in huge pages'}"
    bound = gemm.bind(some, backend)
    for rows in (1, 2, 7, 32, 64, 65):
        for got, due in zip(middle(bound, rows), middle(lying, rows), strict=True):
            assert torch.equal(got, due), rows
    if shared:
        assert done.copy
        other = gemm.get("native", 1)
        assert pack(program(), other, no_room, place, 30.0).nbytes == done.nbytes, "what is there takes no room"
        done.copy.close()


@packs
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")
def test_compiled_slices_take_packed_weights(tmp_path: Path) -> None:
    def units(some: SlicedProgram, backend: LinearBackend) -> SlicedProgram:
        return compiled(replace(some, slices=some.slices[:2]), backend, lambda *_: None, tmp_path)

    some, ours, plain = program(), gemm.get("native", 2), gemm.get("native", 2)
    copies = list[Tensor]()
    assert ours.packing
    use = ours.packing.use
    ours.packing.use = lambda w, copy: (copies.append(copy), use(w, copy))  # type: ignore
    assert pack(some, ours, room).nbytes == sum(map(len, copies))
    packed, due = units(some, ours), middle(units(program(), plain), 5)
    assert all(map(torch.equal, middle(packed, 5), due))
    for copy in copies:
        copy.zero_()
    assert not any(x.any() for x in middle(packed, 5)[-3:]), "Q, K and V are not of the copy"


@packs
def test_without_room_weights_stay_as_they_lie() -> None:
    some, backend = program(), gemm.get("native", 2)
    assert pack(some, backend, no_room) == Packed(0, "as they lie: there is no room for 1 GB more")
    for got, due in zip(
        middle(gemm.bind(some, backend), 3), middle(gemm.bind(program(), gemm.get("native", 2)), 3), strict=True
    ):
        assert torch.equal(got, due)
    assert pack(program(torch.float32), backend, no_room).why == "as they lie: this CPU has no better order for them"


def started(copies: int, **options: Any) -> StartCompute:
    """What a driver tells the first worker of a host that has ``copies`` replicas."""
    config = make_config({"memory_workers": 1, **options})
    of_all = {name: getattr(config, name) for name in ("model", "kv", "batching", "topology", "devices", "deadlines")}
    return StartCompute(
        **of_all, path="", number=0, rank=0, copies=copies, device_number=0, threads=1, scheme="shm", address="",
        name="", key=b"", trace=False,
    )  # fmt: skip


@packs
@pytest.mark.parametrize(
    ("copies", "options", "how"),
    [
        (1, {}, "in huge pages"),
        (2, {"pipeline": 3}, "shared by the replicas of this host"),
        (1, {"pipeline": 3}, "in huge pages"),  # others are elsewhere
        (2, {"prefill_workers": 1}, "in huge pages"),  # a prefill worker has none
    ],
)
def test_a_worker_packs_where_its_host_has_room(
    copies: int, options: dict[str, Any], how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes(secrets.token_bytes(8))
    some, start = program(), started(copies, **options, kv_memory="1MiB")
    weights, nbytes = some.weight_bytes, packed_bytes(some, native)
    enough = (weights + nbytes + (1 << 20)) * 8 // 7 + 8
    monkeypatch.setattr("lamina.compute.packed.free_bytes", lambda: enough)
    done = pack_for(start, some, gemm.get("native", 1), tmp_path, b"k" * 32)
    assert done.why == f"packed: 194.6 kB more, {how}"
    if done.copy:
        done.copy.close()
    monkeypatch.setattr("lamina.compute.packed.free_bytes", lambda: enough - 32)
    done = pack_for(start, some, gemm.get("native", 1), tmp_path, b"k" * 32)
    assert done == Packed(0, "as they lie: there is no room for 194.6 kB more")


@pytest.mark.parametrize(
    ("packed", "weights", "kv", "free", "fits"),
    [
        (6, 6, 0, 20, True),  # 17 of 20, KV blocks a quarter of it
        (7, 7, 0, 20, False),
        (6, 6, 5, 20, True),
        (6, 6, 6, 20, False),
        (6, 6, 0, 10, False),
    ],
)
def test_room_to_pack(packed: int, weights: int, kv: int, free: int, fits: bool) -> None:
    assert has_room_to_pack(packed * GB, weights * GB, kv * GB, free * GB) is fits


def test_the_place_of_a_copy_depends_on_all_that_it_is_made_from(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"weights")
    found = {place_of(b"k" * 32, [file], 0, 1), place_of(b"l" * 32, [file], 0, 1), place_of(b"k" * 32, [file], 1, 2)}
    assert place_of(b"k" * 32, [file], 0, 1) in found
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    found.add(place_of(b"k" * 32, [file], 0, 1))
    assert len(found) == 4
    assert all("weights" not in place and len(place) < 100 for place in found)
