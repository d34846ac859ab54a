"""Compiles an operator plan into a closure that fetches local tensors, calls the framework and wraps the results.

A closure is compiled once per cache key. If placement ignores the values of Python numbers, the key leaves them out and
the closure reads them from the caller's arguments at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

from hyper_parallel._tree import at_path, leaves, paths, rebuild, tree_map
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import Cause, watchers
from hyper_parallel.core.shard.call_codegen import CONVERTED, LOCAL, SAME, UNWRAPPED, VIEW, WRAPPED, call_form
from hyper_parallel.core.shard.degenerate_shards import (
    copy_if_any_rank_copies,
    has_empty_shard,
    is_thin,
    preserve_global_memory_format,
)
from hyper_parallel.core.shard.entry import KeywordCall
from hyper_parallel.core.shard.op_plan import describe, replicated_layout
from hyper_parallel.core.shard.refusals import read_only_error
from hyper_parallel.core.shard.rule import Ref, Rule, UnknownOperandError
from hyper_parallel.errors import ShardMismatchError

if TYPE_CHECKING:
    from hyper_parallel.core.shard.entry import OpEntry, Run
    from hyper_parallel.core.shard.op_plan import OpPlan
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["TensorArgument", "compile_plan", "local_call", "marks_in", "with_shape_check"]

Fetch = Callable[[Any], Any]

_LOCAL = attrgetter("_local")
_SCALARS = (int, float, bool, complex)
_ARGUMENTS = (list, tuple, dict)


class TensorArgument:
    """One occurrence of a tensor among a call's arguments; the same tensor may occur twice."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Any) -> None:
        """Wrap an occurrence of ``tensor``."""
        self.tensor = tensor


def marks_in(tree: Any) -> Iterator[TensorArgument]:
    """The marks in nested sequences, in order."""
    return (leaf for leaf in leaves(tree) if isinstance(leaf, TensorArgument))


def compile_plan(
    platform: Platform,
    entry: OpEntry,
    plan: OpPlan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    marks: Sequence[TensorArgument],
) -> tuple[Run, Run]:
    """Compile ``plan`` twice: for the first call of a key, which checks output shapes, and for later calls.

    Args:
        platform: the framework.
        entry: the dispatch entry.
        plan: the plan of the call.
        args: the caller's positional arguments with tensors marked.
        kwargs: the keyword arguments, in the same form.
        marks: the marks in the order of the plan's operands.

    Returns:
        two closures over the caller's arguments: for the first call, and for later ones.
    """
    fetches = {id(mark): _fetch(platform, entry, plan, index, mark) for index, mark in enumerate(marks)}
    call = direct = local_call(platform, entry, plan, args, kwargs, marks, fetches)
    rule: Rule = entry.rule  # type: ignore[assignment] # decompositions are not compiled
    thin = any(map(is_thin, (*plan.choice.targets, *plan.choice.outputs)))
    ordered = thin and plan.ordered and not entry.in_place and not rule.view
    if ordered:
        call = preserve_global_memory_format(
            platform, plan, call, [_reader(mark, args, kwargs, _identity) for mark in marks]
        )
    if has_empty_shard(plan):  # for every operator, since its result may be a view that is written later
        call = platform.replaying_views(call)
    if rule.op == "view" and not plan.moves and is_thin(plan.choice.targets[0]):
        call = copy_if_any_rank_copies(platform, plan, call, _reader(marks[0], args, kwargs, _identity))
    if entry.in_place:
        run = _in_place_call(call, plan, entry.target)
        return run, run
    if plan.open:
        run = _replicated_outputs(platform, plan, call)
        return run, run
    is_view = rule.view or (plan.view and not platform.loses_writes_through_views)
    inherit = _reader(marks[0], args, kwargs, _identity) if is_view else None
    checked = with_shape_check(call, plan)
    if rule.itself:
        operand = _reader(marks[0], args, kwargs, _identity)
        return (
            _returning_operand_if_unchanged(platform, plan, checked, operand, inherit),
            _returning_operand_if_unchanged(platform, plan, call, operand, inherit),
        )
    later = _wrapped(platform, plan, call, inherit)
    fused = _fused(platform, entry, plan, args, kwargs, fetches, inherit, later) if call is direct else None
    return _wrapped(platform, plan, checked, inherit), fused or later


