"""The house keeps its shape: arrows between packages, light imports, no code-bearing formats, small files."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeGuard

import pytest

from lamina.config.flag_groups import flag_name

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("lamina", "converter", "netstack")
# From the top: a room imports rooms of the storeys below it, and no others.
STOREYS = (
    ("cli",),  # lamina-launch
    ("tools",),  # plan, timeline, bench, check, drill, explain
    ("cli/common",),  # what sub-commands share
    ("server", "api/wrapped"),
    ("api",),  # LLM, AsyncLLM
    ("executor",),  # starts, connects and watches workers
    ("engine",),  # the loop
    ("scheduler",),  # policy of the driver
    ("workers/prefill",),
    ("workers/compute",),
    ("workers/memory",),
    ("workers",),  # what every worker process has
    ("grammar",),  # structured output
    ("models",),
    ("ops/rows",),
    ("ops/attention", "ops/collective", "ops/gemm", "ops/recurrence", "ops/sampling"),
    ("kv",),
    ("facts",),  # what a host or a model has
    ("observe",),
    ("lending",),  # what deployments lend each other
    ("protocol",),  # what processes send each other
    ("config",),  # options
    ("request",),
    ("env", "utils"),
    ("converter", "netstack"),
)
# The same of netstack, whose face hands names on.
NETWORK_STOREYS = (
    ("bench", "doctor"),
    ("auto", "checksum", "emulate", "loopback"),  # made of other transports
    ("gin", "mlx5"),  # NICs that a GPU drives
    ("cuda", "rdma"),
    ("host",),  # shared memory, TCP, one process
    ("schemes",),  # the table of transports: their names, none of their modules
    ("bootstrap",),  # how peers meet
    ("cached_file", "contract", "kernel_files", "own_python"),
)
HOUSES = {"lamina": STOREYS, "netstack": NETWORK_STOREYS}
FACES = ("__init__", "__main__")
POLICY = (
    "scheduler/scheduler.py", "scheduler/prefill_dispatch.py", "scheduler/slo_admission.py",
    "scheduler/scheduler_output.py",
    "scheduler/sequence.py",
    "scheduler/rotation/pipeline.py", "engine/tuning/tuner.py", "engine/tuning/round_time_model.py",
    "scheduler/kv_manager/offload_index.py", "scheduler/admission.py", "scheduler/batch.py",
    "scheduler/feature.py", "scheduler/feature_table.py", "scheduler/starts.py", "scheduler/prefill_placement.py",
    "scheduler/kv_manager/prefix_cache.py",
    "scheduler/sparsity/selection.py",
    "scheduler/kv_manager/allocator.py", "scheduler/preemption.py", "scheduler/prefill_grants.py",
    "scheduler/kv_manager/swap.py", "scheduler/step_timing.py", "scheduler/sampling_requests.py",
    "scheduler/sparsity/pruning.py",
    "scheduler/sparsity/reference_decode.py", "scheduler/sparsity/error_budget.py", "kv/sparsity.py",
    "protocol/sparse_layers.py", "scheduler/surviving_kv.py", "workers/memory/committed_tokens.py",
    "api/vllm_compat.py", "ops/sampling/sampling_settings.py", "protocol/blocks/block_tables.py",
    "protocol/blocks/block_counts.py", "config/partition.py", "protocol/codec.py",
    "protocol/kv_placement.py", "config/option.py", "config/engine_config.py", "config/topology.py",
    "config/conflicts.py", "config/resolve.py",
    "request/sampling_params.py", "request/unsupported_options.py", "request/outputs.py",
    "config/flat_options.py", "utils/cpu_cores.py", "executor/hosts/worker_placement.py", "executor/restart_budget.py",
    "executor/stall_detector.py", "kv/page_keys.py", "kv/pages.py", "kv/eviction_policy.py",
    "scheduler/sessions/session_table.py", "scheduler/sessions/session_turns.py",
    "scheduler/kv_manager/session_cache.py", "scheduler/kv_manager/prefetch.py",
    "scheduler/kv_manager/spill_placement.py", "protocol/loan_placement.py", "scheduler/conductor/__init__.py",
    "scheduler/conductor/routing.py", "scheduler/prefix_index.py", "scheduler/conductor/latency_model.py",
    "scheduler/conductor/queues.py", "scheduler/conductor/overload.py",
    "scheduler/sessions/context_overflow.py", "kv/fetch_window.py", "kv/layerwise_load.py",
    "protocol/blocks/extents.py", "lending/creditor.py", "lending/debtor.py",
    "lending/debt_graph.py", "lending/debt_ledger.py", "server/memory_budget.py",
    "server/memory_limits.py",
)  # fmt: skip


def sources(package: str) -> Iterator[Path]:
    for path in sorted((ROOT / package).rglob("*.py")):
        if not any(p.is_symlink() for p in path.parents if p != ROOT and ROOT in p.parents):
            yield path


class Facts(NamedTuple):
    """The parts of a file that tests look for, read once. An import comes with True if it is for types alone."""

    imports: list[tuple[ast.Import | ast.ImportFrom, bool]]
    classes: list[ast.ClassDef]
    sent_away: list[str]  # classes and functions whose docstring begins with the name of another file
    comparisons: list[ast.Compare]
    functions: list[tuple[ast.FunctionDef | ast.AsyncFunctionDef, int]]  # and the lines of each one's body
    refusals: list[ast.Raise | ast.Call]  # and calls of a parser's error


@cache
def facts(path: Path) -> Facts:
    tree, found = ast.parse(path.read_text()), Facts([], [], [], [], [], [])
    nodes = list(ast.walk(tree))
    typing = [n for n in nodes if isinstance(n, ast.If) and getattr(n.test, "id", "") == "TYPE_CHECKING"]
    for_types = {id(inner) for n in typing for inner in ast.walk(n)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.imports.append((node, id(node) in for_types))
        elif isinstance(node, ast.Compare):
            found.comparisons.append(node)
        elif is_refusal(node):
            found.refusals.append(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if re.match(r"See [`A-Z]|See (\w+\.)", ast.get_docstring(node) or ""):
                found.sent_away.append(node.name)
            if isinstance(node, ast.ClassDef):
                found.classes.append(node)
            else:
                found.functions.append((node, body_lines(node)))
    return found


def is_refusal(node: ast.AST) -> TypeGuard[ast.Raise | ast.Call]:
    return isinstance(node, ast.Raise) or (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "error"
    )


def base_of(path: Path, node: ast.ImportFrom) -> str:
    """Returns the absolute name of the module that a ``from`` import names."""
    package = list(path.relative_to(ROOT).with_suffix("").parts)
    if package[0] != "lamina":
        package.insert(0, "lamina")
    base = package[: len(package) - node.level] if node.level else []
    return ".".join([*base, *([node.module] if node.module else [])])


def imported(path: Path) -> Iterator[str]:
    for node, _ in facts(path).imports:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            yield base_of(path, node)


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([*([] if parts[0] == "lamina" else ["lamina"]), *(p for p in parts if p != "__init__")])


MODULES = frozenset(module_of(path) for package in PACKAGES for path in sources(package))


def targets(path: Path, *, types: bool = True) -> Iterator[str]:
    """Modules of this house that a file imports, lazily or not: of ``from a import b`` that is a.b where b is one.
    ``types``: those under TYPE_CHECKING too.
    """
    package = module_of(path).split(".")[: None if path.name == "__init__.py" else -1]
    for node, for_types in facts(path).imports:
        if for_types and not types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        else:
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = (f"{module}.{alias.name}" for alias in node.names)
            yield from (name if name in MODULES else module for name in names if {name, module} & MODULES)


@pytest.mark.parametrize(("package", "other"), [("converter", "netstack"), ("netstack", "converter")])
def test_converter_and_netstack_know_nobody(package: str, other: str) -> None:
    own = f"lamina.{package}"
    for path in sources(package):
        for name in imported(path):
            assert name.split(".")[0] not in (package, other), f"{path.name} imports a second copy: {name}"
            if name.split(".")[0] == "lamina":
                assert name == own or name.startswith(own + "."), f"{path.name} imports {name}"


def room_of_module(module: str) -> str:
    """Returns the package in which class names are unique: one with a line of its own, such as lamina.ops.attention."""
    parts = module.split(".")
    room = room_within("lamina", parts[1:]) if parts[0] == "lamina" else None
    return f"lamina.{room}" if room else ".".join(parts[:2])


def ambiguous(defined: Iterable[tuple[str, str]], imports: Iterable[tuple[str, str, str]]) -> list[str]:
    """Returns exported classes whose package has another class of that name.

    ``defined``: (module, class). ``imports``: (importing module, module, name); a package exports the classes that
    modules outside it import.
    """
    packages = Counter((room_of_module(module), name) for module, name in set(defined))
    exported = {
        (room_of_module(module), name) for at, module, name in imports if room_of_module(at) != room_of_module(module)
    }
    return sorted(f"{package}: {name}" for package, name in exported if packages[package, name] > 1)


def test_an_exported_class_has_a_name_of_its_own_in_its_package() -> None:
    files = [path for package in (*PACKAGES, "perf", "examples") for path in sources(package)]
    defined = [(module_of(path), node.name) for path in files for node in facts(path).classes]
    froms = [(p, node) for p in files for node, _ in facts(p).imports if isinstance(node, ast.ImportFrom)]
    imports = [(module_of(p), base_of(p, node), alias.name) for p, node in froms for alias in node.names]
    assert ambiguous(defined, imports) == []


def test_two_exported_classes_of_one_name_are_seen() -> None:
    twice = [("lamina.kv.a", "Page"), ("lamina.kv.b", "Page"), ("lamina.workers.memory.c", "Page")]
    assert ambiguous(twice, [("lamina.workers.memory.c", "lamina.kv.a", "Page")]) == ["lamina.kv: Page"]
    assert ambiguous(twice, [("lamina.kv.b", "lamina.kv.a", "Page")]) == []
    assert ambiguous(twice[1:], [("lamina.workers.memory.c", "lamina.kv.b", "Page")]) == []


def test_a_docstring_says_it_itself() -> None:
    """A reader of a method is not sent to another file for its first sentence."""
    sending = [
        f"{path.relative_to(ROOT)}: {name}"
        for package in PACKAGES
        for path in sources(package)
        for name in facts(path).sent_away
    ]
    assert sending == []


VAGUE = ("found", "mine")  # in these a reader looks for the noun of what they hold


def bound(code: str) -> Iterator[str]:
    """Names of variables, parameters, fields and attributes that ``code`` gives something to."""
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
                yield name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                yield name


@pytest.mark.parametrize("package", [*PACKAGES, "examples"])
def test_a_variable_is_called_by_what_it_holds(package: str) -> None:
    texts = ((path, path.read_text()) for path in sources(package))
    worded = ((path, text) for path, text in texts if re.search(rf"\b({'|'.join(VAGUE)})\b", text))
    assert [f"{path.relative_to(ROOT)}: {n}" for path, text in worded for n in bound(text) if n in VAGUE] == []


@pytest.mark.parametrize("vague", VAGUE)
def test_every_way_to_call_a_variable_is_seen(vague: str) -> None:
    binding = (
        "{} = 1", "a, (b, *{}) = c", "{} += 1", "{}: int", "({} := 1)", "[a for {} in b]", "for {} in a: ...",
        "with a as {}: ...", "self.{} = 1", "class A:\n    {}: int", "def f({}): ...", "def f(*, {}=1): ...",
        "def f(*{}): ...", "lambda {}: 1", "import a as {}", "try: ...\nexcept A as {}: ...",
        "match a:\n    case [{}]: ...", "match a:\n    case [*{}]: ...", "match a:\n    case {{**{}}}: ...",
    )  # fmt: skip
    assert [code for code in binding if vague not in bound(code.format(vague))] == []
    using = ("print({})", "a.{}", "f({}=1)", "'{}'", "{}_at = 1")
    assert [code for code in using if vague in bound(code.format(vague))] == []


def test_netstack_needs_no_torch() -> None:
    assert not [
        p.name for p in sources("netstack") for n in imported(p) if n.split(".")[0] in ("torch", "transformers")
    ]


@pytest.mark.parametrize("policy", POLICY)
def test_policy_imports_no_torch_and_no_io(policy: str) -> None:
    names = {n.split(".")[0] for n in imported(ROOT / "lamina" / policy)}
    assert not names & {"torch", "socket", "subprocess", "os", "threading", "time", "select"}


def feature_modules() -> set[str]:
    """Returns the modules of the scheduler's features."""
    return {
        module_of(path)
        for path in sources("lamina/scheduler")
        for node in facts(path).classes
        if any(isinstance(base, ast.Name) and base.id == "Feature" for base in node.bases)
    }


