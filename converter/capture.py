"""Captures one decode step of a model as a flat operator graph whose weights are the module's own tensors."""

from __future__ import annotations

import contextlib
import linecache
import operator
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from .errors import ConversionError
from .functional import is_mutable, make_functional

MAX_ROWS = 65536
_LONGEST_FAULT = 240  # characters
EXAMPLE_ROWS = 3  # of the inputs with which a step is traced

aten = torch.ops.aten

# Operators that return their first argument unchanged, if it already has the wanted dtype, shape and device.
_IDENTITIES = {
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten._to_copy.default,
    aten.expand.default,
    aten.expand_as.default,
}


@dataclass(frozen=True)
class Weight:
    """A parameter, buffer or constant of the captured module: its dotted name and the tensor itself, not a copy."""

    fqn: str
    tensor: Tensor


@dataclass(frozen=True)
class Capture:
    """One decode step: ``logits`` [R, 1, V] from ``inputs`` (ids and positions, [R, 1] int64) through the ``calls``.
    ``rows`` is the symbol R (of sympy) in the shapes that every node carries in ``meta["val"]``.
    """

    graph: fx.Graph
    weights: dict[fx.Node, Weight]
    inputs: tuple[fx.Node, ...]
    calls: tuple[fx.Node, ...]
    logits: fx.Node
    rows: Any


def size_expression(size: object) -> Any:
    """Return the symbolic expression of a size that depends on R; None for a plain number."""
    return size.node.expr if isinstance(size, torch.SymInt) else None


def module_path(node: fx.Node) -> str:
    """Return the dotted path of the submodule whose forward made this node; "" for the outermost module."""
    stack = node.meta.get("nn_module_stack") or {"": ("", "")}
    path: str = list(stack.values())[-1][0]
    return path


@contextlib.contextmanager
def _evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Switch dropout and similar layers off in the block; restores every submodule's flag."""
    training = [m for m in module.modules() if m.training]
    for m in training:
        m.training = False
    try:
        yield
    finally:
        for m in training:
            m.training = True


@contextlib.contextmanager
def _no_stack_traces() -> Iterator[None]:
    """Capture without the Python lines that made each node: they have no use, and finding them takes an eighth of the
    time. torch 2.9 has no such setting.
    """
    config: Any = fx.config
    if not hasattr(config, "do_not_emit_stack_traces"):
        yield
        return
    before, config.do_not_emit_stack_traces = config.do_not_emit_stack_traces, True
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = before


