"""Plans made runnable: closures that fetch locals, call the framework and wrap what comes back.

A closure is compiled once per key. What the key does not tell (the values of Python scalars, for operators whose
placement ignores them) is read from the caller's arguments at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import Cause, watchers
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.op_plan import describe
from hyper_parallel.core.shard.rule import Ref, Rule, UnknownOperandError
from hyper_parallel.errors import ShardMismatchError, UnsupportedOperatorError

if TYPE_CHECKING:
    from hyper_parallel.core.shard.entry import OpEntry, Run
    from hyper_parallel.core.shard.op_plan import OpPlan
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["Mark", "compile_plan", "marked"]

Fetch = Callable[[Any], Any]

_LOCAL = attrgetter("_local")


class Mark:
    """One occurrence of a tensor among the arguments of a call: the same tensor may be passed twice."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Any) -> None:
        """Mark an occurrence of ``tensor``."""
        self.tensor = tensor


def marked(tree: Any) -> Iterator[Mark]:
    """Marks in nested sequences, in order."""
    if isinstance(tree, (list, tuple)):
        for item in tree:
            yield from marked(item)
    elif isinstance(tree, Mark):
        yield tree


def compile_plan(
    platform: Platform,
    entry: OpEntry,
    plan: OpPlan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    marks: Sequence[Mark],
) -> tuple[Run, Run]:
    """Closures for the first call of a key, which checks the outputs against the plan, and for later ones.

    Args:
        platform: the framework.
        entry: the spelling.
        plan: what to do.
        args: the caller's positional arguments with tensors marked.
        kwargs: the keyword arguments likewise.
        marks: the marks in the order of the plan's operands.
    """
    fetches = {id(mark): _fetch(platform, entry, plan, index, mark) for index, mark in enumerate(marks)}
    whole = all(fetch is _LOCAL or fetch is _same for fetch in fetches.values())
    if plan.local is not None or entry.canonical:
        call = _canonical(platform, entry, plan, args, kwargs, marks, fetches)
    else:
        call = _spelled(plan.impl or entry.func, args, kwargs, fetches)
    if entry.in_place:
        run = _writing(call, plan, entry.target)
        return run, run
    if plan.open:
        opened = _open(platform, plan, call)
        return opened, opened
    rule: Rule = entry.rule  # type: ignore[assignment] # decompositions are not compiled
    inherit = _reader(marks[0], args, kwargs, _same) if rule.view else None
    checked = _checking(call, plan)
    if rule.itself:
        given = _reader(marks[0], args, kwargs, _same)
        return tuple(_unless_itself(platform, plan, one, given, inherit) for one in (checked, call))  # type: ignore[return-value] # two
    if inherit is not None and platform.loses_writes_through_views:
        inherit = _lost
    first = _wrapped(platform, plan, checked, inherit)
    fused = _fused(platform, entry, plan, args, kwargs, fetches) if whole and inherit is None else None
    return first, fused or _wrapped(platform, plan, call, inherit)


# -- operands ----------------------------------------------------------------------------------------------------------


def _same(value: Any) -> Any:
    return value


def _fetch(platform: Platform, entry: OpEntry, plan: OpPlan, index: int, mark: Mark) -> Fetch:
    """How operand ``index`` becomes a local tensor in the layout that the plan wants."""
    operand = plan.call.operands[index]
    target, varying = plan.choice.targets[index], plan.choice.varying[index]
    cause = Cause(entry.name, operand.name, implicit=True)
    if not isinstance(mark.tensor, DTensor):
        # A constant, equal on every rank: it is cut, or made a summand, like any replicated operand.
        if target is operand.layout:
            return _same
        return lambda plain: platform.wrap(plain, operand.layout).local_for(target, (), cause)
    if target is operand.layout and not varying:
        # Not for integers that vary: the key knows no dtype, and the next tensor of this layout may be floating.
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
        kept = None if views is None else views.get(key)
        # As in local_for, in line: the second and third consumer of a value come here.
        if kept is not None and kept[0] == version(local) and kept[2] is watchers():
            return kept[1]
        return tensor.local_for(target, varying, cause)

    return enter


# -- the local call ----------------------------------------------------------------------------------------------------


def _spelled(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], fetches: dict[int, Fetch]) -> Run:
    """The caller's own call, on locals."""
    slots = [_slot(arg, fetches) for arg in args]
    named = {name: _slot(value, fetches) for name, value in kwargs.items()}
    if named and all(slot is _same for slot in named.values()):
        return lambda args, kwargs: func(*[slot(arg) for slot, arg in zip(slots, args)], **kwargs)  # noqa: B905 - hot
    if not named:
        if len(slots) == 1:
            (only,) = slots
            return lambda args, _: func(only(args[0]))
        if len(slots) == 2:
            first, second = slots
            return lambda args, _: func(first(args[0]), second(args[1]))
        return lambda args, _: func(*[slot(arg) for slot, arg in zip(slots, args)])  # noqa: B905 - hot; one key, one length
    return lambda args, kwargs: func(
        *[slot(arg) for slot, arg in zip(slots, args)],  # noqa: B905 - hot; one key, one length
        **{name: named[name](value) for name, value in kwargs.items()},
    )


