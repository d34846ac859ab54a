"""Strategies and sharding rules that users register as functions, and propagation without any tensor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.custom.distributed_op import UserOp, mutates, registrations, user_op
from hyper_parallel.core.shard.custom.schema import (
    OpInfo,
    OpSchema,
    OpSpec,
    OpStrategy,
    OutputSharding,
    RuntimeSchemaInfo,
    TensorMeta,
    TupleStrategy,
)
from hyper_parallel.core.shard.entry import OpEntry, binder
from hyper_parallel.core.shard.op_plan import OpPlan, plan_call
from hyper_parallel.core.shard.rule import Listed, OpCall, Operand, Ref, Rule, find_rule
from hyper_parallel.core.shard.strategy import cheapest
from hyper_parallel.errors import LayoutError, MeshMismatchError, UnsupportedOperatorError
from hyper_parallel.platform.select import current_platform

__all__ = ["ShardingPropagator"]

_MOST_KEPT = 4096
_Answer = TypeVar("_Answer")
Strategy = Callable[[OpSchema], "OpStrategy | TupleStrategy"]
PropRule = Callable[[OpSchema], OutputSharding]


class _Registered(UserOp):
    """An operator whose strategies a function lists."""

    _kind = "ShardingPropagator"

    def __init__(self, op_name: str, strategy: Strategy, schema_info: RuntimeSchemaInfo | None) -> None:
        super().__init__(op_name)
        self._strategy, self.schema_info = strategy, schema_info

    def answer(self, func: Callable[..., Any], call: OpCall) -> Listed:
        """The options of one call; an operator that writes in place has only those that move nothing."""
        found = self._strategy(OpSchema(self.op_name, *_schema_arguments(call), self.schema_info))
        if isinstance(found, TupleStrategy):
            return _by_element(self.op_name, call, found)
        given: object = found  # callers may be untyped
        if not isinstance(given, OpStrategy) or not given.strategies:
            msg = f"{self.op_name}: a strategy must return an OpStrategy with at least one OpSpec, got {found!r}"
            raise LayoutError(msg)
        many = not isinstance(found.strategies[0].output_specs, Layout)
        options = tuple(_option(self.op_name, call.operands, one) for one in found.strategies)
        if mutates(func, self.op_name):
            layouts = tuple(one.layout for one in call.operands)
            options = tuple(one for one in options if one[0] == layouts)
            if not options:
                msg = f"{self.op_name}: it writes in place, and no OpSpec leaves every operand where it is"
                raise LayoutError(msg)
        return Listed(options, many=many)


class ShardingPropagator:
    """Where operators meet layouts: registration by function, and propagation without tensors.

    What is registered here counts for every dispatched call, like a rule of the library; what is asked here is
    answered by the same plans that dispatch runs.
    """

    def __init__(self) -> None:
        self._kept = threading.local()

    # -- registering -----------------------------------------------------------------------------------------------

    def register_op_strategy(self, op: Any, strategy: Strategy, schema_info: RuntimeSchemaInfo | None = None) -> UserOp:
        """Add an operator by a function that lists its strategies.

        Args:
            op: the operator: a function, an operator overload, or its name.
            strategy: from the call's :class:`OpSchema` to an :class:`OpStrategy`, or a :class:`TupleStrategy` for
                operators of lists.
            schema_info: which arguments belong to the key of :meth:`propagate_op_sharding`, unless the schema that is
                asked about says so itself.

        Returns:
            The registration; its ``unregister()`` takes it back.

        Raises:
            ValueError: the operator has a rule already.
        """
        return _Registered(_name(op), strategy, schema_info)

    def register_sharding_prop_rule(
        self, op: Any, rule: PropRule, schema_info: RuntimeSchemaInfo | None = None
    ) -> UserOp:
        """Add an operator by a function that says where its outputs are, and where its operands have to be.

        Args:
            op: the operator: a function, an operator overload, or its name.
            rule: from the call's :class:`OpSchema` to an :class:`OutputSharding`.
            schema_info: as for :meth:`register_op_strategy`.

        Returns:
            The registration; its ``unregister()`` takes it back.

        Raises:
            ValueError: the operator has a rule already.
        """

        def strategy(schema: OpSchema) -> OpStrategy:
            found = rule(schema)
            wanted = found.redistribute_schema
            return OpStrategy([OpSpec(found.output_spec, None if wanted is None else wanted.args_spec)])

        return _Registered(_name(op), strategy, schema_info)

    # -- asking ----------------------------------------------------------------------------------------------------

    def propagate(self, op_info: OpInfo) -> OutputSharding:
        """Fill in ``op_info.output_sharding``, and return it."""
        op_info.output_sharding = self.propagate_op_sharding(op_info.schema)
        return op_info.output_sharding

    def propagate_op_sharding(self, op_schema: OpSchema) -> OutputSharding:
        """Where the operands of a call would have to be, and where its outputs would be; kept per thread.

        Floating operands are assumed.

        Raises:
            UnsupportedOperatorError: (a NotImplementedError) the operator has neither rule nor strategy.
            MeshMismatchError: layouts of different meshes.
            LayoutError: (a ValueError) the operator does not accept the shapes.
        """
        user = user_op(_name(op_schema.op))
        if op_schema.schema_info is None and isinstance(user, _Registered):
            op_schema = replace(op_schema, schema_info=user.schema_info)
        asked, found = self._once("sharding", op_schema, lambda: (op_schema, _found(op_schema)))
        if found.redistribute_schema is not None and asked is not op_schema and not _same_arguments(asked, op_schema):
            found = _found(op_schema)  # the answer repeats arguments that the key leaves out
        return found

    def propagate_tensor_meta(self, op_schema: OpSchema, dtypes: Sequence[Any]) -> TensorMeta | tuple[TensorMeta, ...]:
        """Global shape and dtype of every output, type promotion and arguments such as ``dtype`` included.

        Args:
            op_schema: the call.
            dtypes: of its tensors, in order; the framework's.

        Raises:
            UnsupportedOperatorError: (a NotImplementedError) nobody knows how to call the operator.
            LayoutError: (a ValueError) not one dtype per tensor.
        """
        # Every argument counts, also those that make no difference to placements.
        key = (replace(op_schema, schema_info=None), tuple(map(str, dtypes)))
        return self._once("meta", key, lambda: meta_of(op_schema, _callable(op_schema), dtypes))

    def _once(self, kind: str, asked: Any, answer: Callable[[], _Answer]) -> _Answer:
        """``answer()``, kept in this thread for what is asked again of the same framework and registrations."""
        kept: dict[Any, _Answer] = self._kept.__dict__.setdefault(kind, {})
        key = (registrations(), current_platform().platform_type, asked)
        if key not in kept:
            found = answer()
            if len(kept) >= _MOST_KEPT:
                kept.clear()
            kept[key] = found
        return kept[key]


def _callable(schema: OpSchema) -> Callable[..., Any]:
    """The operator on plain tensors: itself, the framework's function of its name, or the canonical one."""
    if callable(schema.op):
        function: Callable[..., Any] = schema.op
        return function
    name = _name(schema.op)
    rule = find_rule(name)
    if isinstance(rule, Rule):
        local, bind = current_platform().local_op(name), binder(rule.signature).bind
        return lambda *args, **kwargs: local(**bind(args, kwargs))
    entry: OpEntry | None = current_platform().operator_entry(name)
    if entry is None:
        raise UnsupportedOperatorError(_without_rule(name, schema.args_spec, composed=False))
    return entry.func


