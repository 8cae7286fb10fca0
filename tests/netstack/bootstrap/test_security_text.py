"""SECURITY.md names tests and files: they are there."""

from __future__ import annotations

import ast
import re

from wiring import ROOT

TEXT = (ROOT / "SECURITY.md").read_text()


def test_every_named_test_exists() -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    assert len(named) >= 6
    assert not {name for name in named if f"def {name}(" not in tests}


def marks_of(name: str) -> set[str]:
    """The marks of a test, or of its file."""
    marks = set[str]()
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text()
        if f"def {name}(" in text:
            tree = ast.parse(text)
            ours = [f for f in tree.body if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) and f.name == name]
            file = [
                a.value for a in tree.body if isinstance(a, ast.Assign) and ast.unparse(a.targets[0]) == "pytestmark"
            ]
            for node in [decorator for f in ours for decorator in f.decorator_list] + file:
                marks |= set(re.findall(r"pytest\.mark\.(\w+)", ast.unparse(node)))
    return marks


def test_every_named_test_runs_where_ci_runs_or_its_claim_says_that_it_is_unverified() -> None:
    """CI runs all tests but these marks'. Claims of RDMA are proven in a guest, and say what a card has not shown."""
    for claim in re.split(r"\n(?=- |\n)", TEXT):
        for name in re.findall(r"`(test_\w+)`", claim):
            marks = marks_of(name)
            assert not marks & {"xfail", "skip", "slow", "gpu"}, name
            assert not marks & {"rdma", "vm"} or "unverified on a card" in claim, name


def test_every_named_file_exists() -> None:
    named = set(re.findall(r"`((?:netstack|csrc|tests|lamina)/[\w./]+)`", TEXT))
    assert len(named) >= 10
    assert not {name for name in named if not (ROOT / name).exists()}


def test_the_table_has_each_transport_and_says_of_each_whether_others_can_read_it() -> None:
    from lamina.netstack.gin.gin import GinFabric
    from lamina.netstack.host.tcp import TcpFabric
    from lamina.netstack.mlx5.mlx5 import Mlx5Fabric
    from lamina.netstack.rdma.verbs import VerbsFabric
    from lamina.netstack.schemes import SCHEMES

    table = TEXT.partition("| transport | peers are")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    encrypted = {(scheme, "beyond" in row[0]): row[3] for row in rows for scheme in re.findall(r"`([\w-]+)", row[0])}
    assert {scheme for scheme, _ in encrypted} >= {*SCHEMES}
    for kind in (VerbsFabric, Mlx5Fabric, GinFabric):
        assert (encrypted[kind.scheme, False] == "yes") is kind.hides(object.__new__(kind), "10.0.0.1")
    tcp = TcpFabric(b"k" * 32)
    assert (encrypted["tcp", True] == "yes") is tcp.hides("10.0.0.1")
    assert (encrypted["tcp", False] == "yes") is tcp.hides("127.0.0.1")


def test_the_limits_are_the_real_ones() -> None:
    from lamina.netstack.bootstrap.listener import HALF_OPEN_MAX, HANDSHAKE_S

    assert f"at most {HALF_OPEN_MAX} half-open peers, {HANDSHAKE_S:g} s each" in TEXT
