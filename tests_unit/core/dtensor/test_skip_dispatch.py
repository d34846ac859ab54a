"""Blocks in which operations act on local tensors."""

from __future__ import annotations

import asyncio
import threading

import pytest

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.core.dtensor.skip_dispatch import SkipDTensorDispatch
from hyper_parallel.errors import MixedTensorError
from hyper_parallel.platform.select import current_platform
from hyper_parallel.verify.simulate import simulate

both = pytest.mark.platforms("torch", "mindspore")
torch_only = pytest.mark.platforms("torch")


def rows(world=2):
    """Five rows over the ranks: uneven."""
    import numpy as np

    platform = current_platform()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    return distribute_tensor(platform.from_numpy(np.arange(10.0).reshape(5, 2)), mesh, [Shard(0)])


@both
def test_inside_operations_are_local_and_after_it_they_are_not(platform_name):
    """Sums are over local rows inside and over all rows outside of the block; an exception leaves it too."""

    def body():
        x = rows()
        with SkipDTensorDispatch():
            inside, doubled = (x + x).sum(), -x
        with pytest.raises(KeyError), SkipDTensorDispatch():
            raise KeyError
        outside = (x + x).sum()
        assert not isinstance(inside, DTensor)
        assert not isinstance(doubled, DTensor)
        return float(inside), float(outside.full_tensor())

    assert simulate(body, 2, platform=platform_name) == [(30.0, 90.0), (60.0, 90.0)]


@both
def test_named_operators_are_dispatched(platform_name):
    """Operators named in `no_skip` act on the global tensor; the innermost block counts."""

    def body():
        x = rows()
        with SkipDTensorDispatch(no_skip={"sum"}):
            whole, local = x.sum(), x * 2
            with SkipDTensorDispatch():
                part = x.sum()
            again = x.sum()
        kinds = [isinstance(value, DTensor) for value in (whole, local, part, again)]
        return kinds, float(whole.full_tensor())

    assert simulate(body, 2, platform=platform_name) == [([True, False, False, True], 45.0)] * 2


@both
def test_detach_is_an_operation_too(platform_name):
    """Inside the block `detach` returns this rank's local shard, unless it is named."""

    def body():
        x = rows()
        with SkipDTensorDispatch():
            inside = x.detach()
        with SkipDTensorDispatch(no_skip={"detach"}):
            named = x.detach()
        return [isinstance(value, DTensor) for value in (inside, named, x.detach())], tuple(inside.shape)

    assert simulate(body, 2, platform=platform_name) == [
        ([False, True, True], (3, 2)),
        ([False, True, True], (2, 2)),
    ]


@torch_only
def test_operators_are_named_by_object_too():
    """A function, the name of a spelling and a canonical name all name an operator."""
    import torch

    def body():
        x, results = rows(), []
        for name in (torch.Tensor.mul, "mul", torch.nn.functional.gelu, "gelu", "linear"):
            with SkipDTensorDispatch(no_skip={name}):
                results.append((isinstance(x.mul(2.0), DTensor), isinstance(torch.nn.functional.gelu(x), DTensor)))
        return results

    assert simulate(body, 2, platform="torch")[0] == [(True, False)] * 2 + [(False, True)] * 2 + [(False, False)]


@torch_only
def test_a_plain_result_is_refused_by_a_dispatched_operator():
    """A dispatched operator refuses the plain result of an operation inside the block."""

    def body():
        x = rows()
        with SkipDTensorDispatch(no_skip="matmul"), pytest.raises(MixedTensorError) as caught:
            x @ x.transpose(0, 1)
        return str(caught.value).split(";")[0]

    assert simulate(body, 2, platform="torch")[0] == (
        "argument y is a plain tensor [2, 3], but other operands are DTensors on DeviceMesh(cpu, tp=2, ranks=[0, 1])"
    )


@torch_only
def test_writing_in_place_writes_the_local_tensor():
    """An in-place write changes the local tensor, returns the DTensor, and drops cached views."""

    def body():
        x = rows()
        with SkipDTensorDispatch():
            same = x.mul_(3.0)
        assert same is x
        return float(x.sum().full_tensor())

    assert simulate(body, 2, platform="torch") == [135.0, 135.0]


@torch_only
def test_functions_without_a_rule_run_locally():
    """A function without a rule is refused outside the block and runs locally inside, gradients included."""
    import torch

    def body():
        x = rows().requires_grad_()
        with SkipDTensorDispatch():
            total = torch.special.i0e(x).sum() + torch.nn.functional.pad(x, (1, 1)).sum()
        total.backward()
        return tuple(x.grad.full_tensor().shape)

    assert simulate(body, 2, platform="torch") == [(5, 2)] * 2


