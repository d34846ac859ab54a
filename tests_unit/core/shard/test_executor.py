from __future__ import annotations

from typing import NamedTuple

import pytest

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.core.shard.entry import OpEntry, binder
from hyper_parallel.core.shard.executor import TensorArgument, marks_in
from hyper_parallel.core.shard.rule import LocalCall, Row, Rule, Strategies
from hyper_parallel.errors import ShardMismatchError
from hyper_parallel.platform.select import get_torch_platform
from hyper_parallel.verify.simulate import simulate

R, S0 = Replicate(), Shard(0)


def entry_of(strategies, func, signature="x", **options):
    """A spelling of an operator that only this test knows."""
    rule = Rule("probe", signature, strategies, by_value=options.pop("by_value", True), view=options.pop("view", False))
    return OpEntry("probe", func, binder(signature), rule, func, **options)


def run(entry, *args, **kwargs):
    """Dispatch ``args`` sharded by rows on two ranks; return the results' global values or error texts."""

    def on_rank():
        import torch

        platform, mesh = get_torch_platform(), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

        def sharded(value):
            if not isinstance(value, torch.Tensor):
                return [sharded(item) for item in value] if isinstance(value, list) else value
            layout = Layout.place(mesh, [S0], tuple(value.shape))
            return platform.wrap(value[slice(*layout.local_box()[0])].clone(), layout)

        try:
            return platform.dispatcher.dispatch(entry, tuple(map(sharded, args)), kwargs)
        except ShardMismatchError as error:
            return str(error)

    return simulate(on_rank, 2, "torch")


def test_marks_tell_occurrences_apart():
    """The same tensor marked twice is two marks, which nested sequences give in order."""
    first, second = TensorArgument("t"), TensorArgument("t")
    assert list(marks_in([1, (first, [second]), "x"])) == [first, second]
    assert first is not second


@pytest.mark.platforms("torch")
def test_a_rule_that_is_wrong_about_shapes_is_caught():
    """The first call of a plan compares its outputs with the rule on every rank; a wrong rule is not cached."""
    import torch

    entry = entry_of(lambda _: Strategies((Row((S0,), (S0,)), Row((R,), (R,))), ((4, 5),)), lambda x: x[:, :2])
    for _ in range(2):
        text = (
            "probe(x=f32[4@tp, 3]): the local call returned [2, 2], the plan says [2, 5] of [4@tp, 5]; "
            "this is a bug in the rule; please report it"
        )
        assert run(entry, torch.ones(4, 3)) == [text, text]
    assert entry.cache == {}


@pytest.mark.platforms("torch")
def test_operands_in_lists_and_by_name():
    """Local tensors are fetched for operands in lists, by position and by name."""
    import torch

    entry = entry_of(
        lambda call: Strategies((Row((S0,) * 3, (S0,)),), (call.operands[0].shape,)),
        lambda tensors, x, scale=1.0: (tensors[0] + tensors[1] * x) * scale,
        "tensors, x, scale=1.0",
    )
    x = torch.arange(4.0)
    for out in run(entry, [x, x], x, scale=2.0):
        assert out.placements == (S0,)
        assert out.to_local().tolist() in ([0.0, 4.0], [12.0, 24.0])


@pytest.mark.platforms("torch")
def test_replaced_arguments_reach_the_canonical_operator():
    """Arguments that localize replaces are passed on; scalars outside the key come from the current call."""
    import torch

    def strategies(call):
        return Strategies((Row((S0,), (S0,)),), (call["x"].shape,), lambda *_: LocalCall({"size": 7}))

    entry = entry_of(
        strategies, lambda x, size, scale: x * size * scale, "x, size, scale", canonical=True, by_value=False
    )
    for scale in (1.0, 2.0, 3.0):
        for out in run(entry, torch.ones(4), 0, scale):
            assert out.to_local().tolist() == [7 * scale] * 2
    assert len(entry.cache) == 2  # one per rank


@pytest.mark.platforms("torch")
def test_sequences_come_back_in_their_type():
    """Several outputs come back as the framework returned them: tuple, list or named tuple."""
    import torch

    class Pair(NamedTuple):
        values: object
        indices: object

    for container in (Pair, lambda *both: list(both), lambda *both: both):
        entry = entry_of(
            lambda call: Strategies((Row((S0,), (S0, S0)),), (call["x"].shape,) * 2, many=True),
            lambda x, container=container: container(x, x * 2),
        )
        for _ in range(2):
            out = run(entry, torch.ones(4))[0]
            assert type(out) is type(container(1, 2))
            assert [item.shape for item in out] == [(4,), (4,)]


@pytest.mark.platforms("torch")
def test_views_that_moved_are_marked():
    """A view whose operand had to move carries the reason why it is read-only; other views carry none."""
    import torch

    stay = entry_of(lambda call: Strategies((Row((S0,), (S0,)),), (call["x"].shape,)), lambda x: x.view(-1), view=True)
    move = entry_of(lambda call: Strategies((Row((R,), (R,)),), (call["x"].shape,)), lambda x: x.view(-1), view=True)
    assert run(stay, torch.ones(4))[0]._readonly is None
    assert run(move, torch.ones(4))[0]._readonly == (
        "it is a copy: probe(x=f32[4@tp]) had to redistribute x to f32[4], so a write would be lost; write to x itself"
    )
