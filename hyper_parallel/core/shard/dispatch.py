"""The hot path: from a framework's call on DTensors to its call on locals.

One dictionary lookup on an immutable key finds the plan of a call seen before; the plan fetches locals, calls the
framework and wraps what comes back. Everything else happens once per key.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import Cause
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.call import OpCall, Operand, Ref
from hyper_parallel.core.shard.binder import binder
from hyper_parallel.core.shard.propagation import OpPlan, describe, propagate
from hyper_parallel.core.shard.rule import Decomposition, Rule, find_rule
from hyper_parallel.errors import MeshMismatchError, MixedTensorError, ShardMismatchError, UnsupportedOperatorError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hyper_parallel.core.shard.binder import Binder
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["Dispatcher", "Entry", "implicit_replication"]

_REPLICATE_PLAIN: ContextVar[bool] = ContextVar("hyper_parallel_implicit_replication", default=False)
_SCALARS = frozenset({int, float, bool, complex})
_ATOMS = frozenset({int, float, bool, complex, str, type(None)})
_LOCAL = attrgetter("_local")


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Inside, a plain tensor without gradient that meets a DTensor is taken to be equal on every rank."""
    token = _REPLICATE_PLAIN.set(True)
    try:
        yield
    finally:
        _REPLICATE_PLAIN.reset(token)


class Entry:
    """One spelling of an operator.

    Attributes:
        name: the spelling, for messages.
        func: what the caller called; called on locals when ``canonical`` is False.
        binder: its parameters in canonical names.
        rule: the operator's rule.
        local: the canonical local implementation.
        canonical: always call ``local`` (the spelled function cannot run on locals as it is).
        in_place: the first operand is written and returned.
        cache: plans by key.
    """

    __slots__ = ("binder", "cache", "canonical", "func", "in_place", "local", "name", "rule")

    def __init__(  # noqa: PLR0913 - a record
        self,
        name: str,
        func: Callable[..., Any],
        binder: Binder,
        rule: Rule | Decomposition,
        local: Callable[..., Any],
        *,
        canonical: bool = False,
        in_place: bool = False,
    ) -> None:
        """Record the spelling; its cache starts empty."""
        self.name, self.func, self.binder, self.rule, self.local = name, func, binder, rule, local
        self.canonical, self.in_place = canonical, in_place
        self.cache: dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], Any]] = {}