def _slot(value: Any, fetches: dict[int, Fetch]) -> Fetch:
    if isinstance(value, Mark):
        return fetches[id(value)]
    if isinstance(value, (list, tuple)) and any(True for _ in marked(value)):
        inner, kind = [_slot(item, fetches) for item in value], type(value)
        return lambda given: kind([slot(item) for slot, item in zip(inner, given)])  # noqa: B905 - hot
    return _same


def _canonical(
    platform: Platform,
    entry: OpEntry,
    plan: OpPlan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    marks: Sequence[Mark],
    fetches: dict[int, Fetch],
) -> Run:
    """The canonical operator on locals, with the arguments that the plan replaces."""
    local = plan.local
    replaced = {} if local is None or local.args is None else local.args
    run = None if local is None else local.run
    rule: Rule = entry.rule  # type: ignore[assignment] # decompositions are not compiled
    readers = [_reader(mark, args, kwargs, fetches[id(mark)]) for mark in marks]
    template = {**plan.call.args, **replaced}
    by_value, bind = rule.by_value, entry.binder.bind
    scalars = [name for name, value in template.items() if name not in replaced and type(value) in _SCALARS]
    func = entry.local
    simple = all(type(value) is Ref or not isinstance(value, (list, tuple)) for value in template.values())
    if run is None and len(readers) == 1 and (by_value or not scalars):
        only = next((name for name, value in template.items() if type(value) is Ref), None)
        if only is not None:
            return _of_one(func, only, readers[0], {name: value for name, value in template.items() if name != only})

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        locals_ = [read(args, kwargs) for read in readers]
        if simple:
            filled = {name: locals_[value.index] if type(value) is Ref else value for name, value in template.items()}
        else:
            filled = {name: _fill(value, locals_) for name, value in template.items()}
        if scalars and not by_value:
            # The key holds their types only.
            bound = bind(args, kwargs)
            filled.update((name, bound[name]) for name in scalars)
        return func(**filled) if run is None else run(platform, filled)

    return call


def _of_one(func: Callable[..., Any], name: str, read: Run, constants: dict[str, Any]) -> Run:
    """The canonical operator of one tensor: everything else is known beforehand."""

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        filled = constants.copy()
        filled[name] = read(args, kwargs)
        return func(**filled)

    return call


_SCALARS = (int, float, bool, complex)


def _reader(mark: Mark, args: tuple[Any, ...], kwargs: dict[str, Any], fetch: Fetch) -> Run:
    """Reads one operand from the caller's arguments."""
    for index, arg in enumerate(args):
        if arg is mark:
            return lambda args, _: fetch(args[index])  # noqa: PLR1736 - of another call
        for path in _paths(arg, mark):
            return lambda args, _: fetch(_at(args[index], path))  # noqa: PLR1736 - the same
    for name, value in kwargs.items():
        for path in _paths(value, mark):
            return lambda _, kwargs: fetch(_at(kwargs[name], path))  # noqa: PLR1733 - the same
    msg = "an operand is not among the arguments"
    raise AssertionError(msg)


def _paths(tree: Any, mark: Mark) -> Iterator[tuple[int, ...]]:
    if tree is mark:
        yield ()
    elif isinstance(tree, (list, tuple)):
        for index, item in enumerate(tree):
            for path in _paths(item, mark):
                yield (index, *path)


def _at(tree: Any, path: tuple[int, ...]) -> Any:
    for index in path:
        tree = tree[index]
    return tree


def _fill(value: Any, locals_: list[Any]) -> Any:
    if type(value) is Ref:
        return locals_[value.index]
    if isinstance(value, (list, tuple)):
        return type(value)([_fill(item, locals_) for item in value])
    return value


# -- outputs -----------------------------------------------------------------------------------------------------------


def _checking(call: Run, plan: OpPlan) -> Run:
    """The call, its outputs compared with the plan: a rule that is wrong about shapes must not pass silently."""

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = call(args, kwargs)
        if out is NotImplemented:
            raise _not_understood(plan)
        for one, layout in zip(out if plan.many else (out,), plan.choice.outputs, strict=True):
            if layout.shape is not None and tuple(one.shape) != layout.local_shape:
                msg = (
                    f"{describe(plan.call)}: the local call returned {list(one.shape)}, the plan says "
                    f"{list(layout.local_shape)} of {layout.notation()}; this is a wrong rule, please report it"
                )
                raise ShardMismatchError(msg)
        return out

    return run


def _not_understood(plan: OpPlan) -> UnknownOperandError:
    others = [f"{name} a {type(value).__name__}" for name, value in plan.call.args.items() if type(value) is not Ref]
    return UnknownOperandError(f"{describe(plan.call)}: the operator does not take {', '.join(others)}")