# -- operands ----------------------------------------------------------------------------------------------------------


def _identity(value: Any) -> Any:
    return value


def _first_argument(args: Any, kwargs: Any) -> Any:
    del kwargs
    return args[0]


def _fetch(platform: Platform, entry: OpEntry, plan: OpPlan, index: int, mark: TensorArgument) -> Fetch:
    """Return the function that fetches the local tensor of operand ``index`` in the layout of the plan."""
    operand = plan.call.operands[index]
    target, varying = plan.choice.targets[index], plan.choice.varying[index]
    cause = Cause(entry.name, operand.name, implicit=True)
    if not isinstance(mark.tensor, DTensor):
        # A constant, equal on every rank. It becomes sharded or partial like any replicated operand.
        if target is operand.layout:
            return _identity
        return lambda plain: platform.wrap(plain, operand.layout).local_for(target, (), cause)
    if target is operand.layout and not varying:
        # Only if nothing varies: the key has no dtype, so a later tensor of this layout may need a gradient.
        return _LOCAL
    if target is operand.layout:
        return _varying_fetch(platform, target, varying, cause)
    return lambda tensor: tensor.local_for(target, varying, cause)


def _varying_fetch(platform: Platform, target: Any, varying: tuple[int, ...], cause: Cause) -> Fetch:
    needs, enabled, version = platform.needs_grad, platform.grad_enabled, platform.version
    key = (target, varying)

    def enter(tensor: Any) -> Any:
        local = tensor._local
        if not (needs(local) and enabled()):
            return local
        views = tensor._views
        view = None if views is None else views.get(key)
        # local_for, inlined: later consumers of the value find its view here.
        if view is not None and view[0] == version(local) and view[2] is watchers():
            return view[1]
        return tensor.new_view(target, varying, cause)

    return enter


# -- the local call ----------------------------------------------------------------------------------------------------


def local_call(
    platform: Platform,
    entry: OpEntry,
    plan: OpPlan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    marks: Sequence[TensorArgument],
    fetches: dict[int, Fetch],
) -> Run:
    """Return the call on local tensors; ``fetches`` returns these by mark, the rest is as in :func:`compile_plan`."""
    if plan.local is not None or entry.canonical:
        return _canonical(platform, entry, plan, args, kwargs, marks, fetches)
    return _framework_call(plan.impl or _function(platform, plan, entry.func), args, kwargs, fetches)


