"""The hot path: from a framework's call on DTensors to its call on locals.

One dictionary lookup on an immutable key finds the plan of a call seen before; the plan fetches locals, calls the
framework and wraps what comes back. Everything else happens once per key.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Number
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.skip_dispatch import any_block, local_operands, outside_blocks, skipped
from hyper_parallel.core.shard.entry import OpEntry, Run, binder
from hyper_parallel.core.shard.executor import Mark, compile_plan, marked
from hyper_parallel.core.shard.op_plan import propagate
from hyper_parallel.core.shard.rule import OpCall, Operand, Ref, Rule, UnknownOperandError, find_rule
from hyper_parallel.errors import MeshMismatchError, MixedTensorError, UnsupportedOperatorError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["Dispatcher", "implicit_replication", "no_function"]

_REPLICATE_PLAIN: ContextVar[bool] = ContextVar("hyper_parallel_implicit_replication", default=False)
_ATOMS = frozenset({int, bool, str, type(None)})  # of which equal values are the same value; 0.0 == -0.0
_MOST_PLANS = 4096
_NO_KWARGS: dict[str, Any] = {}


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Inside, a plain tensor without gradient that meets a DTensor is taken to be equal on every rank."""
    token = _REPLICATE_PLAIN.set(True)
    try:
        yield
    finally:
        _REPLICATE_PLAIN.reset(token)


