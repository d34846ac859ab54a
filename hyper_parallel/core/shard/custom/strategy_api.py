"""Strategies and sharding rules that users register as functions, and propagation without tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from hyper_parallel._caches import CacheInfo, Owners, register_owners
from hyper_parallel._tree import tree_map, tree_map_named
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.custom.distributed_op import UserOp, mutates, registry_version, user_op
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
from hyper_parallel.core.shard.refusals import common_mesh, missing_shape_error
from hyper_parallel.core.shard.rule import LayoutOptions, OpCall, Operand, Ref, Rule, find_rule
from hyper_parallel.core.shard.strategy import cheapest
from hyper_parallel.errors import LayoutError, MeshMismatchError, UnsupportedOperatorError
from hyper_parallel.platform.select import current_platform

__all__ = ["ShardingPropagator"]

_MAX_CACHED = 4096
_Result = TypeVar("_Result")


class _Results(dict[Any, Any]):
    """Cached results of one propagator on one thread."""


_RESULTS: Owners[_Results] = Owners()
register_owners(
    _RESULTS,
    lambda results: CacheInfo("results of ShardingPropagator", len(results), _MAX_CACHED),
    lambda results: results.clear(),
)
Strategy = Callable[[OpSchema], "OpStrategy | TupleStrategy"]
PropRule = Callable[[OpSchema], OutputSharding]


class _StrategyOp(UserOp):
    """An operator for which a user's function lists the strategies."""

    _registrar = "ShardingPropagator"

    def __init__(self, op_name: str, strategy: Strategy, schema_info: RuntimeSchemaInfo | None) -> None:
        super().__init__(op_name)
        self._strategy, self.schema_info = strategy, schema_info

    def strategies(self, func: Callable[..., Any], call: OpCall) -> LayoutOptions:
        """The options for one call; if the operator writes in place, those that redistribute nothing."""
        answer = self._strategy(OpSchema(self.op_name, *_schema_arguments(call), self.schema_info))
        if isinstance(answer, TupleStrategy):
            return _by_element(self.op_name, call, answer)
        untyped: object = answer  # callers may not be type-checked
        if not isinstance(untyped, OpStrategy) or not untyped.strategies:
            msg = f"{self.op_name}: a strategy must return an OpStrategy with at least one OpSpec, got {answer!r}"
            raise LayoutError(msg)
        many = not isinstance(answer.strategies[0].output_specs, Layout)
        options = tuple(_option(self.op_name, call.operands, spec) for spec in answer.strategies)
        if mutates(func, self.op_name):
            layouts = tuple(operand.layout for operand in call.operands)
            options = tuple(option for option in options if option[0] == layouts)
            if not options:
                msg = f"{self.op_name}: it writes in place, but every OpSpec redistributes an operand"
                raise LayoutError(msg)
        return LayoutOptions(options, many=many)