def _function(platform: Platform, plan: OpPlan, func: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``func``. If no shard of this rank is empty, return the function that ``func`` calls in that case."""
    return func if has_empty_shard(plan) else platform.on_elements(func)


def _framework_call(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fetches: dict[int, Fetch],
    output: str = UNWRAPPED,
    *further: Any,
) -> Run:
    """The caller's own call on local tensors; ``output`` and ``further`` as in :func:`call_form`."""
    converters = [_argument_converter(arg, fetches) for arg in args]
    named = {name: _argument_converter(value, fetches) for name, value in kwargs.items()}
    form = call_form(
        tuple(map(_kind, converters)),
        tuple((name, _kind(converter)) for name, converter in named.items()),
        output,
    )
    used = [converter for converter in (*converters, *named.values()) if _kind(converter) == CONVERTED]
    return form(func, *further, *used)


def _kind(converter: Fetch) -> str:
    """The kind of an argument of the local call, for :func:`call_form`."""
    return SAME if converter is _identity else LOCAL if converter is _LOCAL else CONVERTED


def _argument_converter(value: Any, fetches: dict[int, Fetch]) -> Fetch:
    """Return a function from one argument of the caller's call to that of the local call."""
    if isinstance(value, TensorArgument):
        return fetches[id(value)]
    if isinstance(value, (list, tuple)) and any(marks_in(value)):
        slots, container = [_argument_converter(item, fetches) for item in value], type(value)
        if container is list and all(slot is _LOCAL for slot in slots):
            return lambda items: [item._local for item in items]
        return lambda items: container([slot(item) for slot, item in zip(slots, items)])  # noqa: B905 - hot
    return _identity


def _canonical(
    platform: Platform,
    entry: OpEntry,
    plan: OpPlan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    marks: Sequence[TensorArgument],
    fetches: dict[int, Fetch],
) -> Run:
    """The canonical operator on local tensors, with the arguments that the plan replaces."""
    local = plan.local
    replaced = {} if local is None or local.args is None else local.args
    run = None if local is None else local.run
    rule: Rule = entry.rule  # type: ignore[assignment] # decompositions are not compiled
    readers = [_reader(mark, args, kwargs, fetches[id(mark)]) for mark in marks]
    template = {**plan.call.args, **replaced}
    by_value, bind = rule.by_value, entry.binder.bind
    scalars = [name for name, value in template.items() if name not in replaced and type(value) in _SCALARS]
    func = _function(platform, plan, entry.local)
    nested = {
        name: _nested_argument_builder(value)
        for name, value in template.items()
        if isinstance(value, (list, tuple)) and any(isinstance(leaf, Ref) for leaf in leaves(value))
    }
    if run is None and len(readers) == 1 and (by_value or not scalars):
        only = next((name for name, value in template.items() if type(value) is Ref), None)
        if only is not None:
            constants = {name: value for name, value in template.items() if name != only}
            direct = bool(args) and args[0] is marks[0] and fetches[id(marks[0])] is _LOCAL
            return _single_operand_call(func, only, None if direct else readers[0], constants)

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        locals_ = [read(args, kwargs) for read in readers]
        filled = {name: locals_[value.index] if type(value) is Ref else value for name, value in template.items()}
        for name, fill in nested.items():
            filled[name] = fill(locals_)
        if scalars and not by_value:
            # The key includes only their types.
            bound = bind(args, kwargs)
            filled.update((name, bound[name]) for name in scalars)
        return func(**filled) if run is None else run(platform, filled)

    return call


def _nested_argument_builder(value: Any) -> Callable[[Sequence[Any]], Any]:
    """Return the function that fills a nested argument of the template with local tensors."""
    if isinstance(value, Ref):
        return itemgetter(value.index)
    if isinstance(value, (list, tuple)):
        fillers = [_nested_argument_builder(item) for item in value]
        return lambda locals_: rebuild(value, [fill(locals_) for fill in fillers])
    return lambda _: value


def _single_operand_call(func: Callable[..., Any], name: str, read: Run | None, constants: dict[str, Any]) -> Run:
    """The canonical operator if it has one tensor argument: all other arguments are known at compile time.

    Args:
        func: the operator.
        name: name of the parameter that is the tensor.
        read: reads the local tensor from the caller's arguments; None if the tensor is the first argument.
        constants: all other arguments, by name.
    """
    bound = _with_constants(func, name, constants)
    if read is None:
        return lambda args, _: bound(args[0]._local)
    return lambda args, kwargs: bound(read(args, kwargs))


def _with_constants(func: Callable[..., Any], name: str, constants: dict[str, Any]) -> Fetch:
    """Return ``func`` as a function of argument ``name`` alone; ``func`` accepts arguments by name."""
    if isinstance(func, KeywordCall) and func.positional[:1] == (name,):
        plain, rest = func.function, [constants[other] for other in func.positional[1:]]
        named = {other: constants[other] for other in func.named}
        return lambda local: plain(local, *rest, **named)
    code = getattr(func, "__code__", None)  # None for functions in C
    if code is not None and code.co_argcount and code.co_varnames[0] == name:
        return partial(func, **constants)
    return lambda local: func(**constants, **{name: local})


def _reader(mark: TensorArgument, args: tuple[Any, ...], kwargs: dict[str, Any], fetch: Fetch) -> Run:
    """Return a function that reads one operand from the caller's arguments."""
    path = next((path for path, leaf in paths((args, kwargs), _ARGUMENTS) if leaf is mark), None)
    if path is None:
        msg = "an operand is not among the arguments"
        raise AssertionError(msg)
    by_keyword, first, *rest = path
    if by_keyword:
        return lambda _, kwargs: fetch(at_path(kwargs[first], rest))
    if rest:
        return lambda args, _: fetch(at_path(args[first], rest))
    if fetch is _identity:
        return _first_argument if first == 0 else lambda args, _: args[first]
    return lambda args, _: fetch(args[first])


# -- outputs -----------------------------------------------------------------------------------------------------------


def with_shape_check(call: Run, plan: OpPlan) -> Run:
    """Return ``call`` with a check of its output shapes against the plan, so that a wrong rule is reported."""

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = call(args, kwargs)
        if out is NotImplemented:
            raise _unknown_operand(plan)
        for local, layout in zip(out if plan.many else (out,), plan.choice.outputs, strict=True):
            if layout.shape is not None and tuple(local.shape) != layout.local_shape:
                msg = (
                    f"{describe(plan.call)}: the local call returned {list(local.shape)}, the plan says "
                    f"{list(layout.local_shape)} of {layout.notation()}; this is a bug in the rule; please report it"
                )
                raise ShardMismatchError(msg)
        return out

    return run


def _unknown_operand(plan: OpPlan) -> UnknownOperandError:
    others = [f"{name} a {type(value).__name__}" for name, value in plan.call.args.items() if type(value) is not Ref]
    return UnknownOperandError(f"{describe(plan.call)}: the operator does not take {', '.join(others)}")


def _wrap(platform: Platform, plan: OpPlan) -> Callable[[Any, Any], Any]:
    """The function that makes a DTensor from an output and its layout."""
    return platform.wrap if all(layout.shape is not None for layout in plan.choice.outputs) else _even_wrap(platform)


def _wrapping_outputs(plan: OpPlan, call: Run, wrap: Callable[[Any, Any], Any]) -> Run:
    """Return ``call`` with its outputs wrapped by ``wrap(out, layout)``."""
    layouts = plan.choice.outputs
    if plan.many:

        def run_many(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            outs = call(args, kwargs)
            return rebuild(outs, [wrap(out, layout) for out, layout in zip(outs, layouts, strict=True)])

        return run_many
    (layout,) = layouts
    return lambda args, kwargs: wrap(call(args, kwargs), layout)


def _wrapped(platform: Platform, plan: OpPlan, call: Run, inherit: Run | None) -> Run:
    wrap = _wrap(platform, plan)
    if plan.many or inherit is None:
        run = _wrapping_outputs(plan, call, wrap)
        return run if inherit is None else _views(run, inherit, _view_protector(platform, _readonly(plan)))
    (layout,), protect = plan.choice.outputs, _view_protector(platform, _readonly(plan))

    def run_view(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        view = wrap(call(args, kwargs), layout)
        protect(view, inherit(args, kwargs))
        return view

    return run_view


def _view_protector(platform: Platform, copied: str | None, *, may_copy: bool = False) -> Callable[[Any, Any], None]:
    """Return a function that makes a view read-only, and stale once its base is written, if writes would be lost.

    Args:
        platform: the framework.
        copied: the reason why views are copies, or None if they share storage with their base.
        may_copy: whether the framework itself may return a copy; writes to a copy are not lost.
    """
    lost = platform.loses_writes_through_views
    otherwise = _VIEWS_LOSE_WRITES if lost and not may_copy else None

    def protect(view: Any, base: Any) -> None:
        reason = copied or base._readonly or otherwise
        if reason is not None:
            view._readonly = reason
        if reason is not None or lost:
            platform.follow_writes(view, base, is_copy=copied is not None)

    return protect


def _returning_operand_if_unchanged(
    platform: Platform, plan: OpPlan, call: Run, operand: Run, inherit: Run | None
) -> Run:
    """Make the call return the operand itself, not a new DTensor, if the local call returned its local tensor."""
    wrap, (layout,) = platform.wrap, plan.choice.outputs
    protect = _view_protector(platform, _readonly(plan), may_copy=True)

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, out = operand(args, kwargs), call(args, kwargs)
        if out is x._local:
            if inherit is None or not platform.dense_by_chance(out, layout):
                return x
            out = platform.dense_copy(out)  # the other ranks had to copy
        output = wrap(out, layout)
        if inherit is not None:
            protect(output, inherit(args, kwargs))
        return output

    return run


# For a framework in which writing to a view does not change its base.
_VIEWS_LOSE_WRITES = (
    "it is a view, and this framework loses writes to views; write to the tensor itself, "
    "as in x[index] = value, or use the out-of-place form"
)


def _replicated_outputs(platform: Platform, plan: OpPlan, call: Run) -> Run:
    """Return ``call`` with each result wrapped as replicated; number and sizes are known only after the call."""
    mesh = plan.call.mesh

    def wrap(leaf: Any) -> Any:
        return platform.wrap(leaf, replicated_layout(mesh, leaf.shape)) if platform.is_tensor(leaf) else leaf

    return lambda args, kwargs: tree_map(wrap, call(args, kwargs))


def _views(run: Run, inherit: Run, protect: Callable[[Any, Any], None]) -> Run:
    """Protect each of several views of one operand."""

    def run_views(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outs, base = run(args, kwargs), inherit(args, kwargs)
        for view in outs:
            protect(view, base)
        return outs

    return run_views


def _even_wrap(platform: Platform) -> Callable[[Any, Any], Any]:
    """Wrap outputs whose layout has no global shape; they are even shards."""

    def wrap(out: Any, layout: Any) -> Any:
        return platform.wrap(out, layout.with_shape(layout.get_global_shape(tuple(out.shape))))

    return wrap


def _fused(
    platform: Platform,
    entry: OpEntry,
    plan: OpPlan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fetches: dict[int, Fetch],
    inherit: Run | None,
    otherwise: Run,
) -> Run | None:
    """Return one closure that fetches operands, calls the framework and wraps the result; None if more is needed.

    Args:
        platform: the framework.
        entry: the dispatch entry.
        plan: the plan of the call.
        args: positional arguments with tensors marked.
        kwargs: the keyword arguments, in the same form.
        fetches: functions that return local tensors, by mark.
        inherit: reads the base operand of a view; None if the operator returns no view.
        otherwise: the equivalent closure in several steps, which also protects a view of a read-only operand.
    """
    layout = plan.choice.outputs[0]
    if plan.many or plan.local is not None or entry.canonical or layout.shape is None:
        return None
    func = plan.impl or _function(platform, plan, entry.func)
    if inherit is None:
        return _framework_call(func, args, kwargs, fetches, WRAPPED, platform.wrap, layout)
    if inherit is not _first_argument or _readonly(plan) is not None or platform.loses_writes_through_views:
        return None
    return _framework_call(func, args, kwargs, fetches, VIEW, platform.wrap, layout, otherwise)


def _readonly(plan: OpPlan) -> str | None:
    """The reason why views made by this plan are read-only: their base was redistributed, so they are copies."""
    if not plan.moves:
        return None
    first = plan.call.operands[0]
    return (
        f"it is a copy: {describe(plan.call)} had to redistribute {first.name} to "
        f"{plan.choice.targets[0].notation(first.dtype)}, so a write would be lost; write to {first.name} itself"
    )


def _in_place_call(call: Run, plan: OpPlan, target: Run) -> Run:
    """The call of an operator that writes its first operand and returns it."""

    def write(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = target(args, kwargs)
        if written._readonly is not None:
            raise read_only_error(describe(plan.call), plan.call.operands[0].name, written._readonly)
        if written._is_callers_leaf:
            written.leave_leaf()
        if call(args, kwargs) is NotImplemented:
            raise _unknown_operand(plan)
        written.drop_views()
        return written

    return write