class Dispatcher:
    """Dispatch for one framework."""

    def __init__(self, platform: Platform) -> None:
        """Keep the platform's doors at hand."""
        self.platform = platform
        self.kind: type = platform.DTensorBase
        self.wrap = platform.wrap
        self.ops = Ops(self)

    def dispatch(  # noqa: C901, PLR0912 - the hot path, in line
        self, entry: OpEntry, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run ``entry`` on arguments of which at least one is, or contains, a DTensor."""
        if any_block():
            if skipped(entry.func, entry.name, entry.rule.op):
                return self._on_locals(entry, args, kwargs)
            if entry.composed is not None:
                with outside_blocks():
                    return entry.composed(self.ops, **entry.binder.bind(args, kwargs))
        if entry.composed is not None:
            return entry.composed(self.ops, **entry.binder.bind(args, kwargs))
        kind, loose = self.kind, entry.loose
        parts: list[Any] = []
        for arg in args:
            of = type(arg)
            if of is kind:
                parts.append(arg._layout)
            elif of in loose:
                parts.append(of)
            elif of in _ATOMS:
                # Flat, type before value: 1 == 1.0 == True, and no key reads two ways.
                parts.append(of)
                parts.append(arg)
            else:
                parts.append(self._key(arg))
        for name, value in kwargs.items():
            parts.append(name)
            of = type(value)
            if of in loose:
                parts.append(of)
            elif of in _ATOMS:
                parts.append(of)
                parts.append(value)
            else:
                parts.append(self._key(value))
        if entry.by_dtype:
            parts.extend(one.dtype for one in self.tensors((args, tuple(kwargs.values()))))
        key = tuple(parts)
        try:
            run = entry.cache.get(key)
        except TypeError:
            self._refuse_unhashable(entry, (*args, *kwargs.values()))
            raise
        if run is None:
            first, run = self._compile(entry, args, kwargs)
            done = first(args, kwargs)  # a call that fails must not leave a plan behind
            if len(entry.cache) >= _MOST_PLANS:  # sizes and numbers that never come again must not fill the memory
                entry.cache.clear()
            entry.cache[key] = run
            return done
        return run(args, kwargs)

    def unary(self, entry: OpEntry) -> Callable[[Any], Any]:
        """A method without arguments: :meth:`dispatch` with the key made in line."""
        get, full = entry.cache.get, self.dispatch

        def call(x: Any) -> Any:
            run = None if any_block() else get((x._layout,))
            return full(entry, (x,), _NO_KWARGS) if run is None else run((x,), _NO_KWARGS)

        return call

    def binary(self, entry: OpEntry) -> Callable[[Any, Any], Any]:
        """An operator of two operands: :meth:`dispatch` with the key made in line."""
        get, full, kind = entry.cache.get, self.dispatch, self.kind
        loose = entry.loose

        def whole(x: Any, y: Any) -> Any:
            try:
                return full(entry, (x, y), _NO_KWARGS)
            except UnknownOperandError:
                return NotImplemented  # Python asks y, and compares identities or says that it cannot

        def call(x: Any, y: Any) -> Any:
            of = type(y)
            if any_block():
                run = None
            elif of is kind:
                run = get((x._layout, y._layout))
            elif of in loose:
                run = get((x._layout, of))
            else:
                run = None
            return whole(x, y) if run is None else run((x, y), _NO_KWARGS)

        return call

    def _on_locals(self, entry: OpEntry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call on local tensors, as the caller spelled it."""
        locals_, named = local_operands(args), local_operands(kwargs)
        if entry.composed is not None:
            return self._composed_on_locals(entry, args, kwargs, locals_, named)
        found = entry.local(**entry.binder.bind(locals_, named)) if entry.canonical else entry.func(*locals_, **named)
        written = entry.target(args, kwargs) if entry.in_place else None
        if isinstance(written, DTensor):
            written.drop_views()
            return written
        return found

    def _composed_on_locals(
        self, entry: OpEntry, args: tuple[Any, ...], kwargs: dict[str, Any], locals_: Any, named: Any
    ) -> Any:
        """The caller's function itself; what it is composed of may ask DTensors what local tensors cannot tell.

        Nothing says what it writes: that is seen.
        """
        if entry.func is no_function:
            return entry.composed(self.ops, **entry.binder.bind(locals_, named))  # type: ignore[misc] # the caller's condition
        version = self.platform.version
        given = [one for one in self.tensors((args, tuple(kwargs.values()))) if isinstance(one, DTensor)]
        before = [version(one._local) for one in given]
        found = entry.func(*locals_, **named)
        for one, old in zip(given, before, strict=True):
            if version(one._local) != old:
                one.drop_views()
                found = one if found is one._local else found
        return found

    # -- keys ------------------------------------------------------------------------------------------------------

    def _key(self, value: Any) -> Any:  # noqa: PLR0911 - one line per kind
        of = type(value)
        if of in _ATOMS:
            return (of, value)
        if of is float:
            return (of, value or repr(value))
        if isinstance(value, DTensor):
            return value._layout
        if of is tuple and _ATOMS.issuperset(map(type, value)):
            return (tuple(map(type, value)), value)
        if of is slice:
            return (slice, value.start, value.stop, value.step)
        if isinstance(value, (list, tuple)):
            return (of, *map(self._key, value))
        if self.platform.is_tensor(value):
            return ("plain", tuple(value.shape), self.platform.needs_grad(value), _REPLICATE_PLAIN.get())
        if of is dict:
            return (dict, *((name, self._key(item)) for name, item in value.items()))
        # Of complex numbers and NumPy's, too, equal ones may differ in the sign of a zero.
        return (of, repr(value)) if isinstance(value, Number) else (of, value)

    def _refuse_unhashable(self, entry: OpEntry, values: tuple[Any, ...]) -> None:
        """An array is no operand: nothing says how its values lie on the ranks."""
        for value in values:
            if hasattr(value, "__array__") and not self.platform.is_tensor(value):
                msg = (
                    f"{entry.name}: a {type(value).__name__} {list(value.shape)} meets DTensors; make it a tensor of "
                    "the framework, and lay that out: hyper_parallel.distribute_tensor(tensor, mesh, placements)"
                )
                raise MixedTensorError(msg)

    def tensors(self, tree: Any) -> Iterator[Any]:
        """Tensors in nested sequences, in order."""
        if isinstance(tree, (list, tuple)):
            for item in tree:
                yield from self.tensors(item)
        elif self.platform.is_tensor(tree):
            yield tree

    # -- compiling -------------------------------------------------------------------------------------------------

    def _compile(self, entry: OpEntry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Run, Run]:
        marked_args, named = self._mark(args), self._mark(kwargs)
        try:
            bound = entry.binder.bind(marked_args, named)
        except TypeError as error:
            msg = f"{entry.name}({entry.binder.text}): {error}"
            raise TypeError(msg) from None
        mesh = self._mesh(entry, bound)
        if entry.in_place:
            self._refuse_plain_target(entry, entry.target(marked_args, named))
        marks: list[Mark] = []
        operands: list[Operand] = []
        rule: Rule = entry.rule  # type: ignore[assignment] # decompositions are not compiled
        # A spelling may name the parameters in another order; operands are counted in the rule's.
        order = [name for name in binder(rule.signature).names if name in bound]
        bound = {name: bound[name] for name in dict.fromkeys((*order, *bound))}
        template = {name: self._refer(name, value, mesh, operands, marks) for name, value in bound.items()}
        call = OpCall(rule.op, mesh, tuple(operands), template)
        plan = propagate(call, rule, in_place=entry.in_place)
        return compile_plan(self.platform, entry, plan, marked_args, named, marks)

    def _refuse_plain_target(self, entry: OpEntry, target: Any) -> None:
        """A rank's plain tensor is no place for a distributed value."""
        if isinstance(target, Mark) and not isinstance(target.tensor, DTensor):
            msg = (
                f"{entry.name}: a plain tensor {list(target.tensor.shape)} cannot be written with DTensors; write "
                "what full_tensor() gives, and clip gradients of plain and distributed parameters with "
                "hyper_parallel.clip_grad_norm_"
            )
            raise MixedTensorError(msg)

    def _mark(self, value: Any) -> Any:
        """The same structure with each occurrence of a tensor made distinguishable: one may be passed twice."""
        if isinstance(value, (list, tuple)):
            return type(value)(self._mark(item) for item in value)
        if isinstance(value, dict):
            return {name: self._mark(item) for name, item in value.items()}
        return Mark(value) if self.platform.is_tensor(value) else value

    def _mesh(self, entry: OpEntry, bound: dict[str, Any]) -> Any:
        found = {
            one.tensor._layout.mesh: one for one in marked(tuple(bound.values())) if isinstance(one.tensor, DTensor)
        }
        if len(found) > 1:
            first, second = list(found)[:2]
            msg = (
                f"{entry.name}: operands live on different meshes, {first!r} and {second!r}; "
                "bring them to one mesh first"
            )
            raise MeshMismatchError(msg)
        if not found:
            msg = (
                f"{entry.name}: no DTensor among the arguments "
                f"that its signature ({entry.binder.text}) takes as tensors"
            )
            raise UnsupportedOperatorError(msg)
        return next(iter(found))

    def _refer(self, name: str, value: Any, mesh: Any, operands: list[Operand], marks: list[Mark]) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(
                self._refer(f"{name}[{index}]", item, mesh, operands, marks) for index, item in enumerate(value)
            )
        if not isinstance(value, Mark):
            return value
        tensor = value.tensor
        distributed = isinstance(tensor, DTensor)
        layout = tensor._layout if distributed else self._plain_layout(name, tensor, mesh)
        local = tensor._local if distributed else tensor
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
            "if every rank holds the same values; if it is a piece that a parallel style handed out, give that style "
            "use_local_output=False"
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
        run = local or no_function
        entry = OpEntry(op, run, binder(found.signature), found, run, canonical=True)

        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = dispatcher.tensors((args, tuple(kwargs.values())))
            if local is None or any(isinstance(one, DTensor) for one in tensors):
                return dispatcher.dispatch(entry, args, kwargs)
            return local(**entry.binder.bind(args, kwargs))

        setattr(self, op, call)
        return call


def no_function(*_: Any, **__: Any) -> Any:
    """In place of the function of a decomposition that is called by its canonical name."""
    msg = "a decomposition has no local implementation"
    raise AssertionError(msg)
