"""An object gets its collaborators and callbacks when it is made, and no later."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache

import pytest
from test_house import ROOT, facts, sources

DATA_BASES = {"Struct", "NamedTuple", "Enum", "Exception", "ValueError", "RuntimeError", "OSError"}
LOOKUPS = {"get", "pop", "popleft", "setdefault"}  # they return an item of what they are called on
# The collaborators that others may set, by file.
ALLOWED = {
    # Starlette hands objects to routes in this way.
    "lamina/server/app.py": ["app.state.service"],
}
# The setters that others may call, by file.
SET_BY_METHOD: dict[str, list[str]] = {}
ROOMS = sorted({path.relative_to(ROOT / "lamina").parts[0] for path in sources("lamina")})


def is_data(node: ast.ClassDef) -> bool:
    names = [ast.unparse(n).split("(")[0].split(".")[-1] for n in (*node.decorator_list, *node.bases)]
    return "dataclass" in names or not DATA_BASES.isdisjoint(names)


def pairs(assign: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    for target in assign.targets:
        if isinstance(target, ast.Tuple) and isinstance(assign.value, ast.Tuple):
            yield from zip(target.elts, assign.value.elts, strict=False)
        else:
            yield from ((t, assign.value) for t in (target.elts if isinstance(target, ast.Tuple) else [target]))


def kind_of(annotation: ast.expr) -> str:
    """Returns the text of a type: of Annotated[type, ...], the type."""
    match annotation:
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[kind, *_])):
            return ast.unparse(kind)
    return ast.unparse(annotation)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, str]:
    every = (*function.args.args, *function.args.kwonlyargs)
    return {each.arg: kind_of(each.annotation) for each in every if each.annotation}


def fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yields the attributes of a class with what is known of their types: an annotation, or what makes them."""
    for part in node.body:
        match part:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=kind):
                yield name, kind_of(kind)
            case ast.FunctionDef(returns=ast.expr() as kind) if any(
                "property" in ast.unparse(d) for d in part.decorator_list
            ):
                yield part.name, kind_of(kind)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                types = parameters(part)
                for inner in ast.walk(part):
                    match inner:
                        case ast.AnnAssign(target=ast.Attribute(value=ast.Name(id="self"), attr=name), annotation=kind):
                            yield name, kind_of(kind)
                        case ast.Assign():
                            yield from made_fields(inner, types)


def made_fields(assign: ast.Assign, types: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields the attributes of self that are assigned. ``types``: of the method's parameters."""
    for target, value in pairs(assign):
        match target:
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                parts = value.values if isinstance(value, ast.BoolOp) else [value]
                for part in parts:
                    match part:
                        case ast.Lambda():
                            yield name, "Callable"
                        case ast.Call(func=func):
                            yield name, ast.unparse(func)
                        case _:
                            yield name, types.get(ast.unparse(part), "")


def words(kind: str) -> set[str]:
    return set(re.findall(r"\w+", kind))


def results(node: ast.ClassDef) -> Iterator[tuple[str, set[str]]]:
    """Yields the methods of a class with the words of the types that they return."""
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef) and inner.returns is not None:
            yield inner.name, words(kind_of(inner.returns))


def is_code(statement: ast.stmt) -> bool:
    return not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))


def setters(node: ast.ClassDef) -> Iterator[tuple[str, set[str]]]:
    """Yields the methods of a class that only assign parameters to attributes, with the words of their types."""
    for method in node.body:
        if not isinstance(method, ast.FunctionDef) or method.decorator_list or method.name.startswith("__"):
            continue
        types, (*before, last) = parameters(method), method.body
        if isinstance(last, ast.Assign) and not any(map(is_code, before)):
            values = {ast.unparse(value) for target, value in pairs(last) if isinstance(target, ast.Attribute)}
            if values and len(values) == len([*pairs(last)]) and values <= types.keys():
                yield method.name, set[str]().union(*(words(types[value]) for value in values))


