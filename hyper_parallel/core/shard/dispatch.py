"""The hot path: turns a framework call on DTensors into a call on local tensors.

An immutable key of the call finds its executor in a dictionary. The executor fetches local tensors, calls the framework
and wraps the result. Everything else happens once per key.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Number
from typing import TYPE_CHECKING, Any

from hyper_parallel._caches import CacheInfo, register_owners
from hyper_parallel._tree import leaves, tree_map, tree_map_named
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.parameter_paths import MADE_BY_FULLY_SHARD
from hyper_parallel.core.dtensor.skip_dispatch import local_operands, open_blocks, outside_blocks, skipped
from hyper_parallel.core.shard.entry import ENTRIES, OpEntry, Run, binder
from hyper_parallel.core.shard.executor import TensorArgument, compile_plan, marks_in
from hyper_parallel.core.shard.op_plan import plan_call, replicated_layout
from hyper_parallel.core.shard.outside import outside_of_mesh
from hyper_parallel.core.shard.refusals import (
    check_framework,
    common_mesh,
    plain_tensor_error,
    shard_error,
    transformed_error,
)
from hyper_parallel.core.shard.rule import OpCall, Operand, Ref, Rule, UnknownOperandError, find_rule
from hyper_parallel.errors import MixedTensorError, UnsupportedOperatorError
from hyper_parallel.platform.select import framework_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hyper_parallel.core.dtensor.layout import Layout
    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["CACHE_MISS", "Dispatcher", "implicit_replication", "implicitly_replicates", "no_function"]

CACHE_MISS: Any = object()
"""Returned by :meth:`Dispatcher.dispatch_cached` if the key of a call is not cached."""

_REPLICATE_PLAIN: ContextVar[bool] = ContextVar("hyper_parallel_implicit_replication", default=False)
# Types whose equal values may share a cache key. Not float: 0.0 == -0.0.
_ATOMS = frozenset({int, bool, str, type(None)})
_MAX_PLANS = 4096
_NO_KWARGS: dict[str, Any] = {}
_BOUNDS = frozenset({int, type(None)})
_PICKS = frozenset({int, type(None), type(Ellipsis)})

register_owners(
    ENTRIES,
    lambda entry: CacheInfo(f"plans of {entry.name}", len(entry.cache), _MAX_PLANS),
    lambda entry: entry.cache.clear(),
)


implicitly_replicates = _REPLICATE_PLAIN.get
"""Return True inside :func:`implicit_replication`."""


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Inside this context, plain tensors without gradient count as replicated: the caller ensures equal values."""
    token = _REPLICATE_PLAIN.set(True)
    try:
        yield
    finally:
        _REPLICATE_PLAIN.reset(token)