def _same_arguments(first: OpSchema, second: OpSchema) -> bool:
    """Whether calls are the same in every argument."""
    return bool(replace(first, schema_info=None).key == replace(second, schema_info=None).key)


def _found(schema: OpSchema) -> OutputSharding:
    name = _name(schema.op)
    user = user_op(name)
    func = schema.op if callable(schema.op) else _nameless
    entry = user.entry(func) if user is not None else _entry(schema.op, name)
    layouts = schema.args_spec
    if entry is None or entry.composed is not None or not isinstance(entry.rule, Rule) or not layouts:
        raise UnsupportedOperatorError(_without_rule(name, layouts, composed=entry is not None))
    if len({layout.mesh for layout in layouts}) > 1:
        first, second = list(dict.fromkeys(layout.mesh for layout in layouts))[:2]
        msg = f"{name}: operands live on different meshes, {first!r} and {second!r}; bring them to one mesh first"
        raise MeshMismatchError(msg)
    bound = entry.binder.bind(schema.args_schema, schema.kwargs_schema)
    operands: list[Operand] = []
    template = {name: _referred(name, value, operands) for name, value in bound.items()}
    plan = plan_call(
        OpCall(entry.rule.op, layouts[0].mesh, tuple(operands), template), entry.rule, in_place=entry.in_place
    )
    return _sharding(schema, plan)