CORE = (
    "scheduler/scheduler.py", "scheduler/admission.py", "scheduler/preemption.py", "scheduler/batch.py",
    "scheduler/feature.py", "scheduler/feature_table.py", "scheduler/starts.py", "scheduler/scheduler_output.py",
    "scheduler/sequence.py", "scheduler/kv_manager/allocator.py", "engine/engine.py",
)  # fmt: skip


@pytest.mark.parametrize("core", CORE)
def test_the_scheduler_imports_no_feature(core: str) -> None:
    """The table of features is the factory's: `lamina/engine/scheduler_factory.py`."""
    assert len(feature_modules()) > 8
    assert feature_modules().isdisjoint(targets(ROOT / "lamina" / core))


# Words of features, with which no part of a name in the core begins, but for names that are listed with a reason.
FEATURE_WORDS = (
    "borrow", "loan", "lend", "lent", "spill", "shadow", "hidden", "reference", "session", "parity", "swap", "prun",
    "spars", "evicts", "migrat", "snapshot", "offload", "storage", "prefill_worker", "prefill_step", "prefill_stor",
)  # fmt: skip
FEATURE_NAMES: dict[str, set[str]] = {
    "scheduler/scheduler.py": set(),
    "scheduler/batch.py": set(),
    "scheduler/preemption.py": set(),
    "scheduler/feature.py": set(),
    "scheduler/feature_table.py": set(),
    "scheduler/scheduler_output.py": set(),
    # What sessions and sparsity know of a sequence goes with it through preemptions: one slot for each.
    "scheduler/sequence.py": {
        "SessionTurn", "sessions", "session_table", "sparsity",
        "is_migrating",  # each part of KvTransfer is set by one feature
    },
    "scheduler/admission.py": {"on_prefill_worker"},  # a feature fills in where the first rows are computed
    # A start says what it is. Layer groups have sparse layers, whatever drops their blocks.
    "scheduler/kv_manager/allocator.py": {"is_swapped", "sparse"},
    # The engine's users name sessions, and workers say what they have.
    "engine/engine.py": {"EngineSessions", "sessions", "session", "storage", "prefill_stores"},
}  # fmt: skip


