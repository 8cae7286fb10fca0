"""``lamina-launch explain MODEL``: the cuts of a model, and the tensors that cross them."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from lamina.cli.common.flags import check_at_least
from lamina.cli.common.group_flags import FlagValue, add_groups
from lamina.config.conflicts import need_text
from lamina.config.engine_config import BatchingOptions, KVOptions, ModelOptions
from lamina.config.flag_groups import flag_name
from lamina.config.flat_options import OPTIONS
from lamina.config.option import options_of, parse_size
from lamina.config.sparsity import SparsityOptions
from lamina.facts.report import explain_text

if TYPE_CHECKING:
    from torch import nn

    from lamina.converter import SlicedProgram

    from .plan.kv_tiers import KVTiers, MemorySplit

_SPARSITY = options_of(SparsityOptions)
EPILOG = """\
columns: "slices" are the parts of the model between attention operators, slice N before that of layer N; equal ones
share a row. "operators" are calls in its program. Two columns are shares of its GEMM weights: "GEMM before Q" until Q
is sent, "Q to KV" from then until K and V are sent. "Q first" says whether attention can begin while K and V are
computed: not with --no-early-q. "cut N" has the tensors that stay on compute workers from slice N to
N + 1, by their bytes for a token. "uncut" is what would be alive there without a minimum cut. "messages N" has the
bytes of Q, of K and V together (KV), and of O of layer N, between compute and memory workers. "mixers N" has those of a
recurrent layer after slice N, and its state: on memory workers, of each sequence, however long that is.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this sub-command."""
    parser.epilog = EPILOG
    parser.add_argument(
        "model", help="a directory, a GGUF file or a hub id; with --no-weights also a configuration file"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--no-weights", action="store_true", help="plan from the configuration alone")
    parser.add_argument(
        "--no-early-q",
        dest="early_q",
        action="store_false",
        help="keep the captured program's order, in which Q is sent with K and V",
    )
    parser.add_argument("--dtype", default="auto", help="auto (the checkpoint's), float32, bfloat16 or float16")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that ships with the model")
    parser.add_argument("--quantization", default="", help=OPTIONS["quantization"].help)
    parser.add_argument("--quantization-compute", default="auto", help=OPTIONS["quantization_compute"].help)
    parser.add_argument(
        "--tensor-parallel-size", type=int, default=1, metavar="T", help="show the part of the first of T ranks (1)"
    )
    group = parser.add_argument_group("KV with --kv-sparsity evict, of sequences of --length tokens")
    group.add_argument("--length", type=int, default=4096, help="stored tokens of each sequence (4096)")
    group.add_argument("--kv-cache-dtype", default="auto", help="stored K and V: auto (the model's dtype), int8 or fp8")
    values = {name: FlagValue(int, option.default, option.help) for name, option in _SPARSITY.items()}
    values |= {name: values[name]._replace(parse=str) for name in ("kv_sparsity", "kv_error_budget")}
    add_groups(parser, lambda name: group, values)
    group.add_argument(
        flag_name("kv_memory"),
        dest="kv_memory",
        default="",
        metavar="SIZE",
        help="KV memory of one memory worker: shows also how layers divide it",
    )
    parser.add_argument("--print-config", action="store_true", help="print all settings, defaults filled in, as JSON")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print what would be planned")


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns exit status 0; raises ValueError for bad input."""
    check_at_least(args, 1, "tensor_parallel_size", "length")
    sparsity = _sparsity(args)
    _check_dtype(args.dtype)
    ModelOptions(quantization=args.quantization, quantization_compute=args.quantization_compute)
    OPTIONS["kv_cache_dtype"].check(args.kv_cache_dtype)
    if args.print_config:
        settings = {k: v for k, v in vars(args).items() if k not in ("command", "print_config", "dry_run")}
        sys.stdout.write(json.dumps(settings, indent=2) + "\n")
        return 0
    if args.dry_run:
        return _dry_run(args)
    model, program = _planned(args) if args.no_weights else _convert(args)
    from lamina.converter.explain import to_json

    facts = {
        "model": args.model,
        "early_q": args.early_q,
        **_describe(model, args.tensor_parallel_size),
        **to_json(program),
    }
    if program.mixers:
        facts["mixers"] = _with_states(facts["mixers"], program)
    tiers = _tiers(args, sparsity, program) if sparsity is not None else []
    if args.json:
        for part in tiers:
            facts |= part.facts
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
        return 0
    sys.stdout.write(explain_text(facts) + "  (columns: lamina-launch explain --help)\n")
    for part in tiers:
        sys.stdout.write("\n" + "\n".join(part.lines) + "\n")
    return 0