class Dispatcher:
    """Dispatch for one framework."""

    def __init__(self, platform: Platform) -> None:
        """Keep the platform's doors at hand."""
        self.platform = platform
        self.kind: type = platform.DTensorBase
        self.wrap = platform.wrap
        self.ops = Ops(self)

    def dispatch(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``entry`` on arguments of which at least one is, or contains, a DTensor."""
        if type(entry.rule) is Decomposition:
            return entry.rule.run(self.ops, **entry.binder.bind(args, kwargs))
        kind, scalars = self.kind, not entry.rule.by_value
        parts: list[Any] = []
        for arg in args:
            of = type(arg)
            if of is kind:
                parts.append(arg._layout)  # noqa: SLF001
            elif scalars and of in _SCALARS:
                parts.append(of)
            else:
                parts.append(self._key(arg))
        if kwargs:
            parts.extend((name, self._key(value)) for name, value in kwargs.items())
        if entry.rule.by_dtype:
            parts.extend(one.dtype for one in self._tensors((args, tuple(kwargs.values()))))
        key = tuple(parts)
        run = entry.cache.get(key)
        if run is None:
            run = self._compile(entry, args, kwargs)
            done = run(args, kwargs)  # a call that fails must not leave a plan behind
            entry.cache[key] = run
            return done
        return run(args, kwargs)

    # -- keys ------------------------------------------------------------------------------------------------------

    def _key(self, value: Any) -> Any:
        of = type(value)
        if of in _ATOMS:
            return (of, value)
        if isinstance(value, DTensor):
            return value._layout  # noqa: SLF001
        if of is tuple or of is list:
            return (of, *map(self._key, value))
        if of is slice:
            return (slice, value.start, value.stop, value.step)
        if self.platform.is_tensor(value):
            return ("plain", tuple(value.shape), self.platform.needs_grad(value), _REPLICATE_PLAIN.get())
        if of is dict:
            return (dict, *((name, self._key(item)) for name, item in value.items()))
        if isinstance(value, (list, tuple)):
            return (of, *map(self._key, value))
        return (of, value)

    def _tensors(self, tree: Any) -> Iterator[Any]:
        if isinstance(tree, (list, tuple)):
            for item in tree:
                yield from self._tensors(item)
        elif self.platform.is_tensor(tree):
            yield tree

    # -- compiling -------------------------------------------------------------------------------------------------

    def _compile(
        self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        marked, named = self._mark(args), self._mark(kwargs)
        bound = entry.binder.bind(marked, named)
        mesh = self._mesh(entry, bound)
        marks: list[_Mark] = []
        operands: list[Operand] = []
        template = {name: self._refer(name, value, mesh, operands, marks) for name, value in bound.items()}
        call = OpCall(entry.rule.op, mesh, tuple(operands), template)
        plan = propagate(call, entry.rule, in_place=entry.in_place)
        return _Run(self, entry, plan, marked, named, marks).compiled()

    def _mark(self, value: Any) -> Any:
        """The same structure with each occurrence of a tensor made distinguishable: one may be passed twice."""
        if isinstance(value, (list, tuple)):
            return type(value)(self._mark(item) for item in value)
        if isinstance(value, dict):
            return {name: self._mark(item) for name, item in value.items()}
        return _Mark(value) if self.platform.is_tensor(value) else value

    def _mesh(self, entry: Entry, bound: dict[str, Any]) -> Any:
        found = {
            one._layout.mesh: one  # noqa: SLF001
            for one in _marked(tuple(bound.values()))
            if isinstance(one, DTensor)
        }
        if len(found) > 1:
            first, second = list(found)[:2]
            msg = f"{entry.name}: operands live on different meshes, {first!r} and {second!r}; bring them to one mesh first"
            raise MeshMismatchError(msg)
        if not found:
            msg = f"{entry.name}: no DTensor among the arguments that its signature ({entry.binder.text}) takes as tensors"
            raise UnsupportedOperatorError(msg)
        return next(iter(found))

    def _refer(self, name: str, value: Any, mesh: Any, operands: list[Operand], marks: list[_Mark]) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(
                self._refer(f"{name}[{index}]", item, mesh, operands, marks) for index, item in enumerate(value)
            )
        if not isinstance(value, _Mark):
            return value
        tensor = value.tensor
        distributed = isinstance(tensor, DTensor)
        layout = tensor._layout if distributed else self._plain_layout(name, tensor, mesh)  # noqa: SLF001
        local = tensor._local if distributed else tensor  # noqa: SLF001
        operands.append(Operand(name, layout, local.dtype, self.platform.is_floating(local)))
        marks.append(value)
        return Ref(len(operands) - 1)

    def _plain_layout(self, name: str, value: Any, mesh: Any) -> Layout:
        shape = tuple(value.shape)
        constant = not self.platform.needs_grad(value) and (not shape or _REPLICATE_PLAIN.get())
        if constant:
            return Layout.of(mesh, ((),) * len(shape), (), shape)
        msg = (
            f"argument {name} is a plain tensor {list(shape)} and meets DTensors on {mesh!r}; "
            f"{name} = hyper_parallel.DTensor.from_local({name}, mesh, [{', '.join(['Replicate()'] * mesh.ndim)}]) "
            "if every rank holds the same values"
        )
        raise MixedTensorError(msg)


class Ops:
    """Canonical operators as functions of DTensors, for decompositions: ``ops.softmax(x, dim=-1)``.

    Without a DTensor among the arguments the framework's own implementation runs.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.platform = dispatcher.platform

    def __getattr__(self, op: str) -> Callable[..., Any]:
        """The canonical operator ``op``."""
        found = find_rule(op)
        if found is None:
            msg = f"no canonical operator {op!r}"
            raise AttributeError(msg)
        dispatcher, local = self._dispatcher, None
        if isinstance(found, Rule):
            local = self.platform.local_op(op)
        entry = Entry(op, local or _same, binder(found.signature), found, local or _same, canonical=True)

        def call(*args: Any, **kwargs: Any) -> Any:
            if local is None or any(isinstance(one, DTensor) for one in dispatcher._tensors((args, tuple(kwargs.values())))):  # noqa: SLF001
                return dispatcher.dispatch(entry, args, kwargs)
            return local(**entry.binder.bind(args, kwargs))

        setattr(self, op, call)
        return call


class _Mark:
    """One occurrence of a tensor among the arguments of a call."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


def _marked(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _marked(item)
    elif isinstance(tree, _Mark):
        yield tree.tensor


class _Run:
    """Compiles one plan into a closure over the caller's argument form, or over the canonical one."""

    def __init__(  # noqa: PLR0913 - everything a compiled call closes over
        self,
        dispatcher: Dispatcher,
        entry: Entry,
        plan: OpPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        marks: list[_Mark],
    ) -> None:
        self.dispatcher, self.entry, self.plan = dispatcher, entry, plan
        self.args, self.kwargs = args, kwargs
        self.indexed = [self._fetch(index, mark.tensor) for index, mark in enumerate(marks)]
        self.fetches = dict(zip(map(id, marks), self.indexed, strict=True))

    def _fetch(self, index: int, value: Any) -> Callable[[Any], Any]:
        if not isinstance(value, DTensor):
            return _same
        choice, operand = self.plan.choice, self.plan.call.operands[index]
        target, varying = choice.targets[index], choice.varying[index]
        if target is operand.layout and (not varying or not operand.floating):
            return _LOCAL
        cause = Cause(self.entry.name, operand.name, implicit=True)

        def enter(tensor: Any) -> Any:
            return tensor.local_for(target, varying, cause)

        return enter

    def compiled(self) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        call = self._canonical() if self.plan.local is not None or self.entry.canonical else self._spelled()
        if self.entry.in_place:
            return _writing(call, self.entry, self.plan)
        return self._wrapped(call)

    # -- what to call ------------------------------------------------------------------------------------------------

    def _spelled(self) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        func = self.entry.func
        slots = [self._slot(arg) for arg in self.args]
        named = {name: self._slot(value) for name, value in self.kwargs.items()}
        if not named:
            if len(slots) == 1:
                (only,) = slots
                return lambda args, _: func(only(args[0]))
            if len(slots) == 2:  # noqa: PLR2004 - a pair
                first, second = slots
                return lambda args, _: func(first(args[0]), second(args[1]))
            return lambda args, _: func(*[slot(arg) for slot, arg in zip(slots, args)])  # noqa: B905 - hot; same key, same length
        return lambda args, kwargs: func(
            *[slot(arg) for slot, arg in zip(slots, args)],  # noqa: B905 - hot; same key, same length
            **{name: named[name](value) for name, value in kwargs.items()},
        )

    def _slot(self, value: Any) -> Callable[[Any], Any]:
        found = self.fetches.get(id(value))
        if found is not None:
            return found
        if isinstance(value, (list, tuple)) and any(True for _ in _marked(value)):
            inner = [self._slot(item) for item in value]
            kind = type(value)
            return lambda given: kind(slot(item) for slot, item in zip(inner, given))  # noqa: B905 - hot
        return _same

    def _canonical(self) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        entry, plan, dispatcher = self.entry, self.plan, self.dispatcher
        local = plan.local
        replaced = (local.args or {}) if local is not None else {}
        run = local.run if local is not None else None
        platform, indexed = dispatcher.platform, self.indexed
        template = {**plan.call.args, **replaced}

        def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            tensors = [value for value in dispatcher._tensors(tuple(entry.binder.bind(args, kwargs).values()))]  # noqa: SLF001, C416
            locals_ = [fetch(value) for fetch, value in zip(indexed, tensors)]  # noqa: B905 - hot
            filled = {name: _fill(value, locals_) for name, value in template.items()}
            if run is not None:
                return run(platform, filled)
            return entry.local(**filled)

        return call

    # -- what to do with the outputs ---------------------------------------------------------------------------------

    def _wrapped(
        self, call: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    ) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        wrap, layouts = self.dispatcher.wrap, self.plan.choice.outputs
        readonly = self._readonly()
        checked = _Checked(self.plan)
        if self.plan.many:

            def run_many(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                outs = call(args, kwargs)
                checked(outs)
                return _like(outs, [wrap(out, layout) for out, layout in zip(outs, layouts, strict=True)], readonly)

            return run_many
        (layout,) = layouts
        if readonly is not None:

            def run_readonly(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                out = call(args, kwargs)
                checked((out,))
                wrapped = wrap(out, layout)
                wrapped._readonly = readonly  # noqa: SLF001
                return wrapped

            return run_readonly

        def run_one(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            out = call(args, kwargs)
            if not checked.done:
                checked((out,))
            return wrap(out, layout)

        return run_one

    def _readonly(self) -> str | None:
        if not (self.entry.rule.view and self.plan.moves):
            return None
        first = self.plan.call.operands[0]
        return (
            f"it is a copy: {describe(self.plan.call)} had to move {first.name} to "
            f"{self.plan.choice.targets[0].notation(first.dtype)}, so a write would be lost; write to {first.name} itself"
        )


class _Checked:
    """Compares the first outputs with the plan: a rule that is wrong about shapes must not pass silently."""

    def __init__(self, plan: OpPlan) -> None:
        self.plan, self.done = plan, False

    def __call__(self, outs: Any) -> None:
        if self.done:
            return
        for out, layout in zip(outs, self.plan.choice.outputs, strict=True):
            if tuple(out.shape) != layout.local_shape:
                msg = (
                    f"{describe(self.plan.call)}: the local call returned {list(out.shape)}, the plan says "
                    f"{list(layout.local_shape)} of {layout.notation()}; this is a wrong rule, please report it"
                )
                raise ShardMismatchError(msg)
        self.done = True


def _writing(
    call: Callable[[tuple[Any, ...], dict[str, Any]], Any], entry: Entry, plan: OpPlan
) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    def write(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = args[0]
        if written._readonly is not None:  # noqa: SLF001
            msg = f"{describe(plan.call)}: {plan.call.operands[0].name} cannot be written to: {written._readonly}"  # noqa: SLF001
            raise UnsupportedOperatorError(msg)
        call(args, kwargs)
        written.drop_views()
        return written

    del entry
    return write


def _fill(value: Any, locals_: list[Any]) -> Any:
    if type(value) is Ref:
        return locals_[value.index]
    if isinstance(value, (list, tuple)):
        return type(value)(_fill(item, locals_) for item in value)
    return value


def _like(outs: Any, wrapped: list[Any], readonly: str | None) -> Any:
    if readonly is not None:
        for one in wrapped:
            one._readonly = readonly  # noqa: SLF001
    if hasattr(outs, "_fields") or type(outs).__module__ == "torch.return_types":
        return type(outs)(wrapped) if not hasattr(outs, "_fields") else type(outs)(*wrapped)
    return type(outs)(wrapped)


def _same(value: Any) -> Any:
    return value