def names_in(tree: ast.AST) -> set[str]:
    """Returns the names of variables, attributes, parameters and functions, and of what is imported."""
    names = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.ImportFrom(module=str(module)):
                names |= {*module.split("."), *(alias.asname or alias.name for alias in node.names)}
    return names


def names_of_features(tree: ast.AST) -> set[str]:
    """Returns the names with a feature's word."""
    words = re.compile(rf"(?:^|_)(?:{'|'.join(FEATURE_WORDS)})")
    snake = {name: re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower() for name in names_in(tree)}
    return {name for name, text in snake.items() if words.search(text)}


@pytest.mark.parametrize("core", FEATURE_NAMES)
def test_the_core_has_no_names_of_features(core: str) -> None:
    assert names_of_features(ast.parse((ROOT / "lamina" / core).read_text())) == FEATURE_NAMES[core]


def test_a_name_of_a_feature_is_found() -> None:
    using = "from a.sessions import B\nclass KvSpill: ...\ndef f(borrowed: int): s.is_hidden = g(is_migrating=1)\n"
    found = {"sessions", "KvSpill", "borrowed", "is_hidden", "is_migrating"}
    assert names_of_features(ast.parse(using + "blended = prefill_chunk = possession = evicted = 1")) == found


def test_the_scheduler_has_few_parameters() -> None:
    (scheduler,) = (c for c in facts(ROOT / "lamina/scheduler/scheduler.py").classes if c.name == "Scheduler")
    (init,) = (f for f in scheduler.body if isinstance(f, ast.FunctionDef) and f.name == "__init__")
    assert len([*init.args.args[1:], *init.args.kwonlyargs]) <= 8


