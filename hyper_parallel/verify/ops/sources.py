"""The library's own redistribution changed in one place, and whether the check of every change of placement notices.

A change is made in the source: a comparison turned, a sum made a difference, a number off by one, a condition negated.
Functions are given the changed code in this process; it is a child that ends afterwards.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from hyper_parallel.core.dtensor import transition
from hyper_parallel.verify.ops.mutation import Verdict
from hyper_parallel.verify.redistribution import MESHES, first_wrong, least_work

__all__ = ["SOURCES", "SourceMutant", "applied", "judged", "source_mutants"]

SOURCES = ("hyper_parallel.core.dtensor.steps", "hyper_parallel.core.dtensor.transition")
"""Modules whose functions are changed."""

_Work = dict[tuple[int, ...], tuple[int, int]]

# What only refuses or prints is not held against values, nor is a price by which plans with equal values are chosen.
_SPARED = ("_check", "_check_reductions", "__repr__", "__str__", "describe", "messages")
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
}  # fmt: skip
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_WORDS = {"sum": "max", "avg": "sum", "max": "min", "min": "max"}


@dataclass(frozen=True)
class SourceMutant:
    """One change.

    Attributes:
        module: whose source.
        node: which node of its tree, in the order of :func:`ast.walk`.
        kind: what slipped.
        change: the line and what became of the expression.
        edit: makes it, in place.
    """

    module: str
    node: int
    kind: str
    change: str
    edit: Callable[[Any], None]


def judged(platform: str, op: str, seed: int) -> Verdict:
    """The verdict on ``module#number``: a mutant by its number among those that ``seed`` shuffled."""
    module, _, number = op.partition("#")
    found = source_mutants(module)
    order = np.random.default_rng(seed).permutation(len(found))
    if int(number) >= len(found):
        return Verdict(op, platform, generated=len(found))
    mutant = found[int(order[int(number)])]
    before: _Work = {mesh: least_work(mesh) for mesh in MESHES}
    if not applied(mutant):
        return Verdict(op, platform, mutant.kind, mutant.change, "equivalent", "the same code", len(found))
    try:
        what = _noticed(platform, before)
    except Exception as error:  # noqa: BLE001 - whatever it raises, nobody overlooks it
        what = f"{type(error).__name__}: {error}"
    outcome = "killed" if what else "survived"
    return Verdict(op, platform, mutant.kind, mutant.change, outcome, what or "survived", len(found))


def _noticed(platform: str, before: _Work) -> str:
    for mesh, work in before.items():
        now = least_work(mesh)
        if now != work:
            return f"mesh {mesh}: {now[0]} changes and {now[1]} elements, {work[0]} and {work[1]} before"
        wrong = first_wrong(platform, mesh)
        if wrong:
            return wrong
    return ""


def source_mutants(module: str) -> list[SourceMutant]:
    """Every change of the functions of ``module``."""
    tree, found = _tree(module), []
    lines = inspect.getsource(importlib.import_module(module)).splitlines()
    spared = {id(inner) for node in ast.walk(tree) if _is_spared(node) for inner in ast.walk(node)}
    inside = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
              for line in node.body for inner in ast.walk(line)}  # fmt: skip
    for index, node in enumerate(ast.walk(tree)):
        if id(node) in inside and id(node) not in spared:
            for kind, edit in _edits(node):
                line: int = node.lineno  # type: ignore[attr-defined] # expressions and statements have one
                found.append(SourceMutant(module, index, kind, f"line {line}: {lines[line - 1].strip()}", edit))
    return found


def _tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(importlib.import_module(module)))


def _is_spared(node: ast.AST) -> bool:
    """Refusals, texts and annotations."""
    if isinstance(node, ast.FunctionDef):
        return node.name in _SPARED
    if isinstance(node, ast.Assign):
        return any(isinstance(one, ast.Name) and one.id == "msg" for one in node.targets)
    if isinstance(node, ast.If):  # guards a refusal
        return isinstance(node.body[-1], ast.Raise)
    if isinstance(node, ast.keyword):
        return node.arg == "strict"
    return isinstance(node, (ast.Raise, ast.JoinedStr, ast.AnnAssign, ast.arguments))


def _edits(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], None]]]:  # a case per kind
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS:
        yield "comparison turned", lambda one: one.ops.__setitem__(0, _COMPARISONS[type(one.ops[0])]())
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        yield "another operation", lambda one: setattr(one, "op", _OPERATORS[type(one.op)]())
    elif isinstance(node, ast.BoolOp):
        yield "and for or", lambda one: setattr(one, "op", ast.Or() if isinstance(one.op, ast.And) else ast.And())
    elif isinstance(node, (ast.If, ast.IfExp)):
        yield "condition negated", lambda one: setattr(one, "test", ast.UnaryOp(ast.Not(), one.test))
    elif isinstance(node, ast.Name) and node.id in _NAMES and isinstance(node.ctx, ast.Load):
        yield "another function", lambda one: setattr(one, "id", _NAMES[one.id])
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield "constant turned", lambda one: setattr(one, "value", not one.value)
        elif isinstance(node.value, int):
            yield "off by one", lambda one: setattr(one, "value", one.value + 1)
        elif node.value in _WORDS:
            yield "another reduction", lambda one: setattr(one, "value", _WORDS[one.value])


def applied(mutant: SourceMutant) -> bool:
    """Give the module's functions the changed code; False where none of them changed."""
    module, tree = importlib.import_module(mutant.module), _tree(mutant.module)
    mutant.edit(list(ast.walk(tree))[mutant.node])
    code = compile(ast.fix_missing_locations(tree), str(module.__file__), "exec")
    fresh = ModuleType(module.__name__)
    fresh.__dict__.update({"__file__": module.__file__})
    exec(code, fresh.__dict__)  # noqa: S102 - our own source
    changed = False
    own = dict(_functions(module))
    for name, function in _functions(fresh):
        if name in own and own[name].__code__ != function.__code__ and _fits(own[name], function.__code__):
            own[name].__code__, changed = function.__code__, True
    transition.forget()
    return changed


def _fits(function: FunctionType, code: CodeType) -> bool:
    return function.__code__.co_freevars == code.co_freevars


def _functions(module: ModuleType) -> Iterator[tuple[str, FunctionType]]:
    for name, value in vars(module).items():
        if isinstance(value, FunctionType) and value.__module__ == module.__name__:
            yield name, value
        elif isinstance(value, type) and value.__module__ == module.__name__:
            for member, one in vars(value).items():
                inner = getattr(one, "fget", None) or getattr(one, "func", None) or getattr(one, "__func__", one)
                if isinstance(inner, FunctionType):
                    yield f"{name}.{member}", inner
