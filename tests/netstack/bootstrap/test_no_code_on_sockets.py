"""Bytes, numbers, JSON or msgpack are all that comes from a socket: nothing in the sources can turn it into code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from wiring import ROOT

MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "jsonpickle", "multiprocessing", "xmlrpc", "code"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
METHODS = {
    "send_pyobj", "recv_pyobj", "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list",
    "send_object_list", "recv_object_list", "unsafe_load", "full_load", "load_module", "exec_module",
}  # fmt: skip
NATIVE = re.compile(r"\b(dlopen|dlsym|system|popen|exec[lv]p?e?|PyRun_\w+|PyEval_\w+Code\w*|PyMarshal_\w+)\(")


def offences(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in MODULES:
            yield node.module or ""
        elif isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name) and function.id in BUILTINS:
                yield function.id
            elif isinstance(function, ast.Attribute):
                owner = function.value.id if isinstance(function.value, ast.Name) else ""
                if function.attr in METHODS or (owner, function.attr) in {("torch", "load"), ("yaml", "load")}:
                    yield f"{owner}.{function.attr}"
            loose = {"allow_pickle": True, "weights_only": False, "shell": True}
            for keyword in node.keywords:
                if keyword.arg in loose and ast.unparse(keyword.value) == str(loose[keyword.arg]):
                    yield f"{keyword.arg}={loose[keyword.arg]}"


@pytest.mark.long(but=["converter", "netstack"])
@pytest.mark.parametrize("package", ["lamina", "converter", "netstack"])
def test_no_format_that_bears_code(package: str) -> None:
    found = {
        str(path.relative_to(ROOT)): names
        for path in (ROOT / package).rglob("*.py")
        if (names := list(offences(path.read_text())))
    }
    assert not found


# libcrypto, libibverbs and libmlx5, by names that no peer has a say in
LOADING = {(file, call) for file in ("dynamic.h",) for call in ("dlopen(", "dlsym(")}


def test_native_code_runs_nothing_and_loads_three_libraries_alone() -> None:
    folder = ROOT / "csrc" / "netstack"
    sources = [path for ext in ("*.h", "*.cpp", "*.cu") for path in folder.rglob(ext)]
    assert len(sources) > 10
    assert {(path.name, found[0]) for path in sources for found in NATIVE.finditer(path.read_text())} == LOADING
    assert NATIVE.search("void* f = dlopen(name)")
    named = {name for path in sources for name in re.findall(r'"(lib\w+)\.so', path.read_text())}
    assert named == {"libcrypto", "libibverbs", "libmlx5"}


@pytest.mark.parametrize(
    "text",
    [
        "import pickle", "from multiprocessing import connection", "import xmlrpc.client", "eval(data)", "exec(data)",
        "sock.recv_pyobj()", "dist.broadcast_object_list(x)", "torch.load(f)", "numpy.load(f, allow_pickle=True)",
        "yaml.load(text)", "subprocess.run(text, shell=True)",
    ],
)  # fmt: skip
def test_the_look_can_fail(text: str) -> None:
    assert list(offences(text))
    assert not list(offences("import json\nmodel.eval()\nyaml.safe_load(text)\njson.loads(data)"))