def has_room(room: str) -> bool:
    return (ROOT / "lamina" / room).exists() or (ROOT / "lamina" / f"{room}.py").exists()


def storey_of(house: str, room: str) -> int:
    return next(number for number, rooms in enumerate(HOUSES[house]) if room in rooms)


def room_within(house: str, parts: Sequence[str]) -> str | None:
    """Returns the longest package of ``parts`` that has a line of its own, such as ops/attention."""
    rooms = {room for storey in HOUSES[house] for room in storey}
    return next((name for n in range(len(parts), 0, -1) if (name := "/".join(parts[:n])) in rooms), None)


def room_of(house: str, path: Path) -> str:
    parts = path.relative_to(ROOT / house).with_suffix("").parts
    return room_within(house, parts) or (parts[-1] if parts[-1] in FACES else parts[0])


@pytest.mark.parametrize("house", HOUSES)
def test_every_room_has_a_storey(house: str) -> None:
    rooms = {room_of(house, path) for path in sources(house)} - {*FACES}
    assert rooms <= {room for storey in HOUSES[house] for room in storey}, f"give the new room of {house} a storey"


def runs_up(house: str, room: str, name: str) -> bool:
    """Tells whether ``room`` imports module ``name`` from a room that is not below it."""
    above = ["lamina"] if house == "lamina" else ["lamina", house]
    parts = name.split(".")
    if parts[: len(above)] != above:
        return False
    if parts == above:
        return house != "lamina"  # lamina's face is lazy; netstack's imports rooms
    other = room_within(house, parts[len(above) :])
    return other is not None and other != room and storey_of(house, other) <= storey_of(house, room)