def _with_states(mixers: list[dict[str, Any]], program: SlicedProgram) -> list[dict[str, Any]]:
    """Return the mixers with their kinds, and the bytes of one version of a sequence's state."""
    from lamina.models.convert import recurrent_layers
    from lamina.ops.recurrence.spec import RecurrenceSpec

    specs = [RecurrenceSpec.decode(shape.spec) for shape in recurrent_layers(program).shapes]
    each = zip(mixers, specs, strict=True)
    return [{**mixer, "kind": spec.kind, "state": spec.state_bytes} for mixer, spec in each]


def _sparsity(args: argparse.Namespace) -> SparsityOptions | None:
    """Return the sparsity options; None if none are requested. Raises ValueError."""
    if args.kv_sparsity == "none":
        if args.kv_memory:
            raise ValueError(need_text("explain --kv-cache-memory-bytes", ["--kv-sparsity evict"]))
        return None
    if args.kv_memory:
        parse_size(args.kv_memory, flag_name("kv_memory"))
    options = SparsityOptions(**{name: getattr(args, name) for name in _SPARSITY})
    if not options.drops_blocks:
        raise ValueError(f"--kv-sparsity {options.kv_sparsity} keeps all KV: use evict, or leave it out")
    options.check_budget(KVOptions().block_size)
    return options


def _tiers(args: argparse.Namespace, options: SparsityOptions, program: SlicedProgram) -> list[KVTiers | MemorySplit]:
    """Return what sequences keep, and how --kv-cache-memory-bytes is split. Raises ValueError."""
    from lamina.kv.stored_format import stored_dtype
    from lamina.models.convert import layer_shapes

    from .plan.kv_tiers import split_of, tiers_of

    layers, dtype = layer_shapes(program), stored_dtype(args.kv_cache_dtype, program.calls[0].q.dtype)
    parts: list[KVTiers | MemorySplit] = [tiers_of(layers, dtype, options, args.length)]
    if args.kv_memory:
        kv_bytes, rows = parse_size(args.kv_memory, flag_name("kv_memory")), BatchingOptions().max_rows
        size = KVOptions().block_size
        parts.append(split_of(layers, dtype, options, args.length, kv_bytes, block_size=size, max_rows=rows))
    return parts


def _check_dtype(dtype: str) -> None:
    from lamina.models.load import DTYPES

    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype} is not one of auto, {', '.join(DTYPES)}")


def _describe(model: nn.Module, ranks: int) -> dict[str, str]:
    from lamina.models.quantization.quantized_linear import packed_forms
    from lamina.ops.gemm.quantized import PackedForm

    dtypes = {str(p.dtype).removeprefix("torch.") for p in model.parameters()}
    part = f" (rank 0 of {ranks})" if ranks > 1 else ""
    forms = [PackedForm.decode(form) for form in packed_forms(model).values()]
    rows = sum(form.int8_inputs for form in forms)
    packed = f", {len(forms)} packed weights, {rows} by rows of int8" if forms else ""
    return {"architecture": type(model).__name__ + part, "dtype": "/".join(sorted(dtypes)) + packed}


def _convert(args: argparse.Namespace) -> tuple[nn.Module, SlicedProgram]:
    from lamina.models.convert import convert_model
    from lamina.models.load import load
    from lamina.ops import gemm

    size = args.tensor_parallel_size
    trust = args.trust_remote_code
    loaded = load(
        args.model,
        dtype=args.dtype,
        trust_remote_code=trust,
        size=size,
        allow_unused_weights=True,
        backend=gemm.get("auto", 1),
        quantization=args.quantization,
        quantization_compute=args.quantization_compute,
    )
    limit, keep = loaded.max_model_len, not trust
    program = convert_model(loaded.model, max_model_len=limit, part=loaded.part, early_q=args.early_q, keep=keep)
    return loaded.model, program


def _planned(args: argparse.Namespace) -> tuple[nn.Module, SlicedProgram]:
    from lamina.models.meta_capture import plan_cuts
    from lamina.ops import gemm

    plan = plan_cuts(
        args.model,
        dtype=args.dtype,
        trust_remote_code=args.trust_remote_code,
        ranks=args.tensor_parallel_size,
        early_q=args.early_q,
        backend=gemm.get("auto", 1),
        quantization=args.quantization,
        quantization_compute=args.quantization_compute,
    )
    return plan.model, plan.program


def _dry_run(args: argparse.Namespace) -> int:
    from lamina.models.checkpoint import check_weights, find_checkpoint, read_config

    if args.no_weights:
        from lamina.models.meta_capture import configuration

        config = configuration(args.model, trust_remote_code=args.trust_remote_code)
    else:
        directory = find_checkpoint(args.model, trust_remote_code=args.trust_remote_code)
        config = read_config(directory, trust_remote_code=args.trust_remote_code)
        check_weights(directory)
    how = "without weights" if args.no_weights else "with its weights"
    sys.stdout.write(f"would plan {args.model} ({', '.join(config.architectures or [config.model_type])}) {how}\n")
    return 0
