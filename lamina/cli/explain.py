"""``lamina-launch explain MODEL``: how a model is cut, what crosses, and what that asks of the devices."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import shutil
import sys
import tempfile
from collections.abc import Hashable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lamina.config import OPTIONS
from lamina.facts.hardware import DEVICES, Device, device
from lamina.facts.report import estimate_text, explain_text
from lamina.facts.roofline import AttentionWork, Estimate, GemmWork, estimate

if TYPE_CHECKING:
    from torch import nn

    from lamina.converter import SlicedProgram
    from lamina.models.shard import Shard


class DevicePlan(NamedTuple):
    """A model without weights, cut. ``shard``: of the rank that it is a part for, if there are several."""

    model: nn.Module
    program: SlicedProgram
    shard: Shard | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this sub-command."""
    parser.add_argument("model", help="a directory or a hub id; with --no-weights also a configuration file")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--dot", metavar="FILE", help="write the sliced graph to FILE for Graphviz")
    parser.add_argument("--no-weights", action="store_true", help="plan from the configuration alone")
    parser.add_argument("--dtype", default="auto", help="auto (the checkpoint's), float32, bfloat16 or float16")
    parser.add_argument("--hoist", action="store_true", help="do work that does not wait for an attention before it")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that ships with the model")
    parser.add_argument(
        "--tensor-parallel-size", type=int, default=1, metavar="T", help="of T ranks, what the first one has (1)"
    )
    group = parser.add_argument_group("modelled bandwidth and times", f"devices: {', '.join(DEVICES)}")
    group.add_argument("--compute-device", metavar="NAME", help="what computes the slices")
    group.add_argument("--memory-device", metavar="NAME", help="what stores KV and computes attention")
    group.add_argument("--dop", default="1,1", metavar="A,B", help="numbers of compute and memory devices (1,1)")
    group.add_argument("--batch", type=int, default=300, help="sequences in a step (300)")
    group.add_argument("--length", type=int, default=4096, help="stored tokens of each sequence (4096)")
    group.add_argument("--kv-cache-dtype", default="auto", help="stored K and V: auto (the model's dtype), int8 or fp8")
    parser.add_argument("--print-config", action="store_true", help="print all settings, defaults filled in, as JSON")
    parser.add_argument("--dry-run", action="store_true", help="check everything, say what would be planned, and exit")


@dataclasses.dataclass(frozen=True)
class _Devices:
    compute: Device
    memory: Device
    num_compute: int
    num_memory: int
    batch: int
    length: int


def run(args: argparse.Namespace) -> int:
    """Exit status 0; raises ValueError for bad input."""
    if args.tensor_parallel_size < 1:
        raise ValueError(f"--tensor-parallel-size must be at least 1, not {args.tensor_parallel_size}")
    devices = _devices(args)
    _check_dtype(args.dtype)
    OPTIONS["kv_cache_dtype"].check(args.kv_cache_dtype)
    if args.print_config:
        settings = {k: v for k, v in vars(args).items() if k not in ("command", "print_config", "dry_run")}
        sys.stdout.write(json.dumps(settings, indent=2) + "\n")
        return 0
    if args.dry_run:
        return _dry_run(args)
    model, program = plan(args)[:2] if args.no_weights else _convert(args)
    from lamina.converter.explain import facts_of, to_dot, to_json

    facts = {"model": args.model, **_describe(model, args.tensor_parallel_size), **to_json(program)}
    modelled = None
    if devices is not None:
        gemms = [
            GemmWork(weight_bytes=g.weight_bytes, itemsize=g.itemsize, flops_per_token=g.flops_per_token)
            for f in facts_of(program)
            for g in f.gemms
        ]
        modelled = estimate(gemms, _attention(program, args.kv_cache_dtype), program.weight_bytes, **vars(devices))
    if args.dot:
        Path(args.dot).write_text(to_dot(program))
    _print(args, facts, modelled, devices)
    return 0


def _print(
    args: argparse.Namespace, facts: dict[str, Any], modelled: Estimate | None, devices: _Devices | None
) -> None:
    if args.json:
        if modelled is not None and devices is not None:
            named = {"compute_device": devices.compute.name, "memory_device": devices.memory.name}
            facts["modelled"] = {**named, "kv_cache_dtype": args.kv_cache_dtype, **dataclasses.asdict(modelled)}
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
        return
    sys.stdout.write(explain_text(facts))
    if modelled is not None and devices is not None:
        sys.stdout.write("\n" + estimate_text(modelled, devices.compute, devices.memory, args.kv_cache_dtype))
    if args.dot:
        sys.stdout.write(f"\nwrote {args.dot}; draw it with: dot -Tsvg -O {args.dot}\n")


def _devices(args: argparse.Namespace) -> _Devices | None:
    for name in ("batch", "length"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, not {getattr(args, name)}")
    if args.compute_device is None and args.memory_device is None:
        return None
    for name in ("compute_device", "memory_device"):
        if getattr(args, name) is None:
            raise ValueError(f"--{name.replace('_', '-')} is missing: name both devices, or none")
    try:
        num_compute, num_memory = (int(n) for n in args.dop.split(","))
    except ValueError:
        raise ValueError(f"--dop {args.dop} is not two numbers such as 2,4") from None
    if min(num_compute, num_memory) < 1:
        raise ValueError(f"--dop {args.dop}: at least one device of each kind is needed")
    compute = device(args.compute_device, "--compute-device")
    memory = device(args.memory_device, "--memory-device")
    return _Devices(compute, memory, num_compute, num_memory, args.batch, args.length)


def _check_dtype(dtype: str) -> None:
    from lamina.models.load import DTYPES

    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype} is not one of auto, {', '.join(DTYPES)}")


