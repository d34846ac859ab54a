"""Messages of torch.distributed between checked ranks: over real processes."""

import importlib.util
import sys
from pathlib import Path

import pytest

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.transport.real.launched_processes import run_launched
from hyper_parallel.transport.serialization import pack

pytestmark = pytest.mark.platforms("torch")


def run(fn, world_size, args=()):
    """Return the outcome of a function on a warm world."""
    return run_launched(pack((fn, args), fn), world_size, "torch", 120.0)


def results(fn, world_size, args=()):
    """Return the results of a function that does not fail."""
    done = run(fn, world_size, args)
    assert done.failure is None, str(done.failure)
    return done.results


@pytest.fixture(scope="module")
def mismatches():
    """The module that makes random mistakes; ranks import it under the same name."""
    path = Path(__file__).with_name("random_mismatches.py")
    spec = importlib.util.spec_from_file_location("random_mismatches", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(path.parent))
        del sys.modules[spec.name]


@pytest.mark.fault
@pytest.mark.parametrize("size, first", [(2, 0), (3, 70), (4, 140)])
def test_random_mistakes_are_told_with_both_calls(mismatches, size, first):
    """Of 200 mistakes in collectives and messages, each is an error with the ranks, the difference and both lines."""
    seeds = range(first, first + (60 if first == 140 else 70))
    told = results(mismatches.make_mistakes, size, (seeds,))
    lacks = {seed: mismatches.problems(case) for seed, *case in zip(seeds, *told, strict=True)}
    assert not {seed: lack for seed, lack in lacks.items() if lack}
    for case in zip(*told, strict=True):
        assert any(text for text, *_ in case)


def _ring(rank, size, make):
    """Everybody starts to send first, then receives."""
    import torch
    import torch.distributed as dist

    room = make(size)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, make(rank), (rank + 1) % size), dist.P2POp(dist.irecv, room, (rank - 1) % size)]
    )
    for work in reversed(works):
        work.wait()
    return torch.equal(room, make((rank - 1) % size))


def _pipeline(rank, size, make):
    """Microbatches go through all ranks, and their results back."""
    import torch
    import torch.distributed as dist

    x = torch.zeros(make(0).numel())
    for _ in range(3):
        if rank:
            dist.recv(x, rank - 1)
        x = x + 1
        if rank < size - 1:
            dist.send(x, rank + 1)
            dist.recv(x, group_src=rank + 1)
        if rank:
            dist.send(x, group_dst=rank - 1)
    return torch.equal(x, torch.full_like(x, 3.0 * size))


def _any_source(rank, size, make):
    """Rank 0 receives from anybody, by the time of arrival, and from each rank, with another tag, by polling."""
    import torch
    import torch.distributed as dist

    if rank:
        works = [dist.isend(make(rank), 0, tag=tag) for tag in (7, 3)]
        return all(work.wait() and work.is_completed() and work.is_success() for work in works)
    rooms = [make(0) for _ in range(1, size)]
    named = [dist.irecv(room, peer, tag=3) for peer, room in enumerate(rooms, 1)]
    sources = {dist.recv(make(0), tag=7) for _ in named}
    for work, room in zip(named, rooms, strict=True):
        while not work.is_completed():
            pass
        assert work.result()[0] is room
    same = all(torch.equal(room, make(peer)) for peer, room in enumerate(rooms, 1))
    return same and sources == set(range(1, size))


def _out_of_order(rank, size, make):
    """Ranks 0 and 1 send against the order of their receives, which were started before; then objects."""
    import torch
    import torch.distributed as dist

    if rank > 1:
        return True
    peer, rooms = 1 - rank, [torch.empty(2), torch.empty(3)]
    receives = [dist.irecv(room, peer, tag=tag) for tag, room in enumerate(rooms)]
    dist.send(torch.full((3,), 3.0 + rank), peer, tag=1)
    dist.send(torch.full((2,), 2.0 + rank), peer, tag=0)
    for work in reversed(receives):
        work.wait()
    objects, come = [{"size": size}, make(0).tolist()], [None, None]
    if rank:
        dist.recv_object_list(come, 0)
    else:
        dist.send_object_list(objects, 1)
    return [room[0].item() for room in rooms] == [2.0 + peer, 3.0 + peer] and come == (objects if rank else come)


def _groups(rank, size, make):
    """A message in a group and one outside of it, between the same ranks, are received in the other order."""
    import torch
    import torch.distributed as dist

    group = dist.new_group([0, size - 1])
    if rank not in (0, size - 1):
        return True
    if rank:
        inside = dist.isend(make(1), group=group, group_dst=0)
        dist.send(make(2), 0)
        return inside.wait()
    rooms = [make(0), make(0)]
    sources = [dist.recv(rooms[1], size - 1), dist.recv(rooms[0], size - 1, group)]
    return all(torch.equal(room, make(value)) for value, room in enumerate(rooms, 1)) and sources == [size - 1] * 2