class Census:
    """All classes of the library, by the words of types. ``kinds``: by attribute, in every class. ``by_class``: in each
    one. ``results``: what its methods return. ``setters``: of each class.
    """

    def __init__(self) -> None:
        classes = [node for path in sources("lamina") for node in facts(path).classes]
        self.bases = {node.name: {ast.unparse(base) for base in node.bases} for node in classes}
        self.kinds: dict[str, set[str]] = {}
        self.by_class: dict[str, dict[str, set[str]]] = {}
        self.results = {node.name: dict(results(node)) for node in classes}
        self.setters = {node.name: dict(setters(node)) for node in classes}
        self._active = {"Callable"}
        for node in classes:
            own = self.by_class.setdefault(node.name, {})
            for name, kind in fields(node):
                own.setdefault(name, set()).update(words(kind))
                self.kinds.setdefault(name, set()).update(words(kind))
            acts = any(isinstance(inner, ast.FunctionDef) for inner in node.body)
            if any("Callable" in kinds for kinds in own.values()) if is_data(node) else acts:
                self._active.add(node.name)

    def kinds_in(self, owner: str, name: str) -> set[str]:
        """Returns the types of an attribute of a class, or of its bases."""
        inherited = (self.kinds_in(base, name) for base in self.bases.get(owner, ()))
        return self.by_class.get(owner, {}).get(name, set()).union(*inherited)

    def is_collaborator(self, name: str, owners: set[str]) -> bool:
        """Tells whether an attribute is a callback or an object that acts. ``owners``: the types of the object that has
        it, as far as they are known; none: any class.
        """
        if not owners:
            return not self._active.isdisjoint(self.kinds.get(name, ()))
        return any(not self._active.isdisjoint(self.kinds_in(owner, name)) for owner in owners)

    def is_setter(self, name: str, owners: set[str], *, is_new: bool) -> bool:
        """Tells whether a method sets a collaborator, or anything of an object that ``is_new``. ``owners``: above."""
        found = [self.setters.get(owner, {}).get(name) for owner in owners or self.setters]
        return any(kinds is not None and (is_new or not self._active.isdisjoint(kinds)) for kinds in found)


@cache
def census() -> Census:
    return Census()


def types_of(value: ast.expr, known: Mapping[str, set[str]], owner: str) -> set[str]:
    """Returns the words of a value's type; none if it is unknown."""
    match value:
        case ast.Name(id="self"):
            return {owner} if owner else set()
        case ast.Name(id=name):
            return known.get(name, set())
        case ast.Call(func=func) if ast.unparse(func).split(".")[-1] in census().bases:
            return {ast.unparse(func).split(".")[-1]}
        case ast.Call(func=ast.Attribute(value=inner, attr=name)):
            owners = types_of(inner, known, owner)
            classes = owners or census().results.keys()
            made = set[str]().union(*(census().results.get(each, {}).get(name, ()) for each in classes))
            return made or (owners if name in LOOKUPS else set())
        case ast.Attribute(value=inner, attr=name):
            owners = types_of(inner, known, owner)
            exact = set[str]().union(*(census().kinds_in(each, name) for each in owners))
            return exact or (set() if owners else census().kinds.get(name, set()))
        case ast.Subscript(value=inner):
            return types_of(inner, known, owner)
    return set()


class Reader:
    """Reads a file statement by statement. ``late``: the assignments of collaborators to other objects than self.
    ``called``: the calls of methods that only set them, or that set anything of an object that the same function makes.
    """

    def __init__(self, own: frozenset[str]) -> None:
        """``own``: names that are data in this file."""
        self.late, self.called = list[str](), list[str]()
        self._own, self._made = own, set[str]()

    def read(self, statements: Iterable[ast.AST], known: dict[str, set[str]], owner: str) -> None:
        """``known``: the types of variables. ``owner``: the class that these statements belong to."""
        for node in statements:
            inner, within = known, owner
            match node:
                case ast.ClassDef(name=name):
                    within = name
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    self._made = set()
                    inner = known | {name: words(kind) for name, kind in parameters(node).items()}
                case ast.For(target=ast.Name(id=name), iter=items):
                    known[name] = types_of(items, known, owner)
                case ast.If(test=test) | ast.While(test=test):
                    for each in ast.walk(test):
                        if isinstance(each, ast.NamedExpr):
                            known[each.target.id] = types_of(each.value, known, owner)
                case ast.AnnAssign(target=ast.Name(id=name), annotation=kind):
                    known[name] = words(kind_of(kind))
                case ast.Assign():
                    self._assign(node, known, owner)
                case ast.Expr(value=ast.Call(func=ast.Attribute(value=holder, attr=name))):
                    text = ast.unparse(holder)
                    is_new = any(text == made or text.startswith(made + ".") for made in self._made)
                    if text != "self" and census().is_setter(name, types_of(holder, known, owner), is_new=is_new):
                        self.called.append(f"{text}.{name}")
            for part in ("body", "orelse", "finalbody", "handlers", "cases"):
                self.read(getattr(node, part, ()), inner, within)

    def _assign(self, node: ast.Assign, known: dict[str, set[str]], owner: str) -> None:
        for target, value in pairs(node):
            if isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] in census().bases:
                self._made.add(ast.unparse(target))
            match target:
                case ast.Name(id=name):
                    known[name] = types_of(value, known, owner)
                case ast.Attribute(value=ast.Name(id="self" | "cls")):
                    pass
                case ast.Attribute(value=holder, attr=name) if name not in self._own:
                    if census().is_collaborator(name, types_of(holder, known, owner)):
                        self.late.append(ast.unparse(target))


