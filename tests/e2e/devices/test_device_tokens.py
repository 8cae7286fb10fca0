"""Workers on a device of its own memory, which a CPU stands in for: the same bits as without one.

Covers: converter/move.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from stand_in_device import RecordingCapture, StandIn, stand_in_for_cpu
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lamina import LLM, SamplingParams
from lamina.converter import move
from lamina.models.convert import convert_model

pytestmark = [pytest.mark.usefixtures("no_child_left"), pytest.mark.timeout(300)]
SCORED = SamplingParams(temperature=0.7, top_p=0.9, seed=3, max_tokens=12, logprobs=2, ignore_eos=True)
LAYERS = 3
CUDA = torch.device("cuda")


def outputs(path: Path, prompts: list[list[int]], **options: Any) -> tuple[list[Any], dict[str, dict[str, float]]]:
    with LLM(str(path), **{"transport": "loopback", "memory_workers": 2, "prefill_chunk": 32, **options}) as llm:
        found = [o.outputs[0] for o in llm.generate(prompts, SCORED)]
        return [(o.token_ids, o.logprobs) for o in found], llm.stats()


@pytest.mark.long(but=["plain"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"partition": "token", "memory_workers": 3},
        {"pipeline": 3},
        {"tensor_parallel_size": 2, "pipeline": 2},
        {"prefill_workers": 1, "kv_cache_dtype": "int8"},
    ],
    ids=lambda o: " ".join(f"{k}={v}" for k, v in o.items()) or "plain",
)
def test_the_bits_are_those_of_the_host(
    options: dict[str, Any], llama_path: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, _ = outputs(llama_path, prompts, deterministic=True, **options)
    with stand_in_for_cpu(monkeypatch) as made:
        found, stats = outputs(llama_path, prompts, deterministic=True, **options)
    assert found == wanted
    with_model = [d for d in made if d.places]
    assert len(with_model) == sum(not name.startswith("memory") for name in stats)
    assert all(d.num_waits for d in with_model)
    if not options:
        (device,) = with_model
        assert device.num_waits == 2 * LAYERS * stats["compute-0"]["steps"], "one for Q, one for K and V, none else"


def test_tokens_are_those_of_transformers(
    llama_path: Path,
    prompts: list[list[int]],
    reference: Callable[[list[int], int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    with stand_in_for_cpu(monkeypatch), LLM(str(llama_path), transport="loopback", memory_workers=2) as llm:
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, greedy)] == [reference(p, 16) for p in prompts]


def test_kv_comes_back_from_host_memory(llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, of several pages, once the pool has given them up."""
    prompt = [(7 * i + 3) % 90 + 5 for i in range(300)]
    options: dict[str, Any] = {"memory_workers": 2, "deterministic": True, "prefill_chunk": 64, "transport": "loopback"}
    with stand_in_for_cpu(monkeypatch), LLM(str(llama_path), kv_offloading_size="64MiB", **options) as llm:
        first, found = [], []
        for answers in (first, found):
            (output,) = llm.generate([prompt], SCORED)
            answers += [(o.token_ids, o.logprobs) for o in output.outputs]
            llm.engine.finish_in_flight()
            llm.engine.scheduler.evict_retained()
            llm.engine.release_idle_blocks()
        assert output.num_cached_tokens == 256
        assert sum(stats.get("kv_loaded_bytes", 0.0) for stats in llm.stats().values()) > 0
    assert found == first


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pipeline": 3, "deterministic": True},
        {"tensor_parallel_size": 2, "deterministic": True},
        {"prefill_workers": 1, "deterministic": True},
    ],
    ids=["plain", "pipeline", "ranks", "prefill"],
)
def test_graphs_draw_the_same_tokens(
    options: dict[str, Any], llama_path: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches that take turns leave carried tensors and messages lying while others replay the same graphs."""
    options = {**options, "gemm": "torch"}
    wanted, _ = outputs(llama_path, prompts, **options)
    with stand_in_for_cpu(monkeypatch, graphs=True):
        found, _ = outputs(llama_path, prompts, **options)
        without, _ = outputs(llama_path, prompts, **options, cuda_graphs=False)
    for some in (found, without):
        assert [tokens for tokens, _ in some] == [tokens for tokens, _ in wanted]
        if "deterministic" in options:  # only then are all bits promised: shapes are fixed, with graphs and without
            assert some == wanted


@pytest.mark.long
def test_a_pause_records_no_graph_again(
    llama_path: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A memory worker leaves, and all connect again: as many graphs as at the start were recorded while all waited."""
    recorded, end = list[int](), RecordingCapture.end
    monkeypatch.setattr(RecordingCapture, "end", lambda capture: (recorded.append(1), end(capture))[1])
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    options: dict[str, Any] = {"memory_workers": 2, "transport": "loopback", "gemm": "torch", "kv_memory": "20MiB"}
    with stand_in_for_cpu(monkeypatch, graphs=True), LLM(str(llama_path), max_num_seqs=8, **options) as llm:
        wanted = [o.outputs[0].token_ids for o in llm.generate(prompts, greedy)]
        at_start, ids, found = len(recorded), [llm.engine.add(p, greedy) for p in prompts], dict[int, Any]()
        outcomes = list[Any]()
        while llm.engine.has_work:
            found |= {o.request_id: o for o in llm.engine.step()}
            if len(found) == len(ids) and not outcomes:
                outcomes.append(None)
                llm.pools.resizer.begin(llm.pools.resizer.plan(1), ())
            if (outcome := llm.pools.resizer.take_outcome()) is not None:
                outcomes.append(outcome)
    assert [o.error for o in outcomes[1:]] == [""]
    assert [found[i].outputs[0].token_ids for i in ids] == wanted
    assert at_start > 100
    assert len(recorded) == at_start


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("transport", ["loopback", "shm"])
@pytest.mark.parametrize("name", ["compute_device", "memory_device"])
def test_a_gpu_that_is_not_there_is_told_in_one_line(name: str, transport: str, llama_path: Path) -> None:
    options: dict[str, Any] = {name: "cuda", "transport": transport}
    with pytest.raises(ValueError, match=f"{name}=.cuda.: torch .* finds no NVIDIA GPU here") as error:
        LLM(str(llama_path), **options)
    assert "\n" not in str(error.value)


class Sent:
    """Records the memory in which the messages of slices were."""

    def __init__(self) -> None:
        self.devices: set[str] = set()

    def q(self, call: int, q: Tensor) -> None:
        self.devices.add(q.device.type)

    def kv(self, call: int, k: Tensor, v: Tensor) -> None:
        self.devices |= {k.device.type, v.device.type}


MOVED = ("llama-gqa", "llama-tied", "gemma2", "gpt2", "mpt", "bloom", "mixtral")


@pytest.mark.long
@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name in MOVED],
                         ids=lambda f: f.name)  # fmt: skip