def _correct(shapes):
    """Every correct program with tensors of each shape, in every dtype."""
    import torch
    import torch.distributed as dist

    right = []
    for shape in shapes:
        for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64):

            def make(value, shape=shape, dtype=dtype):
                return torch.full(shape, value % 2 if dtype == torch.bool else value).to(dtype)

            programs = (_ring, _pipeline, _any_source, _out_of_order, _groups)
            right += [(program.__name__, program(dist.get_rank(), dist.get_world_size(), make)) for program in programs]
    return right


@pytest.mark.parametrize("size", [2, 3, 4])
def test_correct_programs_raise_no_alarm(size):
    """Rings, pipelines, any source, tags out of order, objects, groups and polling work as without the check."""
    for right in results(_correct, size, ([(), (0, 2), (3, 1, 2)],)):
        assert len(right) == 75
        assert [name for name, equal in right if equal is not True] == []


def test_a_group_is_told_from_the_world():
    """A message in a group of all ranks and a receive outside of it do not meet, which is reported with both calls."""
    text = str(run(_crossed, 2).failure)
    assert "no rank can go on; ranks 1 and 0 disagree about the group of a message:" in text
    assert text.count(f" at {__file__}:") == 2


def _crossed():
    """Send in a group of the same ranks what is received outside of it."""
    import torch
    import torch.distributed as dist

    group = dist.new_group([0, 1])
    if dist.get_rank():
        dist.send(torch.ones(2), 0, group=group)
    else:
        dist.recv(torch.ones(2), 1)


def test_refused_calls_are_refused_as_before():
    """Arguments that PyTorch or gloo refuses raise their errors, and nobody is told of a message."""

    def body():
        import torch
        import torch.distributed as dist

        errors, peer = [], 1 - dist.get_rank()
        calls = [
            lambda: dist.isend(torch.ones(2, 3).t(), peer),
            lambda: dist.send(torch.ones(2), dist.get_rank()),
            lambda: dist.isend(torch.ones(2), 7),
            lambda: dist.isend(torch.ones(2), group_dst=7),
            lambda: dist.isend(torch.ones(2), peer, group_dst=peer),
            lambda: dist.isend(torch.ones(2)),
            lambda: dist.isend([1], peer),
            lambda: dist.irecv(torch.ones(2), peer, tag=-1),
        ]
        for call in calls:
            with pytest.raises((RuntimeError, ValueError, TypeError, CollectiveMismatchError)) as caught:
                call()
            errors.append(str(caught.value))
        alone = dist.new_group([0])
        return errors, dist.get_rank() == 0 or dist.recv(torch.ones(1), 0, group=alone)

    for rank, (errors, outside) in enumerate(results(body, 2)):
        assert outside == (True if rank == 0 else -1)
        assert errors[2:4] == [
            f"isend on rank {rank} names rank 7; the ranks of its group are [0, 1]",
            f"isend on rank {rank} names group rank 7; the ranks of its group are [0, 1]",
        ]
        assert [error for error in errors if "deadlock" in error or "disagree" in error] == []


def test_a_message_that_nobody_waits_for_is_still_compared():
    """Ranks that drop their handles are told after the run: of a mismatch, and of a message without receiver."""

    def body(received):
        import torch
        import torch.distributed as dist

        if dist.get_rank() == 0:
            dist.isend(torch.ones(2), 1)
        elif received:
            dist.irecv(torch.ones(3), 0)

    text = str(run(body, 2, (True,)).failure)
    first, *lines = text.splitlines()
    assert first == "ranks 0 and 1 disagree about the shape of a message:"
    begins = [line.split(" at ")[0] for line in lines]
    assert begins == ["  rank 0: send(f32[2], dst=1, tag=0)", "  rank 1: recv(f32[3], src=0, tag=0)"]
    lost = str(run(body, 2, (False,)).failure).splitlines()
    assert lost[0] == "messages were lost:"
    assert lost[1].startswith(f"  rank 0: send(f32[2], dst=1, tag=0) was never received; sent at {__file__}:")


def test_sides_agree_about_the_number_of_elements():
    """A receive over gloo takes as many elements as were sent, in its own shape: pipelines send [] into [1]."""

    def body():
        import torch
        import torch.distributed as dist

        taken = [torch.zeros(1), torch.zeros(3, 2)]
        for sent, x in zip([torch.tensor(7.0), torch.arange(6.0)], taken, strict=True):
            dist.send(sent, 1) if dist.get_rank() == 0 else dist.recv(x, 0)
        return [x.tolist() for x in taken]

    assert results(body, 2)[1] == [[7.0], [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]]
