"""Refusals whose places are translated; and that no raised exception is kept.

Each time that one instance is raised, its traceback gets more frames, with their variables.
"""

import ast
import builtins
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from attend.errors import InvalidRequest, LayerConflict, LengthMismatch, Problem

ROOT = Path(__file__).parent.parent / "service" / "attend"
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def kept(source: str) -> list[str]:
    """The `raise` statements of a module whose exception is neither made there nor held by a variable of the same function."""
    return [
        ast.unparse(statement) for statement, known in _raises(ast.parse(source), _classes(source)) if not _is_new(statement.exc, known)
    ]


def _classes(source: str) -> frozenset[str]:
    """The names of exception classes that a module may raise: its own, imported ones and Python's."""
    names = {name for name, value in vars(builtins).items() if isinstance(value, type)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names if alias.name[:1].isupper() and not alias.name.isupper()}
    return frozenset(names)


def _raises(node: ast.AST, known: frozenset[str]) -> Iterator[tuple[ast.Raise, frozenset[str]]]:
    """Each `raise` below `node`, and the names of classes and of the variables that its function sets."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise):
            yield child, known
        elif isinstance(child, Function):
            yield from _raises(child, _classes_of(known) | _set_in(child))
        else:
            yield from _raises(child, known)


def _classes_of(known: frozenset[str]) -> frozenset[str]:
    return frozenset(name for name in known if name[:1].isupper())


def _set_in(function: ast.AST) -> frozenset[str]:
    """The parameters of a function, and the variables that it assigns or catches; not those of functions inside it."""
    names = (
        {argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)} if isinstance(function, Function) else set()
    )
    for child in ast.iter_child_nodes(function):
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            names.add(child.id)
        if isinstance(child, ast.ExceptHandler) and child.name:
            names.add(child.name)
        if not isinstance(child, Function):
            names |= _set_in(child)
    return frozenset(names)


def _is_new(raised: ast.expr | None, known: frozenset[str]) -> bool:
    """Whether a raised expression is a call, a class, or a variable of the function; `raise` alone raises what was caught."""
    match raised:
        case None | ast.Call():
            return True
        case ast.Name(id=name):
            return name in known
        case ast.Attribute(value=ast.Name(), attr=name):  # a class of a module, such as typer.Exit
            return name[:1].isupper()
        case ast.Subscript(value=ast.Attribute(value=ast.Name(id=name), attr="exceptions")):  # of a caught group
            return name in known
    return False


def test_no_raised_exception_is_kept() -> None:
    found = {path.relative_to(ROOT).as_posix(): kept(path.read_text()) for path in ROOT.rglob("*.py")}
    assert {file: statements for file, statements in found.items() if statements} == {}


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    def f(self):\n        raise self.error",
        "ERROR = ValueError('x')\ndef f():\n    raise ERROR",
        "from attend.errors import ERROR\ndef f():\n    raise ERROR from None",
        "def f():\n    error = ValueError()\n    def g():\n        raise error\n    return g",
        "def f(errors, key):\n    raise errors[key]",
    ],
    ids=["attribute", "constant", "imported constant", "closure", "item"],
)
def test_a_kept_exception_is_found(source: str) -> None:
    assert kept(source)


def test_a_refusal_keeps_its_text_when_its_places_are_translated() -> None:
    """With problems, the text has the new places. Whatever else an error has to say, it keeps."""

    def below_spec(problem: Problem) -> Problem:
        return replace(problem, at="/spec" + problem.at)

    assert LayerConflict("the layer is configured").translated(below_spec).detail == "the layer is configured"
    moved = InvalidRequest(problems=[Problem("/rope", "an object", "5")]).translated(below_spec)
    assert moved.problems[0].at == "/spec/rope" and moved.detail == "expected an object, got 5, at /spec/rope"
    mismatch = LengthMismatch("too short", [Problem("/expected_length", "7", "5")], 7).translated(below_spec)
    assert (mismatch.problems[0].at, mismatch.length, mismatch.extensions) == ("/spec/expected_length", 7, {"length": 7})
