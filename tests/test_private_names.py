"""Tests use public names of the product alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from test_house import PACKAGES, ROOT

# Attributes with an underscore that are public, or that belong to torch, transformers and the standard library.
NOT_OURS = frozenset((
    "_replace", "_asdict", "_fields", "_fields_",  # of named tuples and ctypes
    "_exit", "_actions", "_create_unverified_context",  # of os, argparse, ssl
    "_C", "_ops", "_schema", "_version", "_buffers", "_grouped_mm",  # of torch
    "_distributed_c10d", "_Options", "_devices", "_threads", "_timeout", "_set_default_timeout",  # its process groups
    "_attn", "_attn_implementation", "_experts_implementation", "_global_mapping",  # of transformers
    "_keep_in_fp32_modules_strict", "_dequantize_fp8_weight",
))  # fmt: skip


def is_private(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last.startswith("_") and not last.startswith("__") and last not in NOT_OURS


def private_uses(tree: ast.AST) -> Iterator[str]:
    """Yields the private names of other objects that a test uses. Its own are those of self, cls and super."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.Attribute(value=ast.Name(id="self" | "cls"))
                | ast.Attribute(value=ast.Call(func=ast.Name(id="super")))
            ):
                continue
            case ast.Attribute(attr=name) if is_private(name):
                yield name
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in PACKAGES:
                yield from (alias.name for alias in node.names if is_private(alias.name))
            case ast.Call(func=ast.Attribute(attr=call) | ast.Name(id=call)) if call.endswith("attr"):
                names = (a.value for a in node.args[:2] if isinstance(a, ast.Constant) and isinstance(a.value, str))
                yield from filter(is_private, names)


def test_tests_use_no_private_members_of_the_product() -> None:
    paths = sorted((ROOT / "tests").rglob("*.py"))
    found = [f"{path}: {name}" for path in paths for name in private_uses(ast.parse(path.read_text()))]
    assert found == [], "test what a user sees, or make the name public where it is a part of its contract"


@pytest.mark.parametrize(
    "code",
    [
        "engine._requests",
        "engine.scheduler._in_flight.clear()",
        "from lamina.api.frontend import _checked_limit",
        "from netstack.auto import _name",
        "monkeypatch.setattr(Engine, '_roll_back', wrong)",
        "monkeypatch.setattr('lamina.tools.plan.model_facts._captured', None)",
        "getattr(worker, '_store')",
    ],
)
def test_every_private_use_is_found(code: str) -> None:
    assert list(private_uses(ast.parse(code))) != []


@pytest.mark.parametrize(
    "code",
    [
        "self._engine", "super()._run()", "plan._replace(step=1)", "os._exit(1)", "from lamina import __version__",
        "monkeypatch.setattr(Worker, '__init__', made)", "torch._C.x", "from random import _inst", "engine.requests",
    ],
)  # fmt: skip
def test_what_is_ones_own_or_public_is_no_private_use(code: str) -> None:
    assert list(private_uses(ast.parse(code))) == []