def read(code: str, own: frozenset[str] = frozenset()) -> Reader:
    """Reads a file. ``own``: names that are data here."""
    reader = Reader(own)
    reader.read(ast.parse(code).body, {}, "")
    return reader


@pytest.mark.parametrize("room", ROOMS)
def test_no_object_gets_a_collaborator_from_outside_after_it_was_made(room: str) -> None:
    """Fields of data that the same file defines may be anything."""
    late = {}
    for path in (p for p in sources("lamina") if p.relative_to(ROOT / "lamina").parts[0] == room):
        own = frozenset(name for node in facts(path).classes if is_data(node) for name, _ in fields(node))
        if names := read(path.read_text(), own).late:
            late[str(path.relative_to(ROOT))] = names
    allowed = {file: names for file, names in ALLOWED.items() if file.split("/")[1] == room}
    assert late == allowed


@pytest.mark.parametrize(
    ("source", "late"),
    [
        ("engine.executor, engine.idle = wire, False\nself.executor = wire", ["engine.executor"]),
        ("self._admission.decision_log = None", ["self._admission.decision_log"]),
        ("for user in (a, b):\n    user.executor = wire", ["user.executor"]),
        ("def f(engine: Engine):\n    engine.executor = wire", ["engine.executor"]),
        ("def f(wire: WorkerExecutor):\n    wire.executor = 1", []),  # it has none
        ("if engine := Engine():\n    engine.executor = wire", ["engine.executor"]),
        ("def f(llm: LLM):\n    llm.engine.executor = wire", ["llm.engine.executor"]),
        ("def f(session: SessionState):\n    session.keys = []", []),  # those of a PrefixCache are a collaborator
        ("def f(config: Any):\n    config.model = None", []),  # an object of others
    ],
)  # fmt: skip
def test_a_collaborator_that_is_set_from_outside_is_found(source: str, late: list[str]) -> None:
    assert read(source).late == late


@pytest.mark.parametrize("room", ROOMS)
def test_no_method_sets_what_a_constructor_should_be_given(room: str) -> None:
    called = {}
    for path in (p for p in sources("lamina") if p.relative_to(ROOT / "lamina").parts[0] == room):
        if names := read(path.read_text()).called:
            called[str(path.relative_to(ROOT))] = names
    assert called == {file: names for file, names in SET_BY_METHOD.items() if file.split("/")[1] == room}


@pytest.mark.parametrize(
    ("source", "called"),
    [
        ("def f():\n    scheduler = Scheduler()\n    scheduler.set_num_batches(3)", ["scheduler.set_num_batches"]),
        ("def f():\n    self.one = Scheduler()\n    self.one.set_num_batches(3)", ["self.one.set_num_batches"]),
        ("def f(scheduler: Scheduler):\n    scheduler.set_num_batches(3)", []),  # it is in use
        ("def f():\n    engine = Engine()\n    engine.step()", []),
    ],
)  # fmt: skip
def test_a_method_that_sets_what_is_missing_is_found(source: str, called: list[str]) -> None:
    assert read(source).called == called