@pytest.mark.parametrize("house", HOUSES)
def test_imports_run_down(house: str) -> None:
    for path in sources(house):
        room = room_of(house, path)
        if room in FACES:  # they hand names on
            continue
        up = [name for name in targets(path) if runs_up(house, room, name)]
        assert not up, (
            f"{path.relative_to(ROOT)} imports {', '.join(up)}, which is not below {room}: move what both need into a "
            f"room below, or hand it in"
        )


def test_a_run_upwards_is_seen() -> None:
    assert runs_up("lamina", "workers/memory", "lamina.workers.compute.compute_worker")
    assert runs_up("lamina", "workers", "lamina.workers.memory.kv_store")
    assert runs_up("lamina", "ops/gemm", "lamina.ops.attention")
    assert not runs_up("lamina", "workers/compute", "lamina.workers.memory.kv_store")
    assert not runs_up("lamina", "workers/memory", "lamina.workers.memory.kv_store")
    assert runs_up("netstack", "host", "lamina.netstack.cuda.driver")
    assert runs_up("netstack", "rdma", "lamina.netstack.cuda")
    assert runs_up("netstack", "emulate", "lamina.netstack")
    assert not runs_up("netstack", "rdma", "lamina.netstack.host.tcp")


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other, and those on the way from one such circle to another."""
    left = dict(graph)
    while True:
        wanted = set().union(*left.values()) if left else set()
        ends = {m for m in left if not left[m] & left.keys() or m not in wanted}
        if not ends:
            return sorted(left)
        left = {m: left[m] - ends for m in left.keys() - ends}


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    """Imports within functions count, those for types alone do not."""
    files = [path for package in PACKAGES for path in sources(package)]
    faces = {"lamina", "lamina.converter", "lamina.netstack"}  # they hand names on
    graph = {module_of(path): set(targets(path, types=False)) - {module_of(path)} - faces for path in files}
    assert circles(graph) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == ["b", "c"]


def test_sampling_knows_messages_and_nobody_else() -> None:
    messages = ("lamina.request", "lamina.protocol.control", "lamina.protocol.step_plan")
    for path in sources("lamina/ops/sampling"):
        names = [n for n in imported(path) if n.startswith("lamina")]
        assert not [n for n in names if not n.startswith(("lamina.ops.sampling", *messages))], path


def test_import_is_light() -> None:
    code = (
        "import sys, lamina, lamina.netstack; print(*(m for m in ('torch', 'ray', 'transformers') if m in sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.split() == []


def test_top_level_folders_are_not_second_packages() -> None:
    for name in ("converter", "netstack"):
        run = subprocess.run(
            [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
        assert run.returncode == 1
        assert f"import lamina.{name}" in run.stderr


def test_no_code_bearing_format() -> None:
    for package in PACKAGES:
        for path in sources(package):
            names = {n.split(".")[0] for n in imported(path)}
            assert not names & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}, path
            assert "weights_only=False" not in path.read_text(), path


def test_models_are_named_in_models_only() -> None:
    """And where the planner and its commands show the paper's models, and the server names other servers."""
    families = ("llama", "gpt2", "gpt_neox", "mistral", "qwen", "gemma", "falcon", "bloom", "mixtral", "deepseek")
    for path in (path for package in PACKAGES for path in sources(package)):
        if path.relative_to(ROOT).parts[:2] in [("lamina", room) for room in ("cli", "models", "server", "tools")]:
            continue
        text = path.read_text()
        code = ast.unparse(ast.parse(text)).lower() if any(f in text.lower() for f in families) else ""
        assert not [f for f in families if f in code], path


