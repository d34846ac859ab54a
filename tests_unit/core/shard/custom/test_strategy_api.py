"""Strategies registered as functions, propagation without tensors, and operators that run replicated."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from hyper_parallel.core.dtensor.events import record_events, strict
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh, init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.core.shard.custom.dfunction import ReplicatedOp
from hyper_parallel.core.shard.custom.schema import (
    OpInfo,
    OpSchema,
    OpSpec,
    OpStrategy,
    OutputSharding,
    RuntimeSchemaInfo,
    TupleStrategy,
)
from hyper_parallel.core.shard.custom.strategy_api import ShardingPropagator
from hyper_parallel.errors import (
    LayoutError,
    MeshMismatchError,
    MixedTensorError,
    StrictModeError,
    UnsupportedOperatorError,
)
from hyper_parallel.verify.checker.function import check_function
from hyper_parallel.verify.simulate import simulate

torch_only = pytest.mark.platforms("torch")


def values(*shape, seed=0):
    """Random numbers of both signs."""
    return np.random.default_rng(seed).uniform(-2.0, 2.0, shape)


@contextlib.contextmanager
def registered(op):
    """An operator that is unregistered at the end."""
    try:
        yield op
    finally:
        op.unregister()


def pairwise(schema):
    """Strategies of `x @ w`: x sharded by rows, w by columns, or both replicated."""
    x, w = schema.args_spec
    mesh, (rows, _), (_, columns) = x.mesh, x.shape, w.shape
    place = lambda placement, shape: Layout.place(mesh, [placement], shape)  # noqa: E731 - a table follows
    whole = Replicate()
    table = [(whole, whole, whole), (Shard(0), whole, Shard(0)), (whole, Shard(1), Shard(1))]
    return OpStrategy([OpSpec(place(c, (rows, columns)), (place(a, x.shape), place(b, w.shape))) for a, b, c in table])


def product_of_a_test(x, w):
    """A function that calls ``__torch_function__``, as PyTorch's own do."""
    import torch

    if torch.overrides.has_torch_function((x, w)):
        return torch.overrides.handle_torch_function(product_of_a_test, (x, w), x, w)
    return torch.matmul(x, w)


@torch_only
@pytest.mark.parametrize("world", [2, 3])
def test_a_registered_strategy_is_dispatched(world):
    """Whatever the layouts, values and gradients are those of one device."""
    with registered(ShardingPropagator().register_op_strategy(product_of_a_test, pairwise)):
        report = check_function(product_of_a_test, [values(5, 4), values(4, 7, seed=1)], (world,), platform="torch")
    assert report.ok, report.wrong[:3]
    assert not report.rejected, report.rejected[:3]


@torch_only
def test_the_cheapest_strategy_is_taken():
    """The cheapest option wins; at equal cost the one that moves nothing; a negative cost wins over zero."""

    def body():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        rows = Layout.place(mesh, [Shard(0)], (4, 6))
        whole = Layout.place(mesh, [Replicate()], (4, 6))
        results = []
        for name, cost in (("computed", None), ("negative", (-1.0,))):
            propagator = ShardingPropagator()

            def strategy(schema, cost=cost):
                (x,) = schema.args_spec
                options = [OpSpec(whole, (whole,), cost or None), OpSpec(x, (x,))]
                return OpStrategy(options)

            with registered(propagator.register_op_strategy(name, strategy)):
                sharding = propagator.propagate_op_sharding(OpSchema(name, (rows,)))
                results.append((sharding.output_spec is whole, sharding.needs_redistribute))
                kept = propagator.propagate_op_sharding(OpSchema(name, (whole,)))
                results.append((kept.output_spec is whole, kept.needs_redistribute))
        return results

    assert simulate(body, 2, platform="torch")[0] == [(False, False), (True, False), (True, True), (True, False)]