class ShardingPropagator:
    """Registers operators by function, and propagates layouts without tensors.

    A registration applies to every dispatched call, like a rule of the library. Propagation uses the same plans as
    dispatch.
    """

    def __init__(self) -> None:
        self._caches = threading.local()

    # -- registering -----------------------------------------------------------------------------------------------

    def register_op_strategy(self, op: Any, strategy: Strategy, schema_info: RuntimeSchemaInfo | None = None) -> UserOp:
        """Add an operator by a function that lists its strategies.

        Args:
            op: the operator: a function, an operator overload, or its name.
            strategy: returns an :class:`OpStrategy` for the call's :class:`OpSchema`, or a :class:`TupleStrategy` for
                operators of lists.
            schema_info: the arguments in the key of :meth:`propagate_op_sharding`, for schemas without a
                ``schema_info``.

        Returns:
            The registration; its ``unregister()`` removes it.

        Raises:
            ValueError: the operator already has a rule.
        """
        return _StrategyOp(_name(op), strategy, schema_info)

    def register_sharding_prop_rule(
        self, op: Any, rule: PropRule, schema_info: RuntimeSchemaInfo | None = None
    ) -> UserOp:
        """Add an operator by a function from operand layouts to output layouts and the operand layouts they need.

        Args:
            op: the operator: a function, an operator overload, or its name.
            rule: returns an :class:`OutputSharding` for the call's :class:`OpSchema`.
            schema_info: as for :meth:`register_op_strategy`.

        Returns:
            The registration; its ``unregister()`` removes it.

        Raises:
            ValueError: the operator already has a rule.
        """

        def strategy(schema: OpSchema) -> OpStrategy:
            sharding = rule(schema)
            wanted = sharding.redistribute_schema
            return OpStrategy([OpSpec(sharding.output_spec, None if wanted is None else wanted.args_spec)])

        return _StrategyOp(_name(op), strategy, schema_info)

    # -- propagating-------------------------------------------------------------------------------------------------

    def propagate(self, op_info: OpInfo) -> OutputSharding:
        """Propagate ``op_info.schema``, set ``op_info.output_sharding`` and return it.

        Args:
            op_info: the call.

        Returns:
            as :meth:`propagate_op_sharding`, which also lists the errors.
        """
        op_info.output_sharding = self.propagate_op_sharding(op_info.schema)
        return op_info.output_sharding

    def propagate_op_sharding(self, op_schema: OpSchema) -> OutputSharding:
        """Return the layouts that a call needs of its operands, and those of its outputs; cached per thread.

        Operands count as floating.

        Args:
            op_schema: the call.

        Returns:
            layouts of the outputs, and the call with redistributed operands if there are any.

        Raises:
            UnsupportedOperatorError: (a NotImplementedError) the operator has neither a rule nor a strategy.
            MeshMismatchError: layouts of different meshes.
            LayoutError: (a ValueError) the operator does not accept the shapes.
        """
        user = user_op(_name(op_schema.op))
        if op_schema.schema_info is None and isinstance(user, _StrategyOp):
            op_schema = replace(op_schema, schema_info=user.schema_info)
        known, sharding = self._cached("sharding", op_schema, lambda: (op_schema, _propagated(op_schema)))
        if sharding.redistribute_schema is not None and known is not op_schema and not _equal_calls(known, op_schema):
            return _propagated(op_schema)  # the result contains arguments that the key leaves out
        return sharding

    def propagate_tensor_meta(self, op_schema: OpSchema, dtypes: Sequence[Any]) -> TensorMeta | tuple[TensorMeta, ...]:
        """Global shape and dtype of every output, after type promotion and arguments such as ``dtype``.

        Args:
            op_schema: the call.
            dtypes: the framework's dtypes of its tensors, in order.

        Returns:
            the output, or a tuple of outputs.

        Raises:
            UnsupportedOperatorError: (a NotImplementedError) there is no function to call for the operator.
            LayoutError: (a ValueError) the numbers of dtypes and tensors differ, or a layout has no global shape.
        """
        # The key includes every argument, also those that do not influence placements.
        key = (replace(op_schema, schema_info=None), tuple(map(str, dtypes)))
        return self._cached("meta", key, lambda: _meta_of(op_schema, _callable(op_schema), dtypes))

    def _cached(self, cache: str, asked: Any, compute: Callable[[], _Result]) -> _Result:
        """Return ``compute()``, cached per thread, key, framework and registry version."""
        results: _Results | None = self._caches.__dict__.get(cache)
        if results is None:
            results = self._caches.__dict__[cache] = _Results()
            _RESULTS.add(results)
        key = (registry_version(), current_platform().platform_type, asked)
        result: _Result | None = results.get(key)
        if result is None:
            result = compute()
            if len(results) >= _MAX_CACHED:
                results.clear()
            results[key] = result
        return result


def _callable(schema: OpSchema) -> Callable[..., Any]:
    """The operator on plain tensors: itself, the framework's function of that name, or the canonical one."""
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