def _entry(op: Any, name: str) -> OpEntry | None:
    """The framework's spelling, or the canonical operator of that name."""
    spelled: OpEntry | None = current_platform().operator_entry(op)
    rule = find_rule(name)
    if spelled is not None or rule is None:
        return spelled
    return OpEntry(name, _nameless, binder(rule.signature), rule, _nameless, canonical=True)


def _sharding(schema: OpSchema, plan: OpPlan) -> OutputSharding:
    outputs = plan.choice.outputs if plan.many else plan.choice.outputs[0]
    replaced = {} if plan.local is None or plan.local.args is None else plan.local.args
    if not plan.moves and not replaced:
        return OutputSharding(outputs)
    targets = plan.choice.targets
    arguments = {name: _placed(replaced.get(name, value), targets) for name, value in plan.call.args.items()}
    return OutputSharding(outputs, OpSchema(schema.op, (), arguments, schema.schema_info), plan.moves)


def _without_rule(name: str, layouts: Sequence[Layout], *, composed: bool) -> str:
    seen = ", ".join(layout.notation() for layout in layouts) or "none"
    if composed:
        return f"operator {name} is composed of others (layouts: {seen}); ask for those it calls"
    return (
        f"operator {name} has no sharding rule (layouts: {seen}); add one with "
        "ShardingPropagator().register_op_strategy or hyper_parallel.DistributedOp, or let it run whole on every rank: "
        f"hyper_parallel.ReplicatedOp({name!r})"
    )


# -- between schemas and calls -----------------------------------------------------------------------------------------


def _name(op: Any) -> str:
    """How an operator is registered: an overload under its full name, a function under its own, a primitive too."""
    if isinstance(op, str):
        return op
    if type(op).__name__ == "OpOverload":
        return str(op)
    return str(getattr(op, "__name__", None) or getattr(op, "name", op))


def _unknown(*_: Any, **__: Any) -> Any:
    msg = "an operator that is known by name only cannot be called"
    raise AssertionError(msg)


_nameless = partial(_unknown)  # stands for an operator that is known by name only, and has none itself