@torch_only
def test_lists_choose_per_element():
    """Each tensor of a list keeps its layout; gradients of replicated elements are not summed for sharded ones."""
    import torch

    def double_all(xs):
        if torch.overrides.has_torch_function(tuple(xs)):
            return torch.overrides.handle_torch_function(double_all, tuple(xs), xs)
        return [x * 2 for x in xs]

    def strategy(schema):
        return TupleStrategy([OpStrategy([OpSpec(x, (x,))]) for x in schema.args_spec])

    def body():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        whole = distribute_tensor(torch.ones(3, requires_grad=True), mesh)
        cut = distribute_tensor(torch.ones(3, requires_grad=True), mesh, [Shard(0)])
        first, second = double_all([whole, cut])
        (first.sum() + second.sum()).backward()
        assert (first.placements, second.placements) == ((Replicate(),), (Shard(0),))
        return [whole.grad.full_tensor().tolist(), cut.grad.full_tensor().tolist()]

    with registered(ShardingPropagator().register_op_strategy("double_all", strategy)):
        assert simulate(body, 2, platform="torch") == [[[2.0] * 3, [2.0] * 3]] * 2


@torch_only
def test_operands_are_redistributed_to_the_redistribute_schema():
    """Operands are redistributed to a sharding rule's redistribute_schema before the call."""
    import torch

    def whole_sum(x):
        if torch.overrides.has_torch_function((x,)):
            return torch.overrides.handle_torch_function(whole_sum, (x,), x)
        return x.sum()

    def rule(schema):
        (x,) = schema.args_spec
        rows = Layout.place(x.mesh, [Shard(0)], x.shape)
        out = Layout.place(x.mesh, [Partial()], ())
        return OutputSharding(out, OpSchema(schema.op, (rows,)))

    with registered(ShardingPropagator().register_sharding_prop_rule(whole_sum, rule)):
        report = check_function(whole_sum, [values(5, 3)], (3,), platform="torch")
    assert report.ok, report.wrong[:3]
    assert not report.rejected, report.rejected[:3]


@pytest.mark.platforms("torch", "mindspore")
def test_rules_of_the_library_are_asked_without_tensors(platform_name):
    """redistribute_schema has a view's local sizes, and the layout that a moved operand needs."""

    def body():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = Layout.place(mesh, [Shard(0)], (4, 6))
        propagator = ShardingPropagator()
        info = OpInfo(OpSchema("view", (x, (4, 2, 3))))
        view = propagator.propagate(info)
        assert info.output_sharding is view
        assert propagator.propagate_op_sharding(OpSchema("view", (x, (4, 2, 3)))) is view
        soft = propagator.propagate_op_sharding(OpSchema("softmax", (x, 0)))
        return (
            view.output_spec.notation(),
            [value for value in view.redistribute_schema.kwargs_schema.values() if isinstance(value, tuple)],
            view.needs_redistribute,
            soft.needs_redistribute,
            soft.redistribute_schema.args_spec[0].notation(),
        )

    assert simulate(body, 2, platform=platform_name)[0] == (
        "[4@tp, 2, 3]", [(2, 2, 3)], False, True, "[4, 6@tp]",
    )  # fmt: skip


@pytest.mark.platforms("torch", "mindspore")
def test_shape_and_dtype_of_outputs_are_asked_without_values(platform_name):
    """Promotion, comparison, indices and several outputs have the dtypes that the framework gives them."""

    def body():
        from hyper_parallel.platform.select import current_platform

        platform = current_platform()
        single, double, whole = (platform.from_numpy(np.zeros(1, error)).dtype for error in ("f4", "f8", "i4"))
        x = Layout.place(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), [Shard(0)], (5, 3))
        propagator = ShardingPropagator()
        ask = lambda op, args, *dtypes: propagator.propagate_tensor_meta(OpSchema(op, args), dtypes)  # noqa: E731 - short
        assert ask("add", (x, x), single, double) is ask("add", (x, x), single, double)
        with pytest.raises(LayoutError) as caught:
            ask("add", (x, x), single)
        with pytest.raises(LayoutError) as shapeless:
            ask("add", (x, x.with_shape(None)), single, double)
        described = lambda meta: (meta.shape, str(meta.dtype).rpartition(".")[2].lower())  # noqa: E731 - short
        return (
            described(ask("add", (x, x), single, double)),
            described(ask("add", (x, 2), whole)),
            described(ask("lt", (x, x), single, single)),
            described(ask("cat", ([x, x], 0), single, single)),
            [described(meta) for meta in ask("topk", (x, 2, 0), double)],
            str(caught.value),
            str(shapeless.value),
        )

    assert simulate(body, 2, platform=platform_name)[0] == (
        ((5, 3), "float64"),
        ((5, 3), "int32"),
        ((5, 3), "bool"),
        ((10, 3), "float32"),
        [((2, 3), "float64"), ((2, 3), "int64")],
        "add: 1 dtypes for 2 tensors; give one per tensor, in order",
        (
            "add: an argument is Layout([?@tp, ?] on DeviceMesh(cpu, tp=2, ranks=[0, 1])) without a global shape; "
            "use layout.with_shape(...)"
        ),
    )