def _describe(model: nn.Module, ranks: int) -> dict[str, str]:
    dtypes = {str(p.dtype).removeprefix("torch.") for p in model.parameters()}
    part = f" (rank 0 of {ranks})" if ranks > 1 else ""
    return {"architecture": type(model).__name__ + part, "dtype": "/".join(sorted(dtypes))}


def _attention(program: SlicedProgram, kv_cache_dtype: str) -> list[AttentionWork]:
    """Messages carry K and V in the model's dtype, whatever they are stored as."""
    from lamina.attention.spec import AttentionSpec
    from lamina.kv.stored import head_bytes, stored_dtype

    return [
        AttentionWork(
            kv_bytes=call.k.shape[0]
            * head_bytes(call.k.shape[-1], call.v.shape[-1], stored_dtype(kv_cache_dtype, call.k.dtype)),
            flops=2 * call.q.shape[0] * (call.q.shape[-1] + call.v.shape[-1]),
            window=AttentionSpec.decode(call.rest[1]).window,
            message_bytes=call.q_bytes + call.kv_bytes + call.out_bytes,
        )
        for call in program.calls
    ]


def _convert(args: argparse.Namespace) -> tuple[nn.Module, SlicedProgram]:
    from lamina.models.convert import convert_model
    from lamina.models.load import load

    size = args.tensor_parallel_size
    loaded = load(args.model, dtype=args.dtype, trust_remote_code=args.trust_remote_code, size=size)
    limit, keep = loaded.max_model_len, not args.trust_remote_code
    return loaded.model, convert_model(loaded.model, max_model_len=limit, hoist=args.hoist, part=loaded.part, keep=keep)


def plan(args: argparse.Namespace) -> DevicePlan:
    """``args``: model, dtype, trust_remote_code, hoist, tensor_parallel_size. Without weights: a few layers are
    captured and the rest stamped if that is provably the same, else all are captured.
    """
    from lamina.converter import ConversionError
    from lamina.converter.stamp import layer_stack, stamp
    from lamina.models.convert import convert_model
    from lamina.models.load import from_config, max_model_len
    from lamina.models.refuse import num_layers
    from lamina.models.shard import plan_shard

    config = _read_config(args)
    limit, keep = max_model_len(config), not args.trust_remote_code
    model = from_config(config, dtype=args.dtype, trust_remote_code=args.trust_remote_code)
    if args.tensor_parallel_size > 1:
        shard = plan_shard(model, 0, args.tensor_parallel_size, limit)
        shard.shrink(model)
        shard.join(model)
        program = convert_model(model, max_model_len=limit, hoist=args.hoist, part=shard.part, keep=keep)
        return DevicePlan(model, program, shard)

    def shallow(few: int) -> tuple[SlicedProgram, Sequence[nn.Module], Sequence[Hashable]]:
        less = _with_layers(config, num_layers(model), few)
        small = from_config(less, dtype=args.dtype, trust_remote_code=args.trust_remote_code)
        program = convert_model(small, max_model_len=limit, hoist=args.hoist, keep=keep)
        return program, layer_stack(small, few)[1], _layer_entries(less, few)

    total, stamped = num_layers(model), None
    with suppress(ConversionError):  # where layers are in no list, all of them are captured
        name, layers = layer_stack(model, total)
        stamped = stamp(shallow, layers, _layer_entries(config, total), f"model.{name}")
    whole = stamped or convert_model(model, max_model_len=limit, hoist=args.hoist, keep=keep)
    return DevicePlan(model, whole, None)


def _read_config(args: argparse.Namespace) -> Any:
    from lamina.models.checkpoint import find_checkpoint, read_config

    path, trust = Path(args.model).expanduser(), args.trust_remote_code
    if not path.is_file():
        directory = find_checkpoint(args.model, trust_remote_code=trust, weights=False)
        return read_config(directory, trust_remote_code=trust)
    with tempfile.TemporaryDirectory() as directory_of_one:
        shutil.copyfile(path, Path(directory_of_one) / "config.json")
        return read_config(Path(directory_of_one), trust_remote_code=trust)


def _layer_lists(config: Any, num_layers: int) -> dict[str, list[Any]]:
    """The configuration's entries that have one value for each layer."""
    text = config.get_text_config(decoder=True)
    return {k: v for k, v in vars(text).items() if isinstance(v, list) and len(v) == num_layers}


def _layer_entries(config: Any, num_layers: int) -> list[Hashable]:
    lists = _layer_lists(config, num_layers)
    return [json.dumps({k: v[i] for k, v in lists.items()}, default=str) for i in range(num_layers)]


def _with_layers(config: Any, num_layers: int, few: int) -> Any:
    """The configuration with its first ``few`` layers."""
    less = copy.deepcopy(config)
    text = less.get_text_config(decoder=True)
    text.num_hidden_layers = few
    for key, values in _layer_lists(config, num_layers).items():
        setattr(text, key, values[:few])
    return less


def _dry_run(args: argparse.Namespace) -> int:
    from lamina.models.checkpoint import check_weights, find_checkpoint, read_config

    if args.no_weights:
        config = _read_config(args)
    else:
        directory = find_checkpoint(args.model, trust_remote_code=args.trust_remote_code)
        config = read_config(directory, trust_remote_code=args.trust_remote_code)
        check_weights(directory)
    how = "without weights" if args.no_weights else "with its weights"
    sys.stdout.write(f"would plan {args.model} ({', '.join(config.architectures or [config.model_type])}) {how}\n")
    return 0
