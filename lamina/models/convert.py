"""The conversion of a Hugging Face causal LM to slices, with the attention layers between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, fx, nn

from lamina.converter import ConversionError, CutCall, SlicedProgram, convert
from lamina.ops.attention.op import ATTENTION_OP
from lamina.ops.attention.spec import AttentionSpec
from lamina.ops.recurrence.op import MIXER_OP
from lamina.protocol.mixers import NO_RECURRENT_LAYERS, Exchange, MixerShape, RecurrentLayers
from lamina.protocol.step_plan import LayerShape

from .attention_routing import WHOLE_MODEL, DecodeStep, WeightShard, routed_attention
from .capture_cache import CaptureCache, capture_file
from .checkpoint import FileStamp
from .errors import UnsupportedModelError
from .load import LOAD_LOCK
from .recurrent.mixer_division import divide_mixers
from .recurrent.mixer_folding import fold_mixers
from .recurrent.mixer_routing import routed_mixers
from .unsupported_models import check_config, check_layers

PROOF_TEXT = "tokens and rows are apart"  # the content of a proof's file


def convert_model(
    model: nn.Module,
    *,
    max_model_len: int,
    deterministic: bool = False,
    part: WeightShard = WHOLE_MODEL,
    keep: bool = False,
    early_q: bool = True,
    stamps: Sequence[FileStamp] = (),
) -> SlicedProgram:
    """Cut ``model`` at its attention layers. Weights are bound, not copied; the model is left as it was.

    ``max_model_len``: the most tokens of a text; a model whose attention or rotary embedding changes with longer texts
    is served up to there. ``deterministic``: experts compute
    each row by itself, so that a row does not depend on others; slower. ``part``: of the model's weights. ``early_q``:
    as in ``converter.convert``.

    ``keep``: use the capture of an earlier start, or make one for later starts. It is for a model that packages made
    from a configuration, and that was not changed since. ``stamps``: of the files of its weights; what an earlier start
    has proved by running the model with them is not proved again. On the meta device the result is a plan.

    Raises UnsupportedModelError, naming the layer and the reason, for a model that would not give the same tokens.
    """
    if max_model_len < 1:
        raise ValueError(f"--max-model-len must be at least 1, not {max_model_len}")
    check_config(model)
    experts = "batched_mm" if deterministic else "grouped_mm"
    kept = capture_file(model, max_model_len=max_model_len, experts=experts, part=part) if keep else None
    proof = kept.proof_file(stamps) if kept and stamps else None
    route = routed_attention(model, max_model_len=max_model_len, experts=experts, part=part)
    with LOAD_LOCK, _wait_for_other_capture(kept, proof) as shown, route as router, routed_mixers(model) as mixers:
        expect = None if shown else len(check_layers(model, router, mixers, max_model_len)) + len(mixers.module_names)
        try:
            program = convert(
                DecodeStep(model),
                ATTENTION_OP,
                mixer_op=MIXER_OP,
                prepare=partial(_prepare, part=part),
                expect=expect,
                early_q=early_q,
                shown=shown,
                max_positions=max_model_len,
                cache=kept,
            )
        except ConversionError as error:
            raise UnsupportedModelError(f"{type(model).__name__} cannot be cut: {error}") from error
        if proof and not shown:
            proof.write(PROOF_TEXT)
    return program


def _prepare(graph: fx.Graph, part: WeightShard) -> None:
    """Make one operator of each recurrent layer, of a rank's heads."""
    fold_mixers(graph)
    if part.size > 1:
        divide_mixers(graph, part)


@contextmanager
def _wait_for_other_capture(cache: CaptureCache | None, proof: CaptureCache | None) -> Iterator[bool]:
    """Yield whether ``proof`` exists. If it or the capture is missing, wait for another process that makes them."""
    with ExitStack() as after:
        if cache and (cache.read() is None or (proof and proof.read() != PROOF_TEXT)):
            after.enter_context(cache.lock_for_capture())
        yield proof is not None and proof.read() == PROOF_TEXT


def recurrent_layers(program: SlicedProgram) -> RecurrentLayers:
    """Return the recurrent layers, in order, with their operands on the host, and the exchanges of the model."""
    if not program.mixers:
        return NO_RECURRENT_LAYERS
    layers = {call.index: number for number, call in enumerate(program.calls)}
    mixers = {call.index: number for number, call in enumerate(program.mixers)}
    exchanges = [Exchange(layers.get(i, -1), mixers.get(i, -1)) for i in range(len(program.cuts))]
    shapes, operands = list[MixerShape](), list[list[Tensor]]()
    for expected, call in enumerate(program.mixers):
        static, number, spec = call.rest
        if number != expected:
            raise UnsupportedModelError(f"recurrent layer {number} ({call.name}) runs as number {expected}")
        shapes.append(MixerShape(spec, [_bare(x.dtype) for x in call.inputs], [_bare(x.dtype) for x in static]))
        operands.append([x.detach() if x.is_meta else x.detach().to("cpu", copy=True) for x in static])
    return RecurrentLayers(exchanges, shapes, operands)


def _bare(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def layer_shapes(program: SlicedProgram) -> list[LayerShape]:
    """Return the shapes of all attention layers, in order: all that a memory worker must know of the model."""
    return [_layer_shape(number, call) for number, call in enumerate(program.calls)]


def _layer_shape(number: int, call: CutCall) -> LayerShape:
    layer, spec, sinks, slopes = call.rest
    if layer != number:
        raise UnsupportedModelError(f"layer {layer} ({call.name}) runs as attention {number}")
    AttentionSpec.decode(spec)
    return LayerShape(
        q_heads=call.q.shape[0],
        kv_heads=call.k.shape[0],
        qk_dim=call.q.shape[2],
        v_dim=call.v.shape[2],
        spec=spec,
        sinks=_as_bytes(sinks),
        slopes=_as_bytes(slopes),
    )


def _as_bytes(operand: Tensor | None) -> bytes:
    """Return little-endian fp32; empty for meta tensors, which have no values."""
    if operand is None or operand.is_meta:
        return b""
    return operand.detach().to("cpu", torch.float32).numpy().astype("<f4").tobytes()
