"""Generates and applies mutants of the library's own code.

A change is made in the source: a comparison turned, a sum made a difference, a number off by one, a condition negated.
Functions are given the changed code in this process; it is a child that ends afterwards.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor import transition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["EQUIVALENT", "Equivalent", "SourceMutant", "apply_mutant", "equivalence_reason", "source_mutants"]

# What only refuses or prints is not held against values.
_SPARED = ("_check", "_check_reductions", "_check_rows", "_check_in_place_layout", "__repr__", "__str__", "describe",
           "_in_place_message", "_not_understood", "_refuse_plain_target", "_refuse_unhashable",
           "_unknown_operand")  # fmt: skip
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
        where: the function, as ``Class.method``.
        slip: the expression before and after, which names the change as long as the function keeps it.
        line: its number.
        edit: makes it, in place.
    """

    module: str
    node: int
    kind: str
    where: str
    slip: str
    line: int
    edit: Callable[[Any], None]

    @property
    def change(self) -> str:
        """For people."""
        return f"{self.where}, line {self.line}: {self.slip}"


def source_mutants(module: str) -> list[SourceMutant]:
    """Every change of the functions of ``module``."""
    tree, mutants = _tree(module), []
    spared = {id(inner) for node in ast.walk(tree) if _is_spared(node) for inner in ast.walk(node)}
    places = dict(_places(tree, ""))
    outer = {id(inner): node for node in ast.walk(tree) for inner in ast.iter_child_nodes(node)}
    for index, node in enumerate(ast.walk(tree)):
        if id(node) in places and id(node) not in spared:
            for kind, edit in _edits(node):
                line: int = node.lineno  # type: ignore[attr-defined] # expressions and statements have one
                slip = _slip(node, outer[id(node)], edit)
                mutants.append(SourceMutant(module, index, kind, places[id(node)], slip, line, edit))
    return mutants


def _places(tree: ast.AST, where: str) -> Iterator[tuple[int, str]]:
    """Nodes in the bodies of functions, with the name of the function."""
    for node in ast.iter_child_nodes(tree):
        inner = f"{where}.{node.name}".lstrip(".") if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else where
        if isinstance(node, ast.FunctionDef):
            for line in node.body:
                yield from ((id(child), inner) for child in ast.walk(line))
                yield from _places(line, inner)
        yield from _places(node, inner)


def _slip(node: ast.AST, outer: ast.AST, edit: Callable[[Any], None]) -> str:
    """Before and after: of a condition, of the expression, or of what a name or number is part of."""
    shown: Any = outer if isinstance(node, (ast.Constant, ast.Name)) and isinstance(outer, ast.expr) else node
    position = list(ast.walk(shown)).index(node)
    after = copy.deepcopy(shown)
    edit(list(ast.walk(after))[position])
    if isinstance(node, (ast.If, ast.IfExp)):
        shown, after = shown.test, after.test
    return f"{ast.unparse(shown)} -> {ast.unparse(after)}"


def _tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(importlib.import_module(module)))


def _is_spared(node: ast.AST) -> bool:
    """Refusals, texts and annotations."""
    if isinstance(node, ast.FunctionDef):
        return node.name in _SPARED
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id == "msg" for target in node.targets)
    if isinstance(node, ast.If):  # guards a refusal
        return isinstance(node.body[-1], ast.Raise)
    if isinstance(node, ast.keyword):
        return node.arg == "strict"
    return isinstance(node, (ast.Raise, ast.JoinedStr, ast.AnnAssign, ast.arguments))


def _edits(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], None]]]:  # a case per kind
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS:
        yield "comparison turned", lambda edited: edited.ops.__setitem__(0, _COMPARISONS[type(edited.ops[0])]())
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        yield "another operation", lambda edited: setattr(edited, "op", _OPERATORS[type(edited.op)]())
    elif isinstance(node, ast.BoolOp):
        yield (
            "and for or",
            lambda edited: setattr(edited, "op", ast.Or() if isinstance(edited.op, ast.And) else ast.And()),
        )
    elif isinstance(node, (ast.If, ast.IfExp)) and not _is_turned(node.test):
        yield "condition negated", lambda edited: setattr(edited, "test", ast.UnaryOp(ast.Not(), edited.test))
    elif isinstance(node, ast.Name) and node.id in _NAMES and isinstance(node.ctx, ast.Load):
        yield "another function", lambda edited: setattr(edited, "id", _NAMES[edited.id])
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield "constant turned", lambda edited: setattr(edited, "value", not edited.value)
        elif isinstance(node.value, int):
            yield "off by one", lambda edited: setattr(edited, "value", edited.value + 1)
        elif node.value in _WORDS:
            yield "another reduction", lambda edited: setattr(edited, "value", _WORDS[edited.value])


def _is_turned(test: ast.expr) -> bool:
    """Return True if the comparison's mirrored form is its negation."""
    return isinstance(test, ast.Compare) and not isinstance(test.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE))


def apply_mutant(mutant: SourceMutant) -> bool:
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
    for attribute in vars(module).values():
        if hasattr(attribute, "cache_clear"):
            attribute.cache_clear()
    transition.clear_transition_cache()
    return changed


def _fits(function: FunctionType, code: CodeType) -> bool:
    return function.__code__.co_freevars == code.co_freevars