@torch_only
def test_every_argument_counts_for_shape_and_dtype():
    """The key of tensor metadata holds every argument, and 2 is not 2.0."""
    import torch

    propagator = ShardingPropagator()

    def ask(op, *args):
        x = Layout.place(init_device_mesh("cpu", (1,)), [Shard(0)], (5, 3))
        return propagator.propagate_tensor_meta(OpSchema(op, (x, *args), {}, RuntimeSchemaInfo()), (torch.int32,))

    assert [ask("add", 2).dtype, ask("add", 2.0).dtype] == [torch.int32, torch.float32]
    assert [ask("narrow", 0, 0, size).shape for size in (2, 4)] == [(2, 3), (4, 3)]


@torch_only
def test_shape_and_dtype_of_indexing_and_of_composed_operators():
    """Each slice has a key of its own; composed operators have metadata by function and by name."""
    import torch

    propagator = ShardingPropagator()

    def ask(op, *args, dtype=torch.float32):
        x = Layout.place(init_device_mesh("cpu", (1,)), [Shard(0)], (5, 3))
        results = propagator.propagate_tensor_meta(OpSchema(op, (x, *args)), (dtype,))
        return results.shape, results.dtype

    for getitem in (torch.Tensor.__getitem__, "__getitem__", "getitem"):
        assert ask(getitem, slice(1, 4)) == ((3, 3), torch.float32)
        assert ask(getitem, slice(1, 3)) == ((2, 3), torch.float32)
        assert ask(getitem, (slice(None), 1), dtype=torch.int64) == ((5,), torch.int64)
        assert ask(getitem, (..., None, slice(None, None, 2))) == ((5, 1, 2), torch.float32)
    assert ask("one_hot", 4, dtype=torch.int64) == ((5, 3, 4), torch.int64)


@torch_only
def test_shape_and_dtype_follow_the_registrations():
    """A registration invalidates cached results under its name."""
    import torch

    propagator, sizes = ShardingPropagator(), [5]

    def twice(value):
        return value.new_empty((sizes[0], 6))

    def ask():
        x = Layout.place(init_device_mesh("cpu", (1,)), [Shard(0)], (5, 3))
        return propagator.propagate_tensor_meta(OpSchema(twice, (x,)), (torch.float32,)).shape

    before = ask()
    sizes[0] = 10
    with registered(propagator.register_op_strategy(twice, pairwise)):
        assert (before, ask()) == ((5, 6), (10, 6))


@torch_only
def test_static_arguments_tell_calls_apart():
    """Arguments before static_argnum and keywords not in static_kwargkey share a plan."""
    info = RuntimeSchemaInfo(static_argnum=2, static_kwargkey=("dim",))
    first = OpSchema("f", ("a", 1, 2), {"dim": 0, "note": 1}, info)
    assert first == OpSchema("f", ("a", 9, 2), {"dim": 0, "note": 2}, info)
    assert first != OpSchema("f", ("a", 1, 3), {"dim": 0, "note": 1}, info)
    assert first != OpSchema("f", ("a", 1, 2), {"dim": 1, "note": 1}, info)
    assert OpSchema("f", (1,)) != OpSchema("f", (True,))


@torch_only
def test_an_operator_without_rule():
    """The error for an unknown operator names it, the layouts and the fixes."""

    def body():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with pytest.raises(UnsupportedOperatorError) as caught:
            ShardingPropagator().propagate_op_sharding(OpSchema("nobody", (Layout.place(mesh, [Shard(0)], (4,)),)))
        return str(caught.value)

    assert simulate(body, 2, platform="torch")[0] == (
        "operator nobody has no sharding rule (layouts: [4@tp]); add one with "
        "ShardingPropagator().register_op_strategy or hyper_parallel.DistributedOp, or run it replicated: "
        "hyper_parallel.ReplicatedOp('nobody')"
    )


