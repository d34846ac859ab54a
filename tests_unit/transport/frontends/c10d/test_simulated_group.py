"""Collectives of simulated ranks, in every form, against real gloo processes."""

import re
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hyper_parallel.errors import CollectiveMismatchError, RankFailedError, UnsupportedOnBackend
from hyper_parallel.transport.real.launched_processes import run_launched
from hyper_parallel.transport.serialization import pack
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")

# PyTorch 2.13 has the first names; before, its two modules of collectives had the others.
GATHER = ("all_gather_single", "all_gather_into_tensor", "all_gather_tensor")
SCATTER = ("reduce_scatter_single", "reduce_scatter_tensor")


def named(module, names):
    """The first of the functions that a module has."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


class Outputs(dict):
    """The outputs of calls, by a text that names the call, and the values that calls take."""

    def record(self, text, *tensors):
        """Keep copies."""
        self[text] = [x.detach().clone() for x in tensors]

    @staticmethod
    def values(*shape, dtype=torch.float32, seed=0):
        """Small integers that differ between ranks: every order of summing them gives the same."""
        generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
        return torch.randint(1, 5, shape, generator=generator).to(dtype)


FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int32, torch.int64, torch.uint8, torch.int8]


def reductions(outputs, dtype):
    """Collectives that reduce."""
    values, rank, size, ops = outputs.values, dist.get_rank(), dist.get_world_size(), dist.ReduceOp
    for op in [ops.SUM, ops.PRODUCT, ops.MIN, ops.MAX]:
        x, y, z = values(3, 2, dtype=dtype), values(5, dtype=dtype), values(3, dtype=dtype)
        dist.all_reduce(x, op)
        dist.all_reduce(y, op, async_op=True).wait()
        dist.reduce(z, size - 1, op)
        parts = [values(2, 3, dtype=dtype, seed=place) for place in range(size)]
        out, single = torch.zeros(2, 3, dtype=dtype), torch.zeros(2, dtype=dtype)
        dist.reduce_scatter(out, parts, op)
        named(dist, SCATTER)(single, values(2 * size, dtype=dtype), op)
        outputs.record(f"{op} {dtype}", x, y, out, single, *([z] if rank == size - 1 else []))
    for op in [ops.BAND, ops.BOR, ops.BXOR] if dtype in INTEGERS else []:
        x = values(7, dtype=dtype)
        dist.all_reduce(x, op)
        outputs.record(f"{op} {dtype}", x)


def movements(outputs, dtype):
    """Collectives that move."""
    values, rank, size = outputs.values, dist.get_rank(), dist.get_world_size()
    root, x = size - 1, values(4, dtype=dtype)
    dist.broadcast(x, root)
    listed, single = [torch.zeros(3, dtype=dtype) for _ in range(size)], torch.zeros(size, 3, dtype=dtype)
    dist.all_gather(listed, values(3, dtype=dtype))
    named(dist, GATHER)(single, values(1, 3, dtype=dtype))
    outputs.record(f"gather {dtype}", x, *listed, single)
    taken, sent = torch.zeros(2, dtype=dtype), [values(2, dtype=dtype, seed=place) for place in range(size)]
    dist.scatter(taken, sent if rank == root else None, root)
    listed = [torch.zeros(2, dtype=dtype) for _ in range(size)] if rank == root else None
    dist.gather(taken, listed, root)
    outputs.record(f"scatter {dtype}", taken, *(listed or []))
    splits = [(rank + place) % 3 for place in range(size)]
    exchanged, even = torch.zeros(sum(splits), 2, dtype=dtype), torch.zeros(2 * size, dtype=dtype)
    dist.all_to_all_single(exchanged, values(sum(splits), 2, dtype=dtype), np.array(splits), splits)
    dist.all_to_all_single(even, values(2 * size, dtype=dtype))
    outputs.record(f"all_to_all {dtype}", exchanged, even)


def special_forms(outputs):
    """Complex, strided and sparse tensors, coalesced forms, a sub-group."""
    values, rank, size = outputs.values, dist.get_rank(), dist.get_world_size()
    x, tall = torch.complex(values(3), values(3, seed=1)), values(3, 4).t()
    sparse = torch.sparse_coo_tensor(torch.tensor([[rank, 0]]), values(2, 2), (size, 2))
    for tensor in [x, tall, sparse]:
        dist.all_reduce(tensor)
    outputs.record("complex, strided, sparse", torch.view_as_real(x), tall, sparse.to_dense())
    x, y = values(2), values(3)
    dist.all_reduce_coalesced([x, y])
    gathered = [[torch.zeros(2), torch.zeros(3)] for _ in range(size)]
    dist.all_gather_coalesced(gathered, [values(2), values(3)])
    with dist._coalescing_manager():
        dist.all_reduce(x)
        dist.all_reduce(y)
    outputs.record("coalesced", x, y, *(part for parts in gathered for part in parts))
    sub = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        x = values(3)
        dist.all_reduce(x, group=sub)
        outputs.record("sub-group", x)


def functions(outputs):
    """Functional collectives, and those that backward calls."""
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.nn import functional as differentiable

    group, size, values = dist.group.WORLD, dist.get_world_size(), outputs.values
    x, gather = values(2 * size, 3), named(functional, GATHER)
    outputs.record("all_reduce", functional.all_reduce(x, "sum", group))
    outputs.record("gather", gather(x, 0, group), gather(x, 1, group))
    outputs.record("scatter", named(functional, SCATTER)(x, "sum", 0, group))
    outputs.record("exchange", functional.all_to_all_single(x, None, None, group))
    outputs.record("broadcast", functional.broadcast(x, 0, group))
    outputs.record("all_reduces", *functional.all_reduce_coalesced([x, x + 1], "max", group))
    outputs.record("gathers", *functional.all_gather_into_tensor_coalesced([x, x + 1], group))
    outputs.record("scatters", *functional.reduce_scatter_tensor_coalesced([x, x + 1], "sum", [0, 0], group))
    leaf = values(2, 3).requires_grad_()
    loss = differentiable.all_reduce(leaf).square().sum() + torch.stack(differentiable.all_gather(leaf)).pow(3).sum()
    loss.backward()
    outputs.record("differentiable", loss, leaf.grad)
    leaf = values(size, 3).requires_grad_()
    functional.all_to_all_single_autograd(leaf, None, None, group).square().sum().backward()
    outputs.record("differentiable exchange", leaf.grad)


def objects():
    """Collectives of objects."""
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered, sent, own = [None] * size, [f"from {rank}", rank], [None]
    dist.all_gather_object(gathered, {"rank": rank, "data": "x" * rank})
    dist.broadcast_object_list(sent, 1)
    dist.scatter_object_list(own, [f"to {place}" for place in range(size)] if rank == 0 else None, 0)
    many = [None] * size if rank == 0 else None
    dist.gather_object(rank, many, 0)
    dist.barrier()
    dist.monitored_barrier()
    return gathered, sent, own, many


def every_collective():
    """The outputs of every collective in every form."""
    import warnings

    warnings.simplefilter("ignore")
    outputs = Outputs()
    for dtype in [*FLOATS, *INTEGERS]:
        reductions(outputs, dtype)
        movements(outputs, dtype)
    special_forms(outputs)
    functions(outputs)
    return dict(outputs), objects()


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.sweep), 3])
def test_every_collective_equals_gloo(world_size):
    """Outputs, in every form and dtype, equal those of real processes bit for bit; the values are small integers."""
    launched = run_launched(pack((every_collective, ()), every_collective), world_size, "torch", 300.0)
    assert launched.failure is None, str(launched.failure)
    simulated = simulate(every_collective, world_size, "torch")
    compared = 0
    for (outputs, objects), (expected, expected_objects) in zip(simulated, launched.results, strict=True):
        assert objects == expected_objects
        assert outputs.keys() == expected.keys()
        for text, tensors in outputs.items():
            for x, y in zip(tensors, expected[text], strict=True):
                assert torch.equal(x, y), text
                assert x.dtype == y.dtype
                compared += 1
    assert compared > 200 * world_size


def of_rank_one(wrong, right):
    """A call that rank 1 makes in a wrong way."""

    def body():
        if dist.get_rank() == 1:
            wrong()
        else:
            right()

    return body


def ones(count=2, dtype=torch.float32):
    """A tensor of ones."""
    return torch.ones(count, dtype=dtype)


MISMATCHES = {
    "operation": of_rank_one(dist.barrier, lambda: dist.all_reduce(ones())),
    "reduction": of_rank_one(lambda: dist.all_reduce(ones(), dist.ReduceOp.MAX), lambda: dist.all_reduce(ones())),
    "shape": of_rank_one(lambda: dist.all_reduce(ones(3)), lambda: dist.all_reduce(ones(2))),
    "dtype": of_rank_one(lambda: dist.all_reduce(ones(2, torch.int32)), lambda: dist.all_reduce(ones(2))),
    "src": of_rank_one(lambda: dist.broadcast(ones(), 1), lambda: dist.broadcast(ones(), 0)),
    "dst": of_rank_one(lambda: dist.reduce(ones(), 1), lambda: dist.reduce(ones(), 0)),
    "chunk shapes": of_rank_one(
        lambda: dist.all_to_all_single(ones(3), ones(2), [2, 1], [1, 1]),
        lambda: dist.all_to_all_single(ones(2), ones(2)),
    ),
}


@pytest.mark.parametrize("fact", MISMATCHES)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_mismatch_names_the_fact_and_both_lines(fact, asynchronous):
    """Members that differ in any fact are told which, with each member's call and its line in this file."""
    body = MISMATCHES[fact]
    if asynchronous:
        body = of_rank_one(
            lambda: dist.all_reduce(ones(3), async_op=True).wait(),
            lambda: dist.all_reduce(ones(2), async_op=True).wait(),
        )
        fact = "shape"
    with pytest.raises(RankFailedError) as caught:
        simulate(body, 2, "torch")
    lines = str(caught.value.__cause__).splitlines()
    assert lines[0].startswith(f"ranks 0 and 1 disagree about the {fact} of collective 0 of ranks (0, 1):")
    for rank, line in enumerate(lines[1:]):
        assert re.fullmatch(rf"  rank {rank}: dist\.\w+\(.*\) at {re.escape(__file__)}:\d+", line)


