"""Direct calls of torch.distributed are compared before they run: over several real processes."""

import re

import pytest

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.transport.real.launched_processes import run_launched
from hyper_parallel.transport.serialization import pack

pytestmark = pytest.mark.platforms("torch")

# PyTorch 2.13 has the first names; before, its two modules of collectives had the others.
GATHER = ("all_gather_single", "all_gather_into_tensor", "all_gather_tensor")
SCATTER = ("reduce_scatter_single", "reduce_scatter_tensor")


def named(module, names):
    """The first of the functions that a module has."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


def run(fn, world_size, args=()):
    """Return the results of a function on a warm world."""
    return run_launched(pack((fn, args), fn), world_size, "torch", 120.0)


def _all_to_all(sizes):
    """Return a function that exchanges a table of rows; with ``wrong``, every rank expects one row less from rank 0."""
    import torch
    import torch.distributed as dist

    def exchange(wrong):
        rank = dist.get_rank()
        sent, come = sizes[rank], [row[rank] for row in sizes]
        come[0] -= wrong
        x = torch.arange(2.0 * sum(sent)).reshape(-1, 2) + 100 * rank
        y = x.new_empty(sum(come), 2)
        dist.all_to_all_single(y, x, come, sent)
        return y

    return exchange


def _blocking():
    """List per differing fact the wrong call's text and a function that calls wrongly if its argument is true."""
    import torch
    import torch.distributed as dist
    from torch.distributed.nn import functional as nn

    ops, size = dist.ReduceOp, dist.get_world_size()

    def ones(count=2):
        return torch.ones(count)

    def parts(count=2, number=size):
        return [ones(count) for _ in range(number)]

    return [
        ("operation", "barrier()", lambda wrong: dist.barrier() if wrong else dist.all_reduce(ones())),
        ("reduction", "all_reduce(f32[2], MAX)", lambda wrong: dist.all_reduce(ones(), ops.MAX if wrong else ops.SUM)),
        ("shape", "all_reduce(f32[3], SUM)", lambda wrong: dist.all_reduce(ones(2 + wrong))),
        ("dtype", "all_reduce(i32[2], SUM)", lambda wrong: dist.all_reduce(ones().int() if wrong else ones())),
        ("src", "broadcast(f32[2], src=1)", lambda wrong: dist.broadcast(ones(), int(wrong))),
        ("src", "broadcast(f32[2], src=1)", lambda wrong: dist.broadcast(ones(), group_src=int(wrong))),
        ("dst", "reduce(f32[2], SUM, dst=1)", lambda wrong: dist.reduce(ones(), int(wrong))),
        ("dst", "gather(f32[2], dst=1)", lambda wrong: dist.gather(ones(), None, int(wrong))),
        ("src", "scatter(f32[2], src=1)", lambda wrong: dist.scatter(ones(), None, int(wrong))),
        ("shape", "all_gather(f32[3])", lambda wrong: dist.all_gather(parts(2 + wrong), ones(2 + wrong))),
        (
            "shape",
            "all_gather_into_tensor(f32[3])",
            lambda wrong: named(dist, GATHER)(ones((2 + wrong) * size), ones(2 + wrong)),
        ),
        (
            "shapes",
            "reduce_scatter(f32, SUM, shapes=[[3], [3], [3]])",
            lambda wrong: dist.reduce_scatter(ones(2 + wrong), parts(2 + wrong)),
        ),
        (
            "shape",
            "reduce_scatter_tensor(f32[3], SUM)",
            lambda wrong: named(dist, SCATTER)(ones(2 + wrong), ones((2 + wrong) * size)),
        ),
        (
            "chunk shapes",
            "all_to_all(f32[2] f32[2] f32[2], expects f32[3] f32[2] f32[2])",
            lambda wrong: dist.all_to_all([ones(2 + wrong), ones(), ones()], parts()),
        ),
        (
            "chunk shapes",
            "all_to_all_single(f32[2] f32[4] f32[0], expects f32[4] f32[4] f32[2])",
            _all_to_all([[1, 3, 2], [1, 2, 0], [4, 1, 1]]),
        ),
        ("dst", "gather_object(dst=1)", lambda wrong: dist.gather_object(0, None, int(wrong))),
        ("src", "scatter_object_list(src=1)", lambda wrong: dist.scatter_object_list([0], None, int(wrong))),
        ("src", "broadcast_object_list(src=1)", lambda wrong: dist.broadcast_object_list([0], int(wrong))),
        ("reduction", "all_reduce(f32[2], MAX)", lambda wrong: nn.all_reduce(ones(), ops.MAX if wrong else ops.SUM)),
        ("src", "broadcast(f32[2], src=1)", lambda wrong: nn.broadcast(ones(), int(wrong))),
    ]