@torch_only
@pytest.mark.parametrize(
    "answer, message",
    [
        (lambda _: OpStrategy([]), ("a strategy must return an OpStrategy with at least one OpSpec, got "
                                   "OpStrategy(strategies=())")),
        (lambda x: OpStrategy([OpSpec(x, (x, x))]), "an OpSpec has 2 input_specs, the call has 1 tensors"),
        (lambda x: OpStrategy([OpSpec(x.with_shape(None), (x,))]), ("output_specs hold Layout([?@tp] on "
         "DeviceMesh(cpu, tp=2, ranks=[0, 1])) without a global shape; use layout.with_shape(...)")),
        (lambda _: TupleStrategy([]), "a TupleStrategy of 0 children for lists of [1] tensors"),
    ],
)  # fmt: skip
def test_answers_that_are_none(answer, message):
    """A strategy that does not fit the call is refused by name."""

    def body():
        layout = Layout.place(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), [Shard(0)], (4,))
        with pytest.raises(LayoutError) as caught:
            ShardingPropagator().propagate_op_sharding(OpSchema("strange", (layout,)))
        return str(caught.value)

    with registered(ShardingPropagator().register_op_strategy("strange", lambda schema: answer(*schema.args_spec))):
        assert simulate(body, 2, platform="torch")[0] == f"strange(_[0]=[4@tp]): strange: {message}"


@torch_only
def test_an_operator_may_be_let_run_whole():
    """ReplicatedOp gathers, records it as implicit, computes everywhere, and passes gradients; strict() forbids it."""
    import torch

    with registered(ReplicatedOp("aten._linalg_slogdet.default")):

        def body():
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
            x = distribute_tensor(torch.from_numpy(values(3, 3)).requires_grad_(), mesh, [Shard(0)])
            with record_events() as log:
                _, logarithm = torch.linalg.slogdet(x)
            logarithm.backward()
            plain = torch.from_numpy(values(3, 3)).requires_grad_()
            torch.linalg.slogdet(plain)[1].backward()
            torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
            with strict(), pytest.raises(StrictModeError):
                torch.linalg.slogdet(x)
            return [(event.collective, event.implicit) for event in log]

        assert simulate(body, 2, platform="torch")[0] == [("all_gather", True)]


@torch_only
def test_an_operator_that_writes_is_not_gathered_unnoticed():
    """A write into a gathered operand is refused; into a replicated one it arrives."""
    import torch

    def triple(x):
        x.mul_(3)

    with torch.library._scoped_library("hp_test", "DEF") as library:
        library.define("triple_(Tensor(a!) x) -> ()")
        library.impl("triple_", triple, "CPU")

        def body():
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
            whole = distribute_tensor(torch.ones(3), mesh)
            torch.ops.hp_test.triple_(whole)
            with pytest.raises(UnsupportedOperatorError) as caught:
                torch.ops.hp_test.triple_(distribute_tensor(torch.ones(3), mesh, [Shard(0)]))
            return whole.full_tensor().tolist(), str(caught.value)

        with registered(ReplicatedOp("hp_test.triple_.default")):
            assert simulate(body, 2, platform="torch")[0] == (
                [3.0] * 3,
                "hp_test.triple_.default: operands written in place must be replicated; use x = x.redistribute() first",
            )


@torch_only
def test_what_is_registered_anew_is_asked_anew():
    """Cached results go with their registration, and unregister removes no later registration."""

    def answer(placement):
        def strategy(schema):
            (x,) = schema.args_spec
            return OpStrategy([OpSpec(Layout.place(x.mesh, [placement], x.shape))])

        return strategy

    propagator = ShardingPropagator()

    def body():
        layout = Layout.place(init_device_mesh("cpu", (1,)), [Replicate()], (4,))
        ask = lambda: propagator.propagate_op_sharding(OpSchema("of a test", (layout,))).output_spec.placements  # noqa: E731
        first = propagator.register_op_strategy("of a test", answer(Replicate()))
        results = [ask()]
        first.unregister()
        with pytest.raises(UnsupportedOperatorError):
            ask()
        with registered(propagator.register_op_strategy("of a test", answer(Shard(0)))):
            first.unregister()
            return [*results, ask()]

    assert simulate(body, 1, platform="torch") == [[(Replicate(),), (Shard(0),)]]