def test_a_missing_member_is_named_at_once():
    """A member that returns without joining is named, without a time limit."""

    def body():
        if dist.get_rank() != 1:
            dist.all_reduce(ones())

    with pytest.raises(RankFailedError) as caught:
        simulate(body, 3, "torch")
    line = body.__code__.co_firstlineno + 2
    assert str(caught.value.__cause__) == (
        "rank 1 returned without joining collective 0 of ranks (0, 1, 2), in which others wait:\n"
        f"  ranks 0, 2: dist.all_reduce(f32[2], SUM) at {__file__}:{line}"
    )


def test_a_deadlock_of_two_groups_is_named():
    """Ranks that wait for each other in two groups are all reported, with the groups."""

    def body():
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        for group in groups if dist.get_rank() else reversed(groups):
            dist.all_reduce(ones(), group=group)

    with pytest.raises(RankFailedError) as caught:
        simulate(body, 2, "torch")
    line = body.__code__.co_firstlineno + 3
    call, where = "waited in dist.all_reduce(f32[2], SUM)", f"at {__file__}:{line}"
    assert str(caught.value.__cause__) == (
        "deadlock, no rank can go on:\n"
        f"  rank 0 {call} (collective 1 of ranks (0, 1) in group 2) for ranks [1] {where}\n"
        f"  rank 1 {call} (collective 1 of ranks (0, 1) in group 1) for ranks [0] {where}"
    )