def test_schemes_are_compared_in_netstack_only() -> None:
    """All but cuda, which is the name of a kind of device, too."""
    schemes = ("shm", "tcp", "loopback", "verbs", "mlx5", "gin")
    for path in sources("lamina"):
        text = path.read_text()
        for node in facts(path).comparisons if any(f'"{s}"' in text for s in schemes) else ():
            compared = ast.unparse(node)
            assert not any(f"'{s}'" in compared for s in schemes), f"{path}: {compared}"


@pytest.mark.parametrize("package", PACKAGES)
def test_files_are_small(package: str) -> None:
    long = {p.name: n for p in sources(package) if (n := len(p.read_text().splitlines())) > 600}
    assert not long


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Counts the lines of a function after its signature and its docstring."""
    body = node.body[ast.get_docstring(node) is not None :]
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


@pytest.mark.parametrize("package", PACKAGES)
def test_functions_are_short(package: str) -> None:
    long = {f"{p.name}: {node.name}": n for p in sources(package) for node, n in facts(p).functions if n > 60}
    assert not long


@pytest.mark.parametrize("package", ["lamina", "converter", "netstack", "csrc", "tests"])
def test_a_folder_has_at_most_24_files(package: str) -> None:
    """A folder is read at a glance. Only files in git count, without faces and stubs of native modules."""
    kept = subprocess.run(["git", "ls-files", package], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folders = Counter(Path(f).parent for f in kept.split() if Path(f).stem not in FACES and not f.endswith(".pyi"))
    assert {str(folder): count for folder, count in folders.items() if count > 24} == {}


def test_architecture_names_files_that_are_there() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert max(map(len, text.splitlines())) <= 130
    for name in re.findall(r"`([\w.]+/[\w/.]*)`", text):  # a path starts at lamina/ or at the root
        assert (ROOT / name).exists() or (ROOT / "lamina" / name).exists(), name
    for name in re.findall(r"`(\w+\.(?:py|cpp|h))`", text):  # in the folder that was named last
        assert any(path.name == name for top in (*PACKAGES, "csrc") for path in (ROOT / top).rglob("*.*")), name
    drawn = text[text.index("```") : text.index("```", text.index("```") + 3)]
    for storey in STOREYS[:-3]:
        assert all(re.search(rf"^.*\b{room}\b", drawn, re.MULTILINE) for room in storey if has_room(room)), storey


def classes_that_are_not_there(document: str) -> list[tuple[str, str]]:
    """Lists the (class, method) names in backticks that no class of the product has."""
    nodes = [node for package in PACKAGES for path in sources(package) for node in facts(path).classes]
    known = {node.name: {n.name for n in node.body if isinstance(n, ast.FunctionDef)} for node in nodes}
    named = re.findall(r"`([A-Z]\w*[a-z]\w*)(?:\.(\w+))?`", (ROOT / document).read_text())
    assert named
    return [(c, m) for c, m in named if c not in known or (m and m not in known[c])]


def test_architecture_names_classes_and_methods_that_are_there() -> None:
    assert classes_that_are_not_there("ARCHITECTURE.md") == []


def test_the_glossary_has_60_to_80_terms_of_a_line_each_and_names_classes_that_are_there() -> None:
    assert classes_that_are_not_there("docs/glossary.md") == []
    lines = [line for line in (ROOT / "docs/glossary.md").read_text().splitlines()[3:] if line and line[0] != "#"]
    assert [line for line in lines if not re.fullmatch(r"- \*\*[^*]+\*\*: [^;]+(; [^;]+)*\.", line)] == []
    terms = [line[4 : line.index("**:")] for line in lines]
    assert len({*terms}) == len(terms)
    assert 60 <= len(terms) <= 80


def test_modules_of_tests_have_names_of_their_own() -> None:
    """pytest imports modules by their names alone, unless they are parts of packages: a second one would not run."""
    alone = [p for p in (ROOT / "tests").rglob("*.py") if not (p.parent / "__init__.py").exists()]
    names = [p.name for p in alone if p.name != "conftest.py"]
    assert [n for n in sorted(set(names)) if names.count(n) > 1] == []


def test_no_folder_of_tests_hides_the_product() -> None:
    """Processes under test have ``tests`` on their path."""
    assert not (ROOT / "tests" / "lamina").exists()


# Refusals that name two flags, and are no lines of lamina/config/conflicts.py: with other values, all go together.
OUTSIDE_THE_TABLE: dict[str, tuple[set[str], ...]] = {
    "their numbers have to agree": (
        {"--memory-addresses", "--memory-workers"},
        {"--memory-weights", "--memory-workers"},
        {"--memory-weights", "--tensor-parallel-size"},
        {"--tensor-parallel-size", "--memory-workers"},
        {"--tensor-parallel-size", "--spare-compute"},
        {"--prefill-pipeline", "--prefill-workers"},
        {"--batch-size", "--max-num-seqs"},
    ),
    "the model decides, and the other flag is the fix": (
        {"--kv-parity", "--memory-workers"},
        {"--kv-sparsity", "--memory-workers", "--memory-weights"},
        {"--max-model-len", "--hf-overrides"},
    ),
    "memory or time is too little, and the flags say what takes it": (
        {"--kv-cache-memory-bytes", "--max-model-len"},
        {"--kv-cache-memory-bytes", "--max-model-len", "--partition", "--lending"},
        {"--kv-cache-memory-bytes", "--lending"},
        {"--kv-cache-memory-bytes", "--pipeline"},
        {"--context-overflow", "--max-model-len"},
        {"--pipeline", "--max-model-len"},
        {"--prefill-kv-memory", "--max-model-len"},
        {"--prefill-workers", "--max-model-len"},
        {"--pipeline", "--prefill-workers"},
        {"--pipeline", "--max-num-seqs", "--prefill-chunk"},
    ),
    "the host decides": (
        {"--collective", "--tensor-parallel-size"},
        {"--compute-device", "--tensor-parallel-size"},
        {"--memory-device", "--attention-backend"},
        {"--host", "--port"},
    ),
    "one of them is missing": ({"--prompt", "--prompt-file"}, {"--trace", "--devices", "--calibrate"}),
    "what is in a file decides": ({"--file", "--key-file"}, {"--rate", "--trace"}),
    "an error is told by another command's names": ({"--prefill-policy", "--kvcache-balancing-threshold"},),
}


def flags_in(node: ast.AST) -> Iterator[str]:
    """Yields the flags that a text names: written out, or by the name of their option."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield from re.findall(r"--[a-z][a-z-]+", inner.value)
        elif isinstance(inner, ast.Call) and ast.unparse(inner.func) in ("flag_name", "flag_text", "with_value"):
            option = inner.args[0]
            yield flag_name(option.value).split()[0] if isinstance(option, ast.Constant) else ast.unparse(inner)