@torch_only
def test_the_registered_key_is_the_key():
    """Arguments left out of the key share a result, which still repeats each call's own values."""
    asked = []

    def strategy(schema):
        asked.append(schema.args_schema)
        (x,) = schema.args_spec
        rows = Layout.place(x.mesh, [Shard(0)], x.shape)
        return OpStrategy([OpSpec(rows, (rows,))])

    def body():
        whole = Layout.place(init_device_mesh("cpu", (1,)), [Replicate()], (4,))
        propagator = ShardingPropagator()
        ask = lambda *args: propagator.propagate_op_sharding(OpSchema("of a test", (whole, *args)))  # noqa: E731
        results = [ask(1, 5), ask(1, 5), ask(1, 6), ask(2, 5)]
        assert results[0] is results[1]
        return [layout.redistribute_schema.kwargs_schema["_"][1:] for layout in results]

    info = RuntimeSchemaInfo(static_argnum=2)
    with registered(ShardingPropagator().register_op_strategy("of a test", strategy, info)):
        assert simulate(body, 1, platform="torch") == [[(1, 5), (1, 5), (1, 6), (2, 5)]]


def bump_(x):
    """A function that writes, and calls ``__torch_function__`` as PyTorch's own do."""
    import torch

    if torch.overrides.has_torch_function((x,)):
        return torch.overrides.handle_torch_function(bump_, (x,), x)
    return x.add_(1)


@torch_only
def test_a_registered_write_is_a_write():
    """The operand itself is returned, cached views of its old values are dropped, and a copy is not written."""
    import torch

    def stays(schema):
        (x,) = schema.args_spec
        return OpStrategy([OpSpec(x, (x,))])

    def body():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        d = distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])
        assert bump_(d) is d
        assert bump_(x=d) is d
        assert d.full_tensor().tolist() == [[2.0, 2.0]] * 4
        with pytest.raises(UnsupportedOperatorError) as caught:
            bump_(distribute_tensor(torch.zeros(4, 2), mesh, [Shard(1)]).view(8))
        return str(caught.value)

    with registered(ShardingPropagator().register_op_strategy(bump_, stays)):
        assert "cannot be written to: it is a copy" in simulate(body, 2, platform="torch")[0]
    moves = lambda schema: OpStrategy([OpSpec(schema.args_spec[0].with_placement(0, Replicate()), schema.args_spec)])  # noqa: E731
    with registered(ShardingPropagator().register_op_strategy(bump_, moves)):
        assert simulate(refused_write, 2, platform="torch")[0] == (
            "bump_(x=f32[4@tp, 2]): it writes into x, which stays [4@tp, 2]; its rule says that the result is [4, 2]"
        )


def refused_write():
    """The message with which writing rows is refused."""
    import torch

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with pytest.raises(LayoutError) as caught:
        bump_(distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)]))
    return str(caught.value)


@torch_only
def test_a_registered_write_never_moves_its_operand():
    """Options that move the written operand are not taken; where all do, the strategy is refused."""

    def body():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        return ShardingPropagator().propagate_op_sharding(OpSchema(bump_, (Layout.place(mesh, [Shard(0)], (4,)),)))

    def cheaper(schema):
        (x,) = schema.args_spec
        whole = x.with_placement(0, Replicate())
        return OpStrategy([OpSpec(whole, (whole,), [-9.0]), OpSpec(x, (x,))])

    with registered(ShardingPropagator().register_op_strategy(bump_, cheaper)):
        results = simulate(body, 2, platform="torch")[0]
        assert (results.output_spec.notation(), results.needs_redistribute) == ("[4@tp]", False)

    def moves(schema):
        whole = schema.args_spec[0].with_placement(0, Replicate())
        return OpStrategy([OpSpec(whole, (whole,))])

    with registered(ShardingPropagator().register_op_strategy(bump_, moves)):
        assert simulate(refused_write, 2, platform="torch")[0] == (
            "bump_(x=f32[4@tp, 2]): bump_: it writes in place, but every OpSpec redistributes an operand"
        )


def asked(kind, schema_of):
    """The message with which propagation is refused, on rank 0 of two."""

    def body():
        meshes = [init_device_mesh("cpu", (2,), mesh_dim_names=(name,)) for name in ("tp", "dp")]
        layouts = [Layout.place(mesh, [Shard(0)], (4,)) for mesh in meshes]
        with pytest.raises(kind) as caught:
            ShardingPropagator().propagate_op_sharding(schema_of(*layouts))
        return str(caught.value)

    return simulate(body, 2, platform="torch")[0]