def _schema_arguments(call: OpCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    layouts = tuple(operand.layout for operand in call.operands)
    return tuple(_placed(value, layouts) for value in call.args.values()), {}


def _placed(value: Any, layouts: Sequence[Layout]) -> Any:
    """Layouts in place of operands."""
    if isinstance(value, Ref):
        return layouts[value.index]
    if isinstance(value, (list, tuple)):
        return type(value)(_placed(item, layouts) for item in value)
    return value


def _referred(name: str, value: Any, operands: list[Operand]) -> Any:
    """Operands in place of layouts."""
    if isinstance(value, Layout):
        operands.append(Operand(name, value))
        return Ref(len(operands) - 1)
    if isinstance(value, (list, tuple)):
        return type(value)(_referred(f"{name}[{index}]", item, operands) for index, item in enumerate(value))
    return value


def _option(
    name: str, operands: Sequence[Operand], spec: OpSpec
) -> tuple[tuple[Layout, ...], tuple[Layout, ...], float | None]:
    given = [one.layout for one in operands] if spec.input_specs is None else list(spec.input_specs)
    if len(given) != len(operands):
        msg = f"{name}: an OpSpec has {len(given)} input_specs, the call has {len(operands)} tensors"
        raise LayoutError(msg)
    targets = tuple(layout.with_shape(one.shape) for layout, one in zip(given, operands, strict=True))
    pairs = zip(operands, targets, strict=True)
    wrong = next((one.name for one, layout in pairs if layout.mesh is not one.layout.mesh), "")
    if wrong:
        msg = f"{name}: the layout of {wrong} in input_specs lives on another mesh than {wrong}"
        raise MeshMismatchError(msg)
    for layout in spec.outputs:
        if layout.shape is None:
            msg = f"{name}: output_specs hold {layout!r} without a global shape; use layout.with_shape(...)"
            raise LayoutError(msg)
    return targets, spec.outputs, spec.cost


def _by_element(name: str, call: OpCall, found: TupleStrategy) -> Listed:
    """The best option of each element, as one option of the whole call."""
    lists = [value for value in call.args.values() if isinstance(value, (list, tuple)) and _all_refs(value)]
    count = len(found.children)
    if not lists or any(len(one) != count for one in lists):
        sizes = [len(one) for one in lists]
        msg = f"{name}: a TupleStrategy of {count} children for lists of {sizes or 'no'} tensors"
        raise LayoutError(msg)
    targets: dict[int, Layout] = {index: one.layout for index, one in enumerate(call.operands)}
    varying: dict[int, tuple[int, ...]] = {}
    outputs: list[Layout] = []
    for index, child in enumerate(found.children):
        chosen = [one[index].index for one in lists]
        part = OpCall(call.op, call.mesh, tuple(call.operands[one] for one in chosen), {})
        best = cheapest(part, Listed(tuple(_option(name, part.operands, one) for one in child.strategies)))
        targets.update(zip(chosen, best.targets, strict=True))
        varying.update(zip(chosen, best.varying, strict=True))
        outputs.extend(best.outputs)
    every = range(len(call.operands))
    whole = (tuple(targets[index] for index in every), tuple(outputs), None)
    return Listed((whole,), many=True, varying=tuple(varying.get(index, ()) for index in every))


def _all_refs(value: Sequence[Any]) -> bool:
    return bool(value) and all(isinstance(item, Ref) for item in value)


# -- shapes and dtypes -----


def meta_of(schema: OpSchema, func: Callable[..., Any], dtypes: Sequence[Any]) -> TensorMeta | tuple[TensorMeta, ...]:
    """What ``func`` gives for the schema's arguments.

    Args:
        schema: the call.
        func: the operator on plain tensors, called as the schema is written.
        dtypes: of the tensors, in order.

    Raises:
        LayoutError: (a ValueError) not one dtype per tensor, or a layout without global shape.
    """
    layouts = schema.args_spec
    if len(dtypes) != len(layouts):
        msg = f"{schema.op}: {len(dtypes)} dtypes for {len(layouts)} tensors; give one per tensor, in order"
        raise LayoutError(msg)
    rest = iter(dtypes)
    args = [_filled(value, rest) for value in schema.args_schema]
    named = {name: _filled(value, rest) for name, value in schema.kwargs_schema.items()}
    found = func(*args, **named)
    platform = current_platform()
    if platform.is_tensor(found):
        return TensorMeta(tuple(found.shape), found.dtype)
    return tuple(TensorMeta(tuple(one.shape), one.dtype) for one in found if platform.is_tensor(one))


def _filled(value: Any, dtypes: Iterator[Any]) -> Any:
    """Tensors in place of layouts: PyTorch's without storage, MindSpore's of zeros, since it has no others."""
    if isinstance(value, Layout):
        if value.shape is None:
            msg = f"{value!r} has no global shape; use layout.with_shape(...)"
            raise LayoutError(msg)
        return current_platform().zeros(value.shape, next(dtypes), "meta")
    if isinstance(value, (list, tuple)):
        return type(value)(_filled(item, dtypes) for item in value)
    return value