def _equal_calls(first: OpSchema, second: OpSchema) -> bool:
    """Whether two calls are equal in every argument."""
    return bool(replace(first, schema_info=None).key == replace(second, schema_info=None).key)


def _propagated(schema: OpSchema) -> OutputSharding:
    name = _name(schema.op)
    user = user_op(name)
    func = schema.op if callable(schema.op) else _uncallable
    entry = user.entry(func) if user is not None else _entry(schema.op, name)
    layouts = schema.args_spec
    if entry is None or entry.composed is not None or not isinstance(entry.rule, Rule) or not layouts:
        raise UnsupportedOperatorError(_without_rule(name, layouts, composed=entry is not None))
    common_mesh(name, (layout.mesh for layout in layouts))
    bound = entry.binder.bind(schema.args_schema, schema.kwargs_schema)
    operands: list[Operand] = []

    def refer(leaf_name: str, leaf: Any) -> Any:
        if not isinstance(leaf, Layout):
            return leaf
        operands.append(Operand(leaf_name, leaf))
        return Ref(len(operands) - 1)

    template = {name: tree_map_named(refer, name, value) for name, value in bound.items()}
    plan = plan_call(
        OpCall(entry.rule.op, layouts[0].mesh, tuple(operands), template), entry.rule, in_place=entry.in_place
    )
    return _sharding(schema, plan)


def _entry(op: Any, name: str) -> OpEntry | None:
    """Return the entry of the framework's function, or of the canonical operator, with this name."""
    spelled: OpEntry | None = current_platform().operator_entry(op)
    rule = find_rule(name)
    if spelled is not None or rule is None:
        return spelled
    return OpEntry(name, _uncallable, binder(rule.signature), rule, _uncallable, canonical=True)


def _sharding(schema: OpSchema, plan: OpPlan) -> OutputSharding:
    outputs = plan.choice.outputs if plan.many else plan.choice.outputs[0]
    replaced = {} if plan.local is None or plan.local.args is None else plan.local.args
    if not plan.moves and not replaced:
        return OutputSharding(outputs)
    targets = plan.choice.targets
    arguments = {name: _with_layouts(replaced.get(name, value), targets) for name, value in plan.call.args.items()}
    return OutputSharding(outputs, OpSchema(schema.op, (), arguments, schema.schema_info), plan.moves)


def _without_rule(name: str, layouts: Sequence[Layout], *, composed: bool) -> str:
    seen = ", ".join(layout.notation() for layout in layouts) or "none"
    if composed:
        return f"operator {name} is a decomposition (layouts: {seen}); query the operators that it calls"
    return (
        f"operator {name} has no sharding rule (layouts: {seen}); add one with "
        "ShardingPropagator().register_op_strategy or hyper_parallel.DistributedOp, or run it replicated: "
        f"hyper_parallel.ReplicatedOp({name!r})"
    )


# -- between schemas and calls -----------------------------------------------------------------------------------------


def _name(op: Any) -> str:
    """The name under which an operator is registered: an overload's full name, or the object's own name."""
    if isinstance(op, str):
        return op
    if type(op).__name__ == "OpOverload":
        return str(op)
    return str(getattr(op, "__name__", None) or getattr(op, "name", op))


def _refuse_call(*_: Any, **__: Any) -> Any:
    msg = "an operator that is known by name only cannot be called"
    raise AssertionError(msg)


_uncallable = partial(_refuse_call)  # stands for an operator known by name only; it has no __name__