REFUSED = {
    (
        "all_gather_into_tensor: the complete tensor is float32[3] and a part float32[2]; over 2 ranks the complete "
        "tensor must have 2 times the elements of a part, of the same dtype"
    ): lambda: named(dist, GATHER)(ones(3), ones(2)),
    "all_gather over 2 ranks got 1 tensors; it takes one for each": lambda: dist.all_gather([ones(2)], ones(2)),
    "all_gather: an output is float32[3] and its input float32[2]; they must be the same": lambda: dist.all_gather(
        [ones(3), ones(3)], ones(2)
    ),
    "all_to_all_single: 3 rows cannot be split evenly over 2 ranks; pass the split sizes": lambda: (
        dist.all_to_all_single(ones(3), ones(3))
    ),
    "all_to_all_single: split sizes [1, 2] must be 2 numbers whose sum is 2, the number of rows": lambda: (
        dist.all_to_all_single(ones(2), ones(2), [1, 2], [1, 1])
    ),
    "AVG of torch.int32: an average needs floating numbers; sum and divide instead": lambda: dist.all_reduce(
        ones(2, torch.int32), dist.ReduceOp.AVG
    ),
    "BOR of torch.float32: bitwise reductions need integers or bool": lambda: dist.all_reduce(
        ones(), dist.ReduceOp.BOR
    ),
    (
        "all_gather_into_tensor: the tensor float32[4, 2] of all parts must be contiguous; call .contiguous() first"
    ): lambda: named(dist, GATHER)(torch.ones(2, 4).t(), ones(4)),
    "MAX of a sparse tensor: only SUM reduces sparse tensors": lambda: dist.all_reduce(
        ones().to_sparse(), dist.ReduceOp.MAX
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_arguments_that_cannot_be_right_are_refused(message):
    """Sizes and dtypes that do not fit within one rank's call are errors that state both."""
    with pytest.raises(RankFailedError) as caught:
        simulate(REFUSED[message], 2, "torch")
    assert isinstance(caught.value.__cause__, CollectiveMismatchError)
    assert str(caught.value.__cause__) == message


def test_average_and_premultiplied_sum():
    """Reductions that only NCCL has work as well: AVG, and PREMUL_SUM with each rank's factor."""

    def body():
        rank = dist.get_rank()
        x, y = torch.tensor([1.0 + rank]), torch.tensor([1.0 + rank])
        dist.all_reduce(x, dist.ReduceOp.AVG)
        dist.all_reduce(y, dist._make_nccl_premul_sum(0.5))
        return x.item(), y.item()

    assert simulate(body, 3, "torch") == [(2.0, 3.0)] * 3


def test_lists_of_all_to_all():
    """all_to_all with lists of tensors, which gloo lacks, sends chunk i to member i, of any sizes."""

    def body():
        rank, size = dist.get_rank(), dist.get_world_size()
        sends = [torch.full((rank + place,), float(10 * rank + place)) for place in range(size)]
        comes = [torch.zeros(rank + place) for place in range(size)]
        dist.all_to_all(comes, sends)
        return [x.tolist() for x in comes]

    assert simulate(body, 3, "torch") == [
        [[10.0 * place + rank] * (rank + place) for place in range(3)] for rank in range(3)
    ]


def test_gathering_of_unequal_sizes():
    """all_gather takes tensors of unequal sizes if all members expect the same; else the shapes are named."""

    def body():
        gathered = [torch.zeros(place + 1) for place in range(dist.get_world_size())]
        dist.all_gather(gathered, torch.full((dist.get_rank() + 1,), float(dist.get_rank())))
        return torch.cat(gathered).tolist()

    def wrong():
        mine = dist.get_rank() + 1
        dist.all_gather([torch.zeros(1), torch.zeros(2)] if mine == 2 else [torch.zeros(1), torch.zeros(3)], ones(mine))

    assert simulate(body, 3, "torch") == [[0.0, 1.0, 1.0, 2.0, 2.0, 2.0]] * 3
    with pytest.raises(RankFailedError) as caught:
        simulate(wrong, 2, "torch")
    line = wrong.__code__.co_firstlineno + 2
    assert str(caught.value.__cause__) == (
        "ranks 0 and 1 disagree about the shapes of collective 0 of ranks (0, 1):\n"
        f"  rank 0: dist.all_gather(f32, shapes=[[1], [3]]) at {__file__}:{line}\n"
        f"  rank 1: dist.all_gather(f32, shapes=[[1], [2]]) at {__file__}:{line}"
    )


def test_a_collective_that_nobody_waits_for_is_checked():
    """A mismatch, or a missing member, of a collective that is started and never waited for is an error at the end."""

    def differs():
        dist.all_reduce(ones(2 + dist.get_rank()), async_op=True)

    def misses():
        if dist.get_rank() == 0:
            dist.all_reduce(ones(), async_op=True)

    with pytest.raises(RankFailedError, match="ranks 0 and 1 disagree about the shape of collective 0"):
        simulate(differs, 2, "torch")
    with pytest.raises(RankFailedError, match="rank 1 returned without joining collective 0 of ranks"):
        simulate(misses, 2, "torch")


def test_outputs_are_written_when_waited_for():
    """An asynchronous collective leaves its output alone until wait(); a program that forgets it reads old values."""

    def body():
        x = ones()
        work = dist.all_reduce(x, async_op=True)
        dist.barrier()
        before = x.tolist()
        work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.result()[0] is x
        assert work.get_future().value()[0] is x
        return before, x.tolist()

    assert simulate(body, 2, "torch") == [([1.0, 1.0], [2.0, 2.0])] * 2


def test_asking_whether_it_is_complete_lets_others_run():
    """A loop around is_completed() ends, since the other ranks run meanwhile."""

    def body():
        x, asked = ones(), 0
        if dist.get_rank() == 1:
            dist.recv(x.clone(), 0)
        work = dist.all_reduce(x, async_op=True)
        if dist.get_rank() == 0:
            assert not work.is_completed()
            dist.send(x, 1)
        while not work.is_completed():
            asked += 1
        return x.tolist(), asked < 10

    assert simulate(body, 2, "torch") == [([2.0, 2.0], True)] * 2


def test_a_group_of_another_rank_is_refused():
    """A group that one rank put into a global variable is refused on the others, with the reason."""
    shared = []

    def body():
        group = dist.new_group([0, 1])
        shared.append(group)
        dist.barrier()
        dist.all_reduce(ones(), group=shared[0])

    with pytest.raises(RankFailedError) as caught:
        simulate(body, 2, "torch")
    assert str(caught.value.__cause__) == (
        "a group of simulated rank 0 is used by rank 1: simulated ranks are threads that share global variables; keep "
        "groups in objects that each rank creates"
    )


def test_a_thread_that_a_rank_starts():
    """It finds the rank's world, and is refused by name when it communicates: the rank fails, whatever it catches."""
    worlds, errors = [], []

    def body():
        def helper():
            worlds.append((dist.is_initialized(), dist.get_rank()))
            try:
                dist.all_reduce(ones())
            except UnsupportedOnBackend as error:
                errors.append(str(error))

        if dist.get_rank() == 1:
            thread = threading.Thread(target=helper, name="helper")
            thread.start()
            thread.join()

    message = (
        "thread 'helper', which simulated rank 1 started, communicates: only the rank's own thread may; "
        "communicate there (dcp.save instead of dcp.async_save)"
    )
    with pytest.raises(RankFailedError) as caught:
        simulate(body, 2, "torch")
    assert message in str(caught.value)
    assert errors == [message]
    assert worlds == [(True, 1)]


def test_two_runs_are_equal():
    """A program with races between messages of any source gives the same results in every run."""

    def body():
        rank, size = dist.get_rank(), dist.get_world_size()
        order = []
        if rank == 0:
            x = ones()
            order += [dist.recv(x) for _ in range(2 * (size - 1))]
        else:
            for _ in range(2):
                dist.send(ones(), 0)
        total = torch.randn(3)
        dist.all_reduce(total)
        return order, total.tolist()

    assert simulate(body, 4, "torch") == simulate(body, 4, "torch")


def test_split_sizes_that_are_a_tensor():
    """PyTorch takes lists and arrays, and refuses tensors with this type."""

    def body():
        with pytest.raises(TypeError) as caught:
            dist.all_to_all_single(ones(2), ones(2), torch.tensor([1, 1]), [1, 1])
        return str(caught.value)

    words = "incompatible function arguments: split sizes are a tensor; PyTorch takes a list or an array"
    assert simulate(body, 2, "torch") == [f"all_to_all_single(): {words}"] * 2