def _wrapped(platform: Platform, plan: OpPlan, call: Run, inherit: Run | None) -> Run:
    layouts = plan.choice.outputs
    wrap = platform.wrap if all(layout.shape is not None for layout in layouts) else _even_wrap(platform)
    if plan.many:

        def run_many(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            outs = call(args, kwargs)
            return _like(outs, [wrap(out, layout) for out, layout in zip(outs, layouts, strict=True)])

        return run_many if inherit is None else _views(platform, run_many, _readonly(plan), inherit)
    (layout,) = layouts
    if inherit is None:
        return lambda args, kwargs: wrap(call(args, kwargs), layout)
    copied = _readonly(plan)

    def run_view(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = wrap(call(args, kwargs), layout)
        _protect(platform, made, copied, inherit(args, kwargs))
        return made

    return run_view


def _protect(platform: Platform, made: Any, copied: str | None, base: Any) -> None:
    """A view that had to be a copy may not be written, nor may views of it; nor read once its base was written."""
    lost = type(base) is str
    reason = copied or (base if lost else base._readonly)  # noqa: SLF001 - as above
    if reason is not None:
        made._readonly = reason  # noqa: SLF001 - as above
        if not lost:
            platform.follow(made, base)


def _unless_itself(platform: Platform, plan: OpPlan, call: Run, given: Run, inherit: Run | None) -> Run:
    """The operand itself where the local call returned its local itself: one storage, one object."""
    wrap, (layout,), copied = platform.wrap, plan.choice.outputs, _readonly(plan)

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, out = given(args, kwargs), call(args, kwargs)
        if out is x._local:
            if inherit is None or not platform.dense_by_chance(out, layout):
                return x
            out = platform.local_op("clone")(out, memory_format=None)  # as the other ranks had to do
        made = wrap(out, layout)
        if inherit is not None:
            _protect(platform, made, copied, inherit(args, kwargs))
        return made

    return run


def _lost(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why a view is read-only on a framework whose views do not write through."""
    del args, kwargs
    return (
        "it is a view, through which this framework loses what is written; write to the tensor itself, "
        "as in x[index] = value, or use the out-of-place form"
    )


def _open(platform: Platform, plan: OpPlan, call: Run) -> Run:
    """The call, every tensor that it returns being whole; sizes are its own."""
    mesh = plan.call.mesh

    def wrapped(out: Any) -> Any:
        if platform.is_tensor(out):
            shape = tuple(out.shape)
            return platform.wrap(out, Layout.of(mesh, ((),) * len(shape), (), shape))
        return _like(out, [wrapped(one) for one in out]) if isinstance(out, (list, tuple)) else out

    return lambda args, kwargs: wrapped(call(args, kwargs))


def _views(platform: Platform, run: Run, copied: str | None, inherit: Run) -> Run:
    """Views of what may not be written may not be written either, nor may those that had to be copies."""

    def views(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made, base = run(args, kwargs), inherit(args, kwargs)
        for one in made:
            _protect(platform, one, copied, base)
        return made

    return views


def _even_wrap(platform: Platform) -> Callable[[Any, Any], Any]:
    """Wraps outputs whose layout came without a global shape: they are even shards."""

    def wrap(out: Any, layout: Any) -> Any:
        return platform.wrap(out, layout.with_shape(layout.get_global_shape(tuple(out.shape))))

    return wrap


def _fused(  # noqa: PLR0911 - one closure per form
    platform: Platform,
    entry: OpEntry,
    plan: OpPlan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fetches: dict[int, Fetch],
) -> Run | None:
    """One closure for the commonest calls, one or two positional arguments that stay where they are; else None."""
    if kwargs or plan.many or plan.local is not None or entry.canonical:
        return None
    if plan.impl is not None or plan.choice.outputs[0].shape is None:
        return None
    wrap, func, (layout,) = platform.wrap, entry.func, plan.choice.outputs
    local = [isinstance(arg, Mark) and fetches[id(arg)] is _LOCAL for arg in args]
    if any(isinstance(arg, (list, tuple)) for arg in args):
        return None
    if local == [True]:
        return lambda args, _: wrap(func(args[0]._local), layout)
    if local == [True, True]:
        return lambda args, _: wrap(func(args[0]._local, args[1]._local), layout)
    if local == [True, False]:
        return lambda args, _: wrap(func(args[0]._local, args[1]), layout)
    return None


def _readonly(plan: OpPlan) -> str | None:
    if not plan.moves:
        return None
    first = plan.call.operands[0]
    return (
        f"it is a copy: {describe(plan.call)} had to move {first.name} to "
        f"{plan.choice.targets[0].notation(first.dtype)}, so a write would be lost; write to {first.name} itself"
    )


def _writing(call: Run, plan: OpPlan, target: Run) -> Run:
    def write(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = target(args, kwargs)
        if written._readonly is not None:  # noqa: SLF001
            name, reason = plan.call.operands[0].name, written._readonly  # noqa: SLF001
            msg = f"{describe(plan.call)}: {name} cannot be written to: {reason}"
            raise UnsupportedOperatorError(msg)
        if call(args, kwargs) is NotImplemented:
            raise _not_understood(plan)
        written.drop_views()
        return written

    return write


def _like(outs: Any, wrapped: list[Any]) -> Any:
    """The outputs in the type in which the framework returned them: tuple, list or a named tuple."""
    return type(outs)(*wrapped) if hasattr(outs, "_fields") else type(outs)(wrapped)