def _schema_arguments(call: OpCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    layouts = tuple(operand.layout for operand in call.operands)
    return tuple(_with_layouts(value, layouts) for value in call.args.values()), {}


def _with_layouts(value: Any, layouts: Sequence[Layout]) -> Any:
    """Return ``value`` with each operand replaced by its layout."""
    return tree_map(lambda leaf: layouts[leaf.index] if isinstance(leaf, Ref) else leaf, value)


def _option(
    name: str, operands: Sequence[Operand], spec: OpSpec
) -> tuple[tuple[Layout, ...], tuple[Layout, ...], float | None]:
    """One option in the form of a plan: layouts of the operands, layouts of the outputs, and the declared cost."""
    layouts = [operand.layout for operand in operands] if spec.input_specs is None else list(spec.input_specs)
    if len(layouts) != len(operands):
        msg = f"{name}: an OpSpec has {len(layouts)} input_specs, the call has {len(operands)} tensors"
        raise LayoutError(msg)
    targets = tuple(layout.with_shape(operand.shape) for layout, operand in zip(layouts, operands, strict=True))
    for operand, target in zip(operands, targets, strict=True):
        if target.mesh is not operand.layout.mesh:
            msg = f"{name}: the layout of {operand.name} in input_specs is on a different mesh than {operand.name}"
            raise MeshMismatchError(msg)
    for layout in spec.outputs:
        if layout.shape is None:
            raise missing_shape_error(f"{name}: output_specs hold", layout)
    return targets, spec.outputs, spec.cost


def _by_element(name: str, call: OpCall, strategy: TupleStrategy) -> LayoutOptions:
    """The best option of each element, combined into one option for the call."""
    lists = [value for value in call.args.values() if isinstance(value, (list, tuple)) and _all_refs(value)]
    count = len(strategy.children)
    if not lists or any(len(refs) != count for refs in lists):
        sizes = [len(refs) for refs in lists]
        msg = f"{name}: a TupleStrategy of {count} children for lists of {sizes or 'no'} tensors"
        raise LayoutError(msg)
    targets: dict[int, Layout] = {index: operand.layout for index, operand in enumerate(call.operands)}
    varying: dict[int, tuple[int, ...]] = {}
    outputs: list[Layout] = []
    for element, child in enumerate(strategy.children):
        indices = [refs[element].index for refs in lists]
        part = OpCall(call.op, call.mesh, tuple(call.operands[index] for index in indices), {})
        best = cheapest(part, LayoutOptions(tuple(_option(name, part.operands, spec) for spec in child.strategies)))
        targets.update(zip(indices, best.targets, strict=True))
        varying.update(zip(indices, best.varying, strict=True))
        outputs.extend(best.outputs)
    every = range(len(call.operands))
    option = (tuple(targets[index] for index in every), tuple(outputs), None)
    return LayoutOptions((option,), many=True, varying=tuple(varying.get(index, ()) for index in every))


def _all_refs(value: Sequence[Any]) -> bool:
    return bool(value) and all(isinstance(item, Ref) for item in value)


# -- shapes and dtypes -------------------------------------------------------------------------------------------------


def _meta_of(schema: OpSchema, func: Callable[..., Any], dtypes: Sequence[Any]) -> TensorMeta | tuple[TensorMeta, ...]:
    """Shape and dtype of the outputs of ``func``, computed by the framework without values."""
    layouts = schema.args_spec
    if len(dtypes) != len(layouts):
        msg = f"{schema.op}: {len(dtypes)} dtypes for {len(layouts)} tensors; give one per tensor, in order"
        raise LayoutError(msg)
    platform, remaining = current_platform(), iter(dtypes)

    def fill(leaf: Any) -> Any:
        """A tensor for a layout: without storage on PyTorch, zeros on MindSpore."""
        if not isinstance(leaf, Layout):
            return leaf
        if leaf.shape is None:
            raise missing_shape_error(f"{schema.op}: an argument is", leaf)
        return platform.zeros(leaf.shape, next(remaining), "meta")

    args = [tree_map(fill, value) for value in schema.args_schema]
    named = {name: tree_map(fill, value) for name, value in schema.kwargs_schema.items()}
    result = func(*args, **named)
    if platform.is_tensor(result):
        return TensorMeta(tuple(result.shape), result.dtype)
    return tuple(TensorMeta(tuple(output.shape), output.dtype) for output in result if platform.is_tensor(output))