def _mistaken():
    """Return on each rank the error of every mistake that rank 1 makes, and of one that it makes alone."""
    import torch
    import torch.distributed as dist

    errors = []
    for what, wrong, call in _blocking():
        with pytest.raises(CollectiveMismatchError) as caught:
            call(dist.get_rank() == 1)
        errors.append((what, wrong, str(caught.value)))
    x = torch.ones(3)
    with pytest.raises(CollectiveMismatchError) as caught:
        dist.all_to_all_single(x, x, [3], [1, 1, 1])
    dist.all_reduce(x)
    return errors, str(caught.value), x.tolist()


def test_every_disagreement_is_reported_with_both_calls():
    """A rank that differs in reduction, root or size is named to all, with both call sites, and they can go on."""
    done = run(_mistaken, 3)
    assert done.failure is None, str(done.failure)
    for errors, alone, total in done.results:
        assert alone == "all_to_all_single over 3 ranks sends 3 chunks and expects 1; both must be 3"
        assert total == [3.0] * 3
        for what, wrong, text in errors:
            first, *lines = text.splitlines()
            odd = "disagree" if what == "chunk shapes" else "rank 1 disagrees with ranks 0, 2"
            assert f"{odd} about the {what} of collective " in first, text
            assert any(line.startswith(f"  rank 1: dist.{wrong} at {__file__}:") for line in lines), text
            # Equal calls share a line; chunks differ on every rank, and the third rank may have joined before.
            assert len(lines) == 2 or (what == "chunk shapes" and len(lines) == 3), text
            assert all(f" at {__file__}:" in line for line in lines), text


def _agreeing():
    """Call collectives of every kind, one with uneven shards, and return their results."""
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as fc
    from torch.distributed.nn import functional as nn

    rank, world = dist.get_rank(), dist.group.WORLD
    sizes = [[1, 3, 2], [0, 2, 0], [4, 1, 1]]
    come = [row[rank] for row in sizes]
    x = (torch.arange(float(sum(sizes[rank]))) + 10 * rank).requires_grad_()
    exchange = fc.all_to_all_single
    if not torch._C._dispatch_has_kernel_for_dispatch_key("_c10d_functional::all_to_all_single", "Autograd"):
        exchange = fc.all_to_all_single_autograd  # in PyTorch 2.10, the other has no gradient
    exchanged = exchange(x, come, sizes[rank], world)
    (exchanged * (1 + rank)).sum().backward()
    y = torch.empty(sum(come))
    dist.all_to_all_single(y, x.detach(), come, sizes[rank])
    assert torch.equal(y, exchanged.detach())
    y = nn.all_to_all_single(torch.empty(sum(come)), x.detach(), come, sizes[rank])
    assert torch.equal(y, exchanged.detach())
    z = torch.arange(3.0) + rank
    total = torch.ones(2)
    dist.all_reduce(total) if rank else fc.all_reduce_inplace(total, "sum", world)
    dist.all_gather_into_tensor(torch.empty(9), z)
    if rank == 0:  # a tensor without data meets nobody
        fc.all_reduce(torch.empty(2, device="meta"), "sum", world)
    pair = dist.new_group([0, 2])
    dist.all_reduce(torch.ones(1), group=pair)  # has no effect on rank 1, which gets a warning
    return (
        exchanged.tolist(),
        x.grad.tolist(),
        fc.all_reduce(z, "max", world).tolist(),
        [part.tolist() for part in fc.all_reduce_coalesced([z, z[:1]], "sum", world)],
        named(fc, GATHER)(z[:1], 0, world).tolist(),
        named(fc, SCATTER)(z, "sum", 0, world).tolist(),
        fc.broadcast(z, 2, world).tolist(),
        nn.all_reduce(z).tolist(),
        total.tolist(),
    )