def pairs_refused(refusals: Iterable[ast.AST]) -> Iterator[set[str]]:
    """Yields the flags of each refusal that names two or more, and is no line of the table of conflicts."""
    for node in refusals:
        if len(flags := {*flags_in(node)}) > 1 and not re.search(r"\b(conflict|need)_text\(", ast.unparse(node)):
            yield flags


def test_options_that_exclude_each_other_are_refused_by_the_table_alone() -> None:
    allowed = [flags for each in OUTSIDE_THE_TABLE.values() for flags in each]
    found = [(str(p.relative_to(ROOT)), flags) for p in sources("lamina") for flags in pairs_refused(facts(p).refusals)]
    assert [(path, flags) for path, flags in found if flags not in allowed] == []
    assert [flags for flags in allowed if flags not in (each for _, each in found)] == [], "no code refuses these"


def test_a_refusal_outside_the_table_is_found() -> None:
    source = """
if a: raise ValueError(f"--cores {a} is not for --transport {b}")
if a: raise ConfigError(f"{flag_name(name)} is not for --kv-sparsity none")
if a: parser.error(f"{flag_name('kv_budget')} needs --compute-device")
if a: raise ValueError(conflict_text("--cores", "--transport loopback"))
if a: raise ValueError("--cores must be a list, not --")
"""
    assert [*pairs_refused(filter(is_refusal, ast.walk(ast.parse(source))))] == [
        {"--cores", "--transport"},
        {"flag_name(name)", "--kv-sparsity"},
        {"--kv-sparsity", "--compute-device"},
    ]


def features_reached(tree: ast.AST) -> list[str]:
    """Returns the expressions that take a scheduler's features, or an engine's, from outside."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "features")
    return sorted(ast.unparse(node) for node in nodes if ast.unparse(node.value) != "self")


def test_the_engine_alone_reaches_for_features_of_the_scheduler() -> None:
    """Others ask the engine: ``Engine.sessions``, ``Engine.scheduler_stats``, or a function of its package."""
    paths = [path for path in sources("lamina") if path.relative_to(ROOT).parts[1] != "engine"]
    found = {str(path.relative_to(ROOT)): features_reached(ast.parse(path.read_text())) for path in paths}
    assert {path: reached for path, reached in found.items() if reached} == {}


def test_a_reach_for_a_feature_is_found() -> None:
    source = "self.features.get(A)\nengine.scheduler.features[B].close()\nfor f in self._engine.features: f.stop()"
    assert features_reached(ast.parse(source)) == ["engine.scheduler.features", "self._engine.features"]