def _functions(module: ModuleType) -> Iterator[tuple[str, FunctionType]]:
    for name, attribute in vars(module).items():
        value = getattr(attribute, "__wrapped__", attribute)  # of a cache, or of a context
        if isinstance(value, FunctionType) and value.__module__ == module.__name__:
            yield name, value
        elif isinstance(value, type) and value.__module__ == module.__name__:
            for member, descriptor in vars(value).items():
                getter = getattr(descriptor, "fget", None) or getattr(descriptor, "func", None)
                inner = getter or getattr(descriptor, "__func__", descriptor)
                if isinstance(inner, FunctionType):
                    yield f"{name}.{member}", inner


@dataclass(frozen=True)
class Equivalent:
    """One change.

    Attributes:
        module: full name.
        where: function, as ``Class.method``.
        slip: the expression before and after.
        reason: why nothing can notice it.
    """

    module: str
    where: str
    slip: str
    reason: str


def _of(module: str, where: str, reason: str, *slips: str) -> tuple[Equivalent, ...]:
    return tuple(Equivalent(module, where, slip, reason) for slip in slips)


_BINDER = "hyper_parallel.core.shard.entry"
_DISPATCH = "hyper_parallel.core.shard.dispatch"
_EXECUTOR = "hyper_parallel.core.shard.executor"
_SEARCH = "hyper_parallel.core.dtensor.cheapest_steps"
_STRATEGY = "hyper_parallel.core.shard.strategy"
_REDISTRIBUTE = "hyper_parallel.core.dtensor.redistribute"
_CONSIDERED = "only speed: a step is priced though a lower bound of its cost would do"

EQUIVALENT: tuple[Equivalent, ...] = (
    *_of(_BINDER, "Binder.bind", "only speed: names that are all known are renamed to themselves",
         "kwargs.keys() <= self.parameters.keys() -> kwargs.keys() < self.parameters.keys()"),
    *_of(_DISPATCH, "Dispatcher.binary.call", "only speed: dispatch makes the same key",
         "cls in loose -> cls not in loose"),
    *_of(_EXECUTOR, "_canonical", "only speed: constants are filled in at each call, as for several tensors",
         "by_value or not scalars -> by_value and (not scalars)"),
    *_of(_EXECUTOR, "_canonical", "only speed: arguments without tensors are walked like those with",
         "isinstance(value, (list, tuple)) and any((isinstance(leaf, Ref) for leaf in leaves(value))) -> "
         "isinstance(value, (list, tuple)) or any((isinstance(leaf, Ref) for leaf in leaves(value)))"),
    *_of(_EXECUTOR, "_canonical.call", "only speed: numbers that the key holds are read from the call again",
         "scalars and (not by_value) -> scalars or not by_value"),
    *_of(_EXECUTOR, "_with_constants", "only speed: constants are passed by name instead of by position",
         ":1 -> :2"),
    *_of(_EXECUTOR, "_function", "a function of PyTorch is the same for empty shards; MindSpore has two",
         "has_empty_shard(plan) -> not has_empty_shard(plan)"),
    *_of(_SEARCH, "_Search._arrive", "of two plans of equal cost, the other is taken",
         "seconds < self.bound -> seconds <= self.bound"),
    *_of(_SEARCH, "_Search.run", "only speed: a plan that costs as much is looked for in vain",
         "least >= self.bound -> least > self.bound"),
    *_of(_SEARCH, "_Search._consider", _CONSIDERED,
         "entry[0] < self.bound -> entry[0] <= self.bound", "entry[0] -> entry[1]"),
    *_of(_SEARCH, "_Search._visit", _CONSIDERED,
         "beaten or step.beats_exchange -> beaten and step.beats_exchange", "least < self.bound -> least <= self.bound",
         "spent + self.least.after(move[1]) -> spent - self.least.after(move[1])",
         "spent + _least_seconds(single) -> spent - _least_seconds(single)"),
    *_of(_SEARCH, "_least_seconds", _CONSIDERED,
         "step.least_messages * SECONDS_PER_MESSAGE + step.launches * SECONDS_PER_LAUNCH -> "
         "step.least_messages * SECONDS_PER_MESSAGE - step.launches * SECONDS_PER_LAUNCH",
         "received + latency + step.overhead -> received + latency - step.overhead",
         "received + latency -> received - latency",
         "worst + MEAN_LOAD_WEIGHT * mean -> worst - MEAN_LOAD_WEIGHT * mean"),
    *_of(_SEARCH, "_Search.__init__", "the number of the first entry does not matter",
         "itertools.count(1) -> itertools.count(2)"),
    *_of(_SEARCH, "_LowerBounds.of_move", _CONSIDERED,
         "not axes -> not not axes", "members > 1 -> members > 2",
         "least * SECONDS_PER_ELEMENT + (members > 1) * SECONDS_PER_MESSAGE -> "
         "least * SECONDS_PER_ELEMENT - (members > 1) * SECONDS_PER_MESSAGE"),
    *_of(_SEARCH, "_LowerBounds.of_move", "axes of one rank are left out before the search",
         "members > 1 -> members >= 1"),
    *_of(_STRATEGY, "_never_empty", "one element does not divide by what cuts twice", "size > 0 -> size > 1"),
    *_of(_REDISTRIBUTE, "_run_adjoint", "only speed: a node is recorded that no gradient reaches",
         "platform.needs_grad(grad) and platform.grad_enabled() -> "
         "platform.needs_grad(grad) or platform.grad_enabled()"),
)  # fmt: skip


def equivalence_reason(mutant: SourceMutant) -> str:
    """Why ``mutant`` changes nothing, or nothing where no reason is known."""
    key = (mutant.module, mutant.where, mutant.slip)
    return next((entry.reason for entry in EQUIVALENT if (entry.module, entry.where, entry.slip) == key), "")