@torch_only
def test_layouts_of_different_meshes():
    """Operands on several meshes, and targets on another mesh, are refused."""
    assert asked(MeshMismatchError, lambda x, y: OpSchema("add", (x, y))) == (
        "add: operands are on different meshes, DeviceMesh(cpu, tp=2, ranks=[0, 1]) and "
        "DeviceMesh(cpu, dp=2, ranks=[0, 1]); bring them to one mesh first"
    )
    other = []

    def strategy(schema):
        return OpStrategy([OpSpec(schema.args_spec[0], (other[0],))])

    def elsewhere(x, y):
        other[:] = [y]
        return OpSchema("elsewhere", (x,))

    with registered(ShardingPropagator().register_op_strategy("elsewhere", strategy)):
        assert asked(MeshMismatchError, elsewhere) == (
            "elsewhere(_[0]=[4@tp]): elsewhere: the layout of _[0] in input_specs is on a different mesh than _[0]"
        )


@torch_only
def test_an_operator_that_runs_whole_has_no_layouts_to_ask_for():
    """Propagation of a ReplicatedOp is refused, since its outputs are known only after a call."""
    with registered(ReplicatedOp("whole_of_a_test")):
        assert asked(UnsupportedOperatorError, lambda x, _: OpSchema("whole_of_a_test", (x,))) == (
            "whole_of_a_test: it is a ReplicatedOp, so its outputs are known only after the call"
        )


def both_ways(x, y):
    """Two outputs of two operands, through ``__torch_function__`` as PyTorch's own functions."""
    import torch

    if torch.overrides.has_torch_function((x, y)):
        return torch.overrides.handle_torch_function(both_ways, (x, y), x, y)
    return x + y, (x - y).tolist()


@torch_only
def test_operands_of_an_operator_that_runs_whole():
    """Outputs keep their nesting, plain values stay; a plain tensor and a second mesh are refused."""
    import torch

    def body():
        meshes = [init_device_mesh("cpu", (2,), mesh_dim_names=(name,)) for name in ("tp", "dp")]
        x, y = (distribute_tensor(torch.arange(3.0), mesh, [Shard(0)]) for mesh in meshes)
        total, difference = both_ways(x, x)
        messages = []
        for error, other in ((MeshMismatchError, y), (MixedTensorError, torch.ones(3))):
            with pytest.raises(error) as caught:
                both_ways(x, other)
            messages.append(str(caught.value))
        return total.placements, total.full_tensor().tolist(), difference, messages

    with registered(ReplicatedOp("both_ways")):
        assert simulate(body, 2, platform="torch")[1] == (
            (Replicate(),),
            [0.0, 2.0, 4.0],
            [0.0] * 3,
            [
                (
                    "both_ways: operands are on different meshes, DeviceMesh(cpu, tp=2, ranks=[0, 1]) and "
                    "DeviceMesh(cpu, dp=2, ranks=[0, 1]); bring them to one mesh first"
                ),
                (
                    "both_ways: an operand is a plain tensor [3], but other operands are DTensors on DeviceMesh(cpu, "
                    "tp=2, ranks=[0, 1]); operand = hyper_parallel.DTensor.from_local(operand, mesh, [Replicate()]) "
                    "if every rank holds the same values; if it is a local shard that a parallel style returned, give "
                    "that style use_local_output=False"
                ),
            ],
        )


@torch_only
def test_schemas_tell_where_tensors_are():
    """A schema's strategies are its layouts, and its key includes dicts among the arguments."""
    mesh = DeviceMesh.abstract("cpu", (2,), (0, 1), ("tp",))
    x, y = Layout.place(mesh, [Shard(0)], (4,)), Layout.place(mesh, [Replicate()], (3,))
    schema = OpSchema("f", (x, [y]), {"options": {"a": 1}})
    assert [layout.strategies[0].output_spec for layout in schema.args_strategy] == [x, y]
    assert schema == OpSchema("f", (x, [y]), {"options": {"a": 1}})
    assert schema != OpSchema("f", (x, [y]), {"options": {"a": 2}})
    assert schema != OpSchema("f", (x, [y]), {"options": {"a": True}})