def test_moved_slices_have_nothing_left_on_the_host(family: Any) -> None:
    """Torch's fake tensors show it: they compute shapes and devices alone, and refuse to mix devices."""
    mode, program = FakeTensorMode(), convert_model(family.build(), max_model_len=64)

    def there(x: Tensor) -> Tensor:
        with mode:
            return torch.empty(x.shape, dtype=x.dtype, device=CUDA)

    calls, sent = program.calls, Sent()
    program = move(program, CUDA, there)
    with mode:
        ids = torch.zeros(3, 1, dtype=torch.int64, device=CUDA)
        carry = program.slices[0](ids, ids, sent)
        for i, part in enumerate(program.slices[1:]):
            o = torch.empty(3, *calls[i].out.shape, dtype=calls[i].out.dtype, device=CUDA)
            carry = part(*carry, o, *(() if part is program.slices[-1] else (sent,)))
    assert carry[0].device.type == "cuda"
    assert sent.devices == {"cuda"}


def test_a_moved_program_computes_the_same_and_shares_what_was_shared() -> None:
    """An embedding that is the last layer's weight too is moved once; the model that was cut is left as it was."""
    (family,) = (f for f in FAMILIES if f.name == "llama-tied")
    model = family.build()
    before = {name: (p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    program = convert_model(model, max_model_len=64)
    nbytes, addresses = program.weight_bytes, {w.data_ptr() for s in program.slices for w in s.weights.values()}
    ids, sent = torch.arange(3)[:, None], Sent()
    wanted = program.slices[0](ids, ids, sent)
    moved = move(program, torch.device("cpu"))
    assert moved.weight_bytes == nbytes
    assert not addresses & {w.data_ptr() for s in moved.slices for w in s.weights.values()}
    assert all(torch.equal(a, b) for a, b in zip(moved.slices[0](ids, ids, sent), wanted, strict=True))
    for name, p in model.named_parameters():
        assert p.data_ptr() == before[name][0]
        assert torch.equal(p, before[name][1])


def test_stand_ins_are_gone_behind_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    from lamina.workers.staging import HostStaging, open_staging

    with stand_in_for_cpu(monkeypatch):
        assert isinstance(open_staging(torch.device("cpu")), StandIn)
    assert isinstance(open_staging(torch.device("cpu")), HostStaging)