def _export(step: nn.Module) -> ExportedProgram:
    device = next((t.device for t in (*step.parameters(), *step.buffers())), torch.device("cpu"))
    # Two tensors, not one used twice: the exporter would merge the inputs.
    examples = tuple(torch.ones(EXAMPLE_ROWS, 1, dtype=torch.long, device=device) for _ in range(2))
    rows = torch.export.Dim("R", min=1, max=MAX_ROWS)
    try:
        # torch.export makes modules that never run: skip generating and compiling their Python code.
        with _evaluation_mode(step), torch.no_grad(), _use_lazy_graph_module(True), _no_stack_traces():
            program = torch.export.export(
                step,
                examples,
                dynamic_shapes=({0: rows}, {0: rows}),
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
            make_functional(program.graph)
            if any(map(is_mutable, program.graph.nodes)):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", FutureWarning)  # torch warns about its own code
                    program = program.run_decompositions({})  # makes it functional, decomposes nothing
    except RuntimeError as error:
        raise ConversionError(f"{_place(error, step)} {_fault(error)}") from error
    return program


def _place(error: BaseException, step: nn.Module) -> str:
    """Return the name, class and line of the innermost module whose forward raised ``error``."""
    names = {id(module): name for name, module in step.named_modules()}
    place, trace = "the decode step", error.__traceback__
    while trace is not None:
        code, module = trace.tb_frame.f_code, trace.tb_frame.f_locals.get("self")
        if name := names.get(id(module)) if code.co_name == "forward" else None:
            line = linecache.getline(code.co_filename, trace.tb_lineno).strip()
            place = f"{name} ({type(module).__name__}, `{line}`)"
        trace = trace.tb_next
    return place


def _fault(error: RuntimeError) -> str:
    """Return what torch.export cannot capture, in plain words where its own are of its inner parts."""
    if isinstance(error, GuardOnDataDependentSymNode):
        return "takes a branch, or makes a tensor's size, by values of tensors: every row needs the same operators"
    return f"cannot be captured by torch.export: {' '.join(str(error).split())[:_LONGEST_FAULT]}"


def _bind_weights(step: nn.Module, program: ExportedProgram) -> dict[fx.Node, Weight]:
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    names |= signature.inputs_to_lifted_tensor_constants
    if signature.inputs_to_lifted_custom_objs:
        scripted = sorted(signature.inputs_to_lifted_custom_objs.values())
        raise ConversionError(f"the model keeps script objects, which have no place in a slice: {scripted}")
    weights = {}
    for node in program.graph.nodes:
        if node.op == "placeholder" and (fqn := names.get(node.name)) is not None:
            try:
                tensor = operator.attrgetter(fqn)(step)
            except AttributeError:  # made inside forward: torch.tensor(...)
                tensor = program.constants[fqn]
            weights[node] = Weight(fqn, tensor)
    return weights


def _same_tensor(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and a.layout == b.layout and a.shape == b.shape


def _drop_identities(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.args or not isinstance(source := node.args[0], fx.Node):
            continue
        idle = node.target is aten.dropout.default and node.args[2] is False
        idle |= node.target is aten.mul.Tensor and node.args[1] == 1.0 and isinstance(node.args[1], float)
        idle |= node.target in _IDENTITIES
        if idle and _same_tensor(source.meta["val"], node.meta["val"]):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _merge_duplicates(graph: fx.Graph, cut_ops: Collection[torch._ops.OpOverload]) -> None:
    """Merge equal operators. Layers often repeat work on positions; then one carried value serves all of them."""
    first: dict[tuple[object, str], fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target in cut_ops or not _is_function(node):
            continue
        known = first.setdefault((node.target, repr((node.args, node.kwargs))), node)
        if known is not node:
            node.replace_all_uses_with(known)
            graph.erase_node(node)


def _is_function(node: fx.Node) -> bool:
    """Return True if an operator gives the same results whenever it gets the same arguments."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem
    return torch.Tag.nondeterministic_seeded not in node.target.tags


def _check_count(calls: tuple[fx.Node, ...], cut_ops: Collection[torch._ops.OpOverload], expect: int | None) -> None:
    if calls and expect in (None, len(calls)):
        return
    places = ", ".join(module_path(c) or c.name for c in calls) or "none"
    wanted = "at least 1" if expect is None else str(expect)
    raise ConversionError(
        f"expected {wanted} {' and '.join(map(str, cut_ops))} operators, one per layer, but the captured step has "
        f"{len(calls)} (in: {places}). "
        "A layer without one (recurrent, linear attention) keeps state that no slice can carry."
    )


def capture(
    step: nn.Module,
    cut_ops: Collection[torch._ops.OpOverload],
    *,
    expect: int | None = None,
    prepare: Callable[[fx.Graph], None] | None = None,
) -> Capture:
    """Trace ``step(input_ids [R, 1], position_ids [R, 1]) -> logits [R, 1, V]`` with R free in 1..65536.

    ``prepare``: changes the traced graph before anything is read from it. The module is left unchanged. Raises
    ConversionError if it cannot be traced, if the number of ``cut_ops`` nodes is not ``expect``, or if a step writes to
    the module's own buffers.
    """
    program = _export(step)
    signature = program.graph_signature
    if written := sorted({**signature.buffers_to_mutate, **signature.user_inputs_to_mutate}.values()):
        raise ConversionError(f"a decode step writes to {written}: state outside the KV cache cannot be sliced")
    weights = _bind_weights(step, program)
    graph = program.graph
    _drop_identities(graph)
    if prepare is not None:
        prepare(graph)
    _merge_duplicates(graph, cut_ops)
    (results,) = graph.output_node().args
    if not isinstance(results, tuple) or len(results) != 1 or not isinstance(results[0], fx.Node):
        raise ConversionError("the decode step must return one tensor, the logits [R, 1, V]")
    inputs = tuple(n for n in graph.nodes if n.op == "placeholder" and n not in weights)
    rows = size_expression(inputs[0].meta["val"].shape[0])
    if rows is None or not rows.is_Symbol:
        raise ConversionError(f"the number of rows was fixed to {rows} while tracing: some operator depends on it")
    calls = tuple(n for n in graph.nodes if n.target in cut_ops)
    _check_count(calls, cut_ops, expect)
    return Capture(graph, weights, inputs, calls, results[0], rows)