class Dispatcher:
    """Dispatch for one framework."""

    def __init__(self, platform: Platform) -> None:
        """Dispatch calls of ``platform``."""
        self.platform = platform
        self.dtensor_type: type = platform.DTensorBase
        self._framework = framework_of(platform.DTensorBase)
        self._needs_grad = platform.needs_grad
        self.ops = Ops(self)

    def dispatch(  # noqa: C901, PLR0912, PLR0915 - the hot path, in line
        self, entry: OpEntry, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run ``entry`` on arguments of which at least one is, or contains, a DTensor."""
        if open_blocks():
            if skipped(entry.func, entry.name, entry.rule.op):
                return self._on_locals(entry, args, kwargs)
            if entry.composed is not None:
                with outside_blocks():
                    return entry.composed(self.ops, **entry.binder.bind(args, kwargs))
        if entry.composed is not None:
            if entry.direct is None:
                return entry.composed(self.ops, **entry.binder.bind(args, kwargs))
            entry = entry.direct
        dtensor_type, loose = self.dtensor_type, entry.loose
        parts: list[Any] = []
        for arg in args:
            cls = type(arg)
            if cls is dtensor_type:
                parts.append(arg._layout)
            elif cls in loose:
                parts.append(cls)
            elif cls in _ATOMS:
                # Flat and with the type before the value (1 == 1.0 == True), so that keys are unambiguous.
                parts.append(cls)
                parts.append(arg)
            elif cls is list and arg and all([type(item) is dtensor_type for item in arg]):  # noqa: C419 - hot
                parts.append((cls, *[item._layout for item in arg]))
            else:
                parts.append(self._key(arg))
        if kwargs:
            for name, value in kwargs.items():
                parts.append(name)
                cls = type(value)
                if cls is dtensor_type:
                    parts.append(value._layout)
                elif cls in loose:
                    parts.append(cls)
                elif cls in _ATOMS:
                    parts.append(cls)
                    parts.append(value)
                else:
                    parts.append(self._key(value))
        if entry.by_dtype is True:
            self._add_dtypes(parts, (*args, *kwargs.values()), enabled=self.platform.grad_enabled())
        key = tuple(parts)
        try:
            run = entry.cache.get(key)
        except TypeError:
            self._refuse_unhashable(entry, (*args, *kwargs.values()))
            raise
        if run is None and entry.by_dtype == "partial":  # keys of calls with partial values include dtypes
            values = (*args, *kwargs.values())
            if _has_partial(values, dtensor_type):
                self._add_dtypes(parts, values, enabled=self.platform.grad_enabled())
                key = tuple(parts)
                run = entry.cache.get(key)
        if run is None:
            if entry.unless is not None and entry.unless(bound := entry.binder.bind(args, kwargs)):
                return entry.composed_as(self.ops, **bound)
            first, run = self._compile(entry, args, kwargs)
            result = first(args, kwargs)  # before caching, so that a failing call leaves no plan
            if len(entry.cache) >= _MAX_PLANS:  # most plans may be for sizes or numbers that do not occur again
                entry.cache.clear()
            entry.cache[key] = run
            return result
        return run(args, kwargs)

    def dispatch_cached(self, entry: OpEntry) -> Callable[[Any], Any]:  # noqa: C901 - as above
        """Return a function of positional arguments that runs a cached call, or returns :data:`CACHE_MISS`.

        It is :meth:`dispatch` with the key computed inline, for calls with tensors, lists of them, integers and tuples
        of those. Trailing arguments for keyword-only parameters of the rule are accepted if they are None, the default.
        """
        get, dtensor_type, loose = entry.cache.get, self.dtensor_type, entry.loose
        most, may_be_none = entry.binder.most_positional, entry.binder.named_are_optional
        add_dtypes, always, only_partial = self._add_dtypes, entry.by_dtype is True, entry.by_dtype == "partial"

        def call(args: Any) -> Any:
            if len(args) > most:
                if not may_be_none or any(arg is not None for arg in args[most:]):
                    return CACHE_MISS
                args = args[:most]
            parts: list[Any] = []
            for arg in args:
                cls = type(arg)
                if cls is dtensor_type:
                    parts.append(arg._layout)
                elif cls in loose:
                    parts.append(cls)
                elif cls in _ATOMS:
                    parts.append(cls)
                    parts.append(arg)
                else:
                    part = _part(cls, arg, dtensor_type)
                    if part is None:
                        return CACHE_MISS
                    parts.append(part)
            if always:
                add_dtypes(parts, args, enabled=self.platform.grad_enabled())
            run = get(tuple(parts))
            if run is None and only_partial and _has_partial(args, dtensor_type):
                add_dtypes(parts, args, enabled=self.platform.grad_enabled())
                run = get(tuple(parts))
            return CACHE_MISS if run is None else run(args, _NO_KWARGS)

        return call

    def unary(self, entry: OpEntry) -> Callable[[Any], Any]:
        """A method without arguments: :meth:`dispatch` with the key computed inline."""
        get, full = entry.cache.get, self.dispatch

        def call(x: Any) -> Any:
            run = None if open_blocks() else get((x._layout,))
            return full(entry, (x,), _NO_KWARGS) if run is None else run((x,), _NO_KWARGS)

        return call

    def binary(self, entry: OpEntry) -> Callable[[Any, Any], Any]:
        """An operator of two operands: :meth:`dispatch` with the key computed inline."""
        get, full, dtensor_type = entry.cache.get, self.dispatch, self.dtensor_type
        loose = entry.loose

        def slow(x: Any, y: Any) -> Any:
            try:
                return full(entry, (x, y), _NO_KWARGS)
            except UnknownOperandError:
                return NotImplemented  # Python tries the reflected method of y, then raises or compares identities

        def call(x: Any, y: Any) -> Any:
            cls = type(y)
            if open_blocks():
                run = None
            elif cls is dtensor_type:
                run = get((x._layout, y._layout))
            elif cls in loose:
                run = get((x._layout, cls))
            else:
                run = None
            return slow(x, y) if run is None else run((x, y), _NO_KWARGS)

        return call

    def subscript(self, full: Callable[[Any, Any], Any], plain: OpEntry) -> Callable[[Any, Any], Any]:
        """``x[index]``: :meth:`dispatch` with the key of numbers and slices of numbers computed inline.

        Args:
            full: dispatches ``x[index]`` with any index.
            plain: entry of the operator for indices without tensors; its cached executors are used.
        """
        get = plain.cache.get

        def call(x: Any, index: Any) -> Any:
            parts = None if open_blocks() else _index_key(index)
            run = None if parts is None else get((x._layout, *parts))
            return full(x, index) if run is None else run((x, index), _NO_KWARGS)

        return call

    def _on_locals(self, entry: OpEntry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the caller's own call on local tensors."""
        locals_, named = local_operands(args), local_operands(kwargs)
        if entry.composed is not None:
            return self._composed_on_locals(entry, args, kwargs, locals_, named)
        result = entry.local(**entry.binder.bind(locals_, named)) if entry.canonical else entry.func(*locals_, **named)
        written = entry.target(args, kwargs) if entry.in_place else None
        if isinstance(written, DTensor):
            written.drop_views()
            return written
        return result

    def _composed_on_locals(
        self, entry: OpEntry, args: tuple[Any, ...], kwargs: dict[str, Any], locals_: Any, named: Any
    ) -> Any:
        """Run the framework's own function on local tensors: the steps of the decomposition would need DTensors.

        Nothing declares whether it writes, so the operands' version counters are compared.
        """
        if entry.func is no_function:
            return entry.composed(self.ops, **entry.binder.bind(locals_, named))  # type: ignore[misc] # the caller's condition
        version = self.platform.version
        operands = [leaf for leaf in self.tensors((*args, *kwargs.values())) if isinstance(leaf, DTensor)]
        before = [version(operand._local) for operand in operands]
        result = entry.func(*locals_, **named)
        for operand, old in zip(operands, before, strict=True):
            if version(operand._local) != old:
                operand.drop_views()
                result = operand if result is operand._local else result
        return result

    # -- keys ------------------------------------------------------------------------------------------------------

    def _key(self, value: Any) -> Any:  # noqa: C901, PLR0911 - one line per type
        """The part of a key for one argument."""
        cls = type(value)
        if cls is self.dtensor_type:
            return value._layout
        if cls in _ATOMS:
            return (cls, value)
        if cls is list:
            return (cls, *map(self._key, value))
        if cls is float:
            return (cls, value or repr(value))
        if isinstance(value, DTensor):
            return value._layout if value._platform is self.platform else (cls, value._layout)
        if cls is tuple and _ATOMS.issuperset(map(type, value)):
            return (tuple(map(type, value)), value)
        if cls is slice:
            return (slice, value.start, value.stop, value.step)
        if isinstance(value, (list, tuple)):
            return (cls, *map(self._key, value))
        if self.platform.is_tensor(value):
            return ("plain", tuple(value.shape), self.platform.needs_grad(value), _REPLICATE_PLAIN.get())
        if cls is dict:
            return (dict, *((name, self._key(item)) for name, item in value.items()))
        # Equal complex or NumPy numbers may differ in the sign of zero, too.
        return (cls, repr(value)) if isinstance(value, Number) else (cls, value)

    def _add_dtypes(self, parts: list[Any], values: Any, *, enabled: bool) -> None:
        """Add the dtype of each tensor, and whether its gradient is recorded, to the parts of a key."""
        needs_grad, dtensor_type = self._needs_grad, self.dtensor_type
        for value in values:
            cls = type(value)
            if cls is dtensor_type or isinstance(value, DTensor):
                local = value._local
                parts.append(local.dtype)
                parts.append(enabled and needs_grad(local))
            elif cls is list or isinstance(value, (list, tuple)):
                self._add_dtypes(parts, value, enabled=enabled)
            elif cls not in _ATOMS and self.platform.is_tensor(value):
                parts.append(value.dtype)
                parts.append(enabled and self.platform.needs_grad(value))

    def _refuse_unhashable(self, entry: OpEntry, values: tuple[Any, ...]) -> None:
        """Refuse an array, which has no layout."""
        for value in values:
            if hasattr(value, "__array__") and not self.platform.is_tensor(value):
                msg = (
                    f"{entry.name}: a {type(value).__name__} {list(value.shape)} was mixed with DTensors; convert it "
                    "to a tensor of the framework, and distribute it: "
                    "hyper_parallel.distribute_tensor(tensor, mesh, placements)"
                )
                raise MixedTensorError(msg)

    def tensors(self, tree: Any) -> list[Any]:
        """The tensors in nested sequences, in order."""
        is_tensor = self.platform.is_tensor
        return [leaf for leaf in leaves(tree) if is_tensor(leaf)]

    # -- compiling -------------------------------------------------------------------------------------------------

    def _compile(self, entry: OpEntry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Run, Run]:
        """Plan the call and compile the plan: returns the executor of this call, and that of later ones."""
        check_framework(entry.name, self._framework, leaves([*args, kwargs], (list, tuple, dict)))
        marked, named = self._mark(args), self._mark(kwargs)
        try:
            bound = entry.binder.bind(marked, named)
        except TypeError as error:
            msg = f"{entry.name}({entry.binder.text}): {error}"
            raise TypeError(msg) from None
        mesh = self._mesh(entry, bound)
        if entry.in_place and not isinstance(target := entry.target(marked, named).tensor, DTensor):
            run = self._write_plain(entry, target, [mark.tensor for mark in marks_in((*marked, *named.values()))])
            return run, run
        marks: list[TensorArgument] = []
        operands: list[Operand] = []
        rule: Rule = entry.rule  # type: ignore[assignment] # decompositions are not compiled
        # An entry may list the parameters in another order, but operands are numbered in the order of the rule.
        order = [name for name in binder(rule.signature).names if name in bound]
        further = () if entry.unless is not None else bound  # the rule does not have the arguments that `unless` reads
        bound = {name: bound[name] for name in dict.fromkeys((*order, *further))}
        try:
            template = {name: self._template(name, value, mesh, operands, marks) for name, value in bound.items()}
        except MixedTensorError:
            if any(hasattr(mark.tensor, MADE_BY_FULLY_SHARD) for mark in marks_in(tuple(bound.values()))):
                raise shard_error(entry.name) from None
            raise
        call = OpCall(rule.op, mesh, tuple(operands), template)
        if mesh.coordinate is None:
            run = outside_of_mesh(self.platform, entry, call, marked, named, marks)
            return run, run
        plan = plan_call(call, rule, in_place=entry.in_place)
        return compile_plan(self.platform, entry, plan, marked, named, marks)

    def _write_plain(self, entry: OpEntry, target: Any, tensors: list[Any]) -> Run:
        """Compile a write to the plain tensor ``target`` from DTensors of one element, replicated on all ranks.

        Such a call clips gradients of plain and distributed parameters together.

        Raises:
            MixedTensorError: a DTensor has more elements or is not replicated; or, at the call, would get a gradient.
        """
        error = MixedTensorError(
            f"{entry.name}: a plain tensor {list(target.shape)} can be written only with DTensors of one element that "
            "are replicated and need no gradient; write the result of full_tensor()"
        )
        distributed = [x for x in tensors if isinstance(x, DTensor)]
        layouts = [x._layout for x in distributed if math.prod(x.shape) == 1]
        is_whole = all(x.is_replicated and x.mesh.coordinate is not None for x in layouts)
        if len(layouts) < len(distributed) or not is_whole:
            raise error

        def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            distributed = [x for x in self.tensors((*args, *kwargs.values())) if isinstance(x, DTensor)]
            if self.platform.grad_enabled() and any(self.platform.needs_grad(x._local) for x in distributed):
                raise error
            return self._on_locals(entry, args, kwargs)

        return run

    def _mark(self, value: Any) -> Any:
        """Return the arguments with every occurrence of a tensor wrapped, since a tensor may be passed twice."""
        is_tensor = self.platform.is_tensor
        return tree_map(lambda leaf: TensorArgument(leaf) if is_tensor(leaf) else leaf, value, (list, tuple, dict))

    def _mesh(self, entry: OpEntry, bound: dict[str, Any]) -> DeviceMesh:
        """The mesh of the operands."""
        tensors = (mark.tensor for mark in marks_in(tuple(bound.values())))
        mesh = common_mesh(entry.name, (tensor._layout.mesh for tensor in tensors if isinstance(tensor, DTensor)))
        if mesh is None:
            msg = (
                f"{entry.name}: no DTensor among the arguments "
                f"that its signature ({entry.binder.text}) takes as tensors"
            )
            raise UnsupportedOperatorError(msg)
        return mesh

    def _template(
        self, name: str, value: Any, mesh: DeviceMesh, operands: list[Operand], marks: list[TensorArgument]
    ) -> Any:
        """Return ``value`` with a :class:`Ref` for each tensor; append the tensors to ``operands`` and ``marks``."""

        def refer(leaf_name: str, leaf: Any) -> Any:
            if not isinstance(leaf, TensorArgument):
                return leaf
            tensor = leaf.tensor
            distributed = isinstance(tensor, DTensor)
            layout = tensor._layout if distributed else self._plain_layout(leaf_name, tensor, mesh)
            local = tensor._local if distributed else tensor
            floating, records = self.platform.is_floating(local), self._records(tensor)
            operands.append(Operand(leaf_name, layout, local.dtype, floating, records))
            marks.append(leaf)
            return Ref(len(operands) - 1)

        return tree_map_named(refer, name, value)

    def _records(self, tensor: Any) -> bool:
        """Whether a gradient of ``tensor`` is recorded."""
        local = tensor._local if isinstance(tensor, DTensor) else tensor
        return self.platform.grad_enabled() and self.platform.needs_grad(local)

    def _plain_layout(self, name: str, tensor: Any, mesh: DeviceMesh) -> Layout:
        """The replicated layout of a one-element constant; other plain tensors are refused."""
        shape = tuple(tensor.shape)
        if self.platform.is_transformed(tensor):
            raise transformed_error(f"argument {name}", mesh)
        if self.platform.needs_grad(tensor) or (math.prod(shape) != 1 and not _REPLICATE_PLAIN.get()):
            parameter = isinstance(tensor, self.platform.Parameter)
            raise plain_tensor_error(f"argument {name}", name, shape, mesh, parameter=parameter)
        return replicated_layout(mesh, shape)


class Ops:
    """Canonical operators as functions of DTensors, for decompositions: ``ops.softmax(x, dim=-1)``.

    Calls without a DTensor run the framework's own implementation.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.platform = dispatcher.platform

    def __getattr__(self, op: str) -> Callable[..., Any]:
        """The canonical operator ``op``."""
        rule = find_rule(op)
        if rule is None:
            msg = f"no canonical operator {op!r}"
            raise AttributeError(msg)
        dispatcher, local = self._dispatcher, None
        if isinstance(rule, Rule):
            local = self.platform.local_op(op)
        run = local or no_function
        entry = OpEntry(op, run, binder(rule.signature), rule, run, canonical=True)

        def call(*args: Any, **kwargs: Any) -> Any:
            if args and type(args[0]) is dispatcher.dtensor_type:
                return dispatcher.dispatch(entry, args, kwargs)
            tensors = dispatcher.tensors((*args, *kwargs.values()))
            if local is None or any(isinstance(tensor, DTensor) for tensor in tensors):
                return dispatcher.dispatch(entry, args, kwargs)
            return local(**entry.binder.bind(args, kwargs))

        setattr(self, op, call)
        return call


def _has_partial(values: Any, dtensor_type: Any) -> bool:
    """Whether a DTensor among ``values``, or in a list among them, holds partial values."""
    for value in values:
        cls = type(value)
        if cls is list or cls is tuple:
            if any([item._layout.partials for item in value if isinstance(item, dtensor_type)]):  # noqa: C419 - hot
                return True
        elif isinstance(value, dtensor_type) and value._layout.partials:
            return True
    return False


def _part(cls: type, arg: Any, dtensor_type: type) -> Any:
    """The part of a key for an argument of type ``cls``, computed as in :meth:`Dispatcher.dispatch`.

    None unless it is a tuple of integers, a parameter or a list of DTensors.
    """
    if cls is tuple and _ATOMS.issuperset(map(type, arg)):
        return (tuple(map(type, arg)), arg)
    if issubclass(cls, dtensor_type):
        return arg._layout
    if cls is list and all(type(item) is dtensor_type for item in arg):
        return (list, *[item._layout for item in arg])
    return None


def _index_key(index: Any) -> tuple[Any, ...] | None:
    """The parts of a key for an index of numbers, as in :meth:`Dispatcher.dispatch`; None for other indices."""
    cls = type(index)
    if cls is int:
        return (int, index)
    if cls is not tuple:
        item = _slice_key(index)
        return None if item is None else (item,)
    if _ATOMS.issuperset(map(type, index)):
        return ((tuple(map(type, index)), index),)
    parts: list[Any] = [tuple]
    for item in index:
        kind = type(item)
        part = (kind, item) if kind in _PICKS else _slice_key(item)
        if part is None:
            return None
        parts.append(part)
    return (tuple(parts),)


def _slice_key(item: Any) -> tuple[Any, ...] | None:
    """The part of a key for a slice, or None if a bound is not a number (it may be a tensor)."""
    if type(item) is not slice:
        return None
    start, stop, step = item.start, item.stop, item.step
    if type(start) in _BOUNDS and type(stop) in _BOUNDS and type(step) in _BOUNDS:
        return (slice, start, stop, step)
    return None


def no_function(*_: Any, **__: Any) -> Any:
    """Placeholder function for a decomposition called by its canonical name."""
    msg = "a decomposition has no local implementation"
    raise AssertionError(msg)