def test_calls_that_agree_work_as_before():
    """Uneven shards, gradients and every functional collective give the same results as without the check."""
    done = run(_agreeing, 3)
    assert done.failure is None, str(done.failure)
    sent = [[0.0, 1, 2, 3, 4, 5], [10.0, 11], [20.0, 21, 22, 23, 24, 25]]
    rows = [
        [*sent[0][:1], *sent[2][:4]],
        [*sent[0][1:4], *sent[1], *sent[2][4:5]],
        [*sent[0][4:], *sent[2][5:]],
    ]
    grads = [[1.0, 2, 2, 2, 3, 3], [2.0, 2], [1.0, 1, 1, 1, 2, 3]]
    for rank, result in enumerate(done.results):
        assert result == (
            rows[rank],
            grads[rank],
            [2, 3, 4],
            [[3, 6, 9], [3]],
            [0, 1, 2],
            [3.0 + 3 * rank],
            [2, 3, 4],
            [3, 6, 9],
            [3, 3],
        )


def _functional(kind):
    """Two ranks that disagree in a functional collective."""
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as fc

    rank, world = dist.get_rank(), dist.group.WORLD
    if kind == "reduction":
        return fc.all_reduce(torch.ones(2), "max" if rank else "sum", world).tolist()
    return fc.all_to_all_single(torch.ones(5), [2, 2] if rank else [2, 1], [1, 4] if rank else [2, 3], world).tolist()


@pytest.mark.parametrize(
    "kind, calls",
    [
        ("reduction", ("all_reduce(f32[2], SUM)", "all_reduce(f32[2], MAX)")),
        (
            "chunk shapes",
            (
                "all_to_all_single(f32[2] f32[3], expects f32[2] f32[1])",
                "all_to_all_single(f32[1] f32[4], expects f32[2] f32[2])",
            ),
        ),
    ],
)
def test_disagreeing_functional_collectives_are_reported(kind, calls):
    """Functional collectives that differ fail although nobody waits for them: a sum beside a maximum would be wrong."""
    failure = run(_functional, 2, (kind,)).failure
    assert isinstance(failure.__cause__, CollectiveMismatchError)
    text = str(failure)
    assert f"disagree about the {kind} of collective 0 of ranks (0, 1):" in text
    for rank, call in enumerate(calls):
        assert f"  rank {rank}: dist.{call} at {__file__}:" in text


def _outlived_inputs():
    """Start many functional collectives whose inputs nobody else holds, then wait for all of them."""
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as fc

    total = 0.0
    for start in range(10):
        gathered = [named(fc, GATHER)(torch.full((4,), float(start)), 0, dist.group.WORLD) for _ in range(30)]
        total += sum(x.sum().item() for x in gathered)
    return total


def test_functional_collectives_do_not_hold_the_interpreter_lock():
    """A functional collective starts without the interpreter lock: gloo's threads take it to free inputs.

    PyTorch's own crash of processes that start many of them is not a finding (transport/README.md): it is run again.
    """
    for _ in range(4):
        completed = run(_outlived_inputs, 2)
        if completed.failure is None or not re.search("died of SIG(SEGV|ABRT)", str(completed.failure)):
            break
    assert completed.failure is None, str(completed.failure)
    assert completed.results == [8 * 30 * sum(range(10))] * 2


def test_members_on_different_devices_disagree():
    """A tensor on a device of its own is part of the fingerprint of every form; on the CPU nothing is added."""
    import torch

    from hyper_parallel.transport.checks.torch_distributed import OPERATIONS
    from hyper_parallel.verify import simulate

    def on_rank():
        x, away = torch.ones(2), torch.ones(2, device="meta")
        return [
            (str(OPERATIONS["broadcast"]({"tensor": y, "src": 0, "group_src": None})),
             str(OPERATIONS["all_gather_coalesced"]({"input_tensor_list": [x, y]})),
             str(OPERATIONS["all_to_all"]({"input_tensor_list": [y, y], "output_tensor_list": [x, x]})))
            for y in (x, away)
        ]  # fmt: skip

    here, there = simulate(on_rank, 2, "torch")[0]
    assert here == (
        "dist.broadcast(f32[2], src=0)", "dist.all_gather_coalesced(f32, shapes=[[2], [2]])",
        "dist.all_to_all(f32[2] f32[2], expects f32[2] f32[2])",
    )  # fmt: skip
    assert there == (
        "dist.broadcast(f32[2], device=meta, src=0)", "dist.all_gather_coalesced(f32, shapes=[[2], [2]], device=meta)",
        "dist.all_to_all(f32[2] f32[2], expects f32[2] f32[2], device=meta)",
    )  # fmt: skip