@torch_only
def test_blocks_hold_for_one_thread_and_one_task():
    """Another thread and another asyncio task do not see the block; as a decorator it opens per call."""

    def body():
        x = rows(1)
        seen = {}

        def other():
            seen["thread"] = isinstance(-x, DTensor)

        async def inside():
            with SkipDTensorDispatch():
                await asyncio.sleep(0)
                seen["task"] = isinstance(-x, DTensor)

        async def beside():
            await asyncio.sleep(0)
            seen["beside"] = isinstance(-x, DTensor)

        async def together():
            await asyncio.gather(inside(), beside())

        with SkipDTensorDispatch():
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        asyncio.run(together())
        seen["decorated"] = isinstance(SkipDTensorDispatch()(lambda: -x)(), DTensor)
        return seen

    assert simulate(body, 1, platform="torch") == [{"thread": True, "task": False, "beside": True, "decorated": False}]


@torch_only
def test_what_is_composed_of_others_is_called_as_it_was_written():
    """Inside the block a composed function is called as it is on local tensors, without its decomposition."""
    from hyper_parallel.core.shard.entry import OpEntry
    from hyper_parallel.platform.torch.intercept import interception
    from hyper_parallel.platform.torch.ops import registry

    def body():
        x, wrong = rows(1), []
        table = {**registry.functions(), **registry.overloads()}
        composed = {func: entry for func, entry in table.items() if entry.composed is not None}
        for func, entry in composed.items():
            seen = []
            spy = OpEntry(entry.name, lambda *args, _to=seen, **named: _to.append((args, named)), entry.binder,
                        entry.rule, entry.local, canonical=entry.canonical)  # fmt: skip
            with SkipDTensorDispatch():
                interception().dispatcher.dispatch(spy, (x, 1), {"other": [x]})
            if entry.func is not func or seen != [((x._local, 1), {"other": [x._local]})]:
                wrong.append(entry.name)
        return wrong, len(composed) > 250

    assert simulate(body, 1, platform="torch") == [([], True)]


@torch_only
def test_results_of_composed_functions_are_local():
    """Sizes that depend on values, indices, casts and in-place options act on the local tensor."""
    import torch
    from torch.nn import functional

    def body():
        x, place = rows(), torch.tensor([0])
        local = x.to_local().clone()
        with SkipDTensorDispatch():
            pairs = [
                (x.nonzero(), local.nonzero()),
                (torch.argwhere(x), torch.argwhere(local)),
                (torch.where(x > 3)[0], torch.where(local > 3)[0]),
                (x[place, 1], local[place, 1]),
                (x[x > 3], local[local > 3]),
                (torch.masked_select(x, x > 3), local[local > 3]),
                (x.index_put((place,), local[:1]), local.index_put((place,), local[:1])),
                (torch.combinations(x[0]), torch.combinations(local[0])),
                (x.var(0), local.var(0)),
                (x.median(), local.median()),
                (x.max(0).indices, local.max(0).indices),
                (functional.cross_entropy(x, x), functional.cross_entropy(local, local)),
                (x.double(), local.double()),
            ]
            plain = [not isinstance(results, DTensor) and torch.equal(results, wanted) for results, wanted in pairs]
            same = functional.relu(x.neg_(), inplace=True), x.cumsum_(0), x.to(torch.float64)
        return plain, same[0].abs().sum().item(), same[1] is x, isinstance(same[2], DTensor)

    assert [(all(value), *rest) for value, *rest in simulate(body, 2, platform="torch")] == [
        (True, 0.0, True, False)
    ] * 2


@both
def test_a_named_operator_is_dispatched_with_all_that_it_is_made_of(platform_name):
    """A named operator that is composed of others acts on the global tensor, not on local shards."""

    def body(named):
        import numpy as np

        platform, x = current_platform(), rows()
        with SkipDTensorDispatch(no_skip=named):
            results = x.nonzero()
        wanted = x.nonzero()
        assert isinstance(results, DTensor)
        return bool(np.array_equal(*(platform.tensor_to_numpy(value.full_tensor()) for value in (results, wanted))))

    named = {"torch": "nonzero", "mindspore": "NonZero"}[platform_name]
    assert simulate(body, 2, platform=platform_name, args=(named,)) == [True, True]


@pytest.mark.platforms("mindspore")
def test_primitives_without_a_rule_run_locally():
    """MindSpore's Python wrappers of primitives run on local shards too, and results can be assigned to."""

    def body():
        from mindspore import Tensor, ops

        x = rows(1)
        with SkipDTensorDispatch():
            values = ops.svd(x, compute_uv=False)
            written = ops.assign(-x, x)
        return isinstance(values, Tensor), tuple(values.shape), isinstance(written, DTensor), float(written.sum())

    assert simulate(body, 1, platform="mindspore") == [(True, (2,), False, 45.0)]
