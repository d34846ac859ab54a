"""Members that disagree about what they start, over gloo in real processes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.platform.contract.agreement import (
    LABEL,
    Statement,
    Transfer,
    claim,
    claimed,
    compare,
    label,
    started,
    text_of,
)
from hyper_parallel.platform.select import platform_named
from hyper_parallel.pytest_plugin.ranks import require_transport
from hyper_parallel.verify.launch import launch


def _told(platform_name):
    """What a started collective of unequal parts says, which of the ranks may have more, and a sum afterwards."""
    platform = platform_named(platform_name)
    me, found = platform.get_rank(), []
    for larger in (0, 1):
        x = platform.from_numpy(np.ones((9000 if me == larger else 2, 2), np.float32))
        for start in (
            lambda x: platform.all_reduce(x, None, True)[1].wait(),
            lambda x: platform.broadcast(x, 1, None, True)[1].wait(),
            lambda x: platform.tensor_to_numpy(platform.differentiable_all_to_all_single_async(x)),
            lambda x: (platform.all_gather_into_tensor if me else platform.all_reduce)(x, None, True)[1].wait(),
        ):
            with pytest.raises(CollectiveMismatchError) as caught:
                start(x)
            found.append(str(caught.value))
    output, handle = platform.all_reduce(platform.from_numpy(np.arange(3.0) + me), None, True)
    handle.wait()
    return found, platform.tensor_to_numpy(output).tolist()


def test_started_apart_is_told_on_every_rank(platform_name):
    """Gloo ends nobody's process: every member learns, while it waits, what each was about to do, and goes on."""
    require_transport(platform_name)
    routed = "differentiable_all_to_all_single_async: rank 0 sends {} rows to rank 1, which expects {}"
    wanted = []
    for first, second, sent, expected in (("[9000, 2]", "[2, 2]", 4500, 1), ("[2, 2]", "[9000, 2]", 1, 4500)):
        pairs = [
            ("all_reduce(f32{}, sum)", "all_reduce(f32{}, sum)"),
            ("broadcast(f32{}, src=1)", "broadcast(f32{}, src=1)"),
            ("all_reduce(f32{}, sum)", "all_gather_into_tensor(f32{})"),
        ]
        told = [
            f"members of the group [0, 1] do different things:\n  rank 0: {one.format(first)}\n"
            f"  rank 1: {other.format(second)}"
            for one, other in pairs
        ]
        wanted += [*told[:2], routed.format(sent, expected), told[2]]
    assert launch(_told, 2, platform_name, (platform_name,)) == [(wanted, [1.0, 3.0, 5.0])] * 2


LARGE = 20_000
"""Elements that a blocking all-reduce takes in two steps, and a started one in one."""


def _forms(platform_name):
    """Per member: what the forms give where ranks take turns in blocking, and whether it is what it must be."""
    platform = platform_named(platform_name)
    me, size = platform.get_rank(), platform.get_world_size()
    parts = [np.arange(size * 4.0, dtype=np.float32).reshape(2 * size, 2) * (rank + 1) for rank in range(size)]
    x, total = platform.from_numpy(parts[me].copy()), sum(parts)
    large = np.arange(float(LARGE)) / 7
    sent = [rank + 1 for rank in range(size)]  # rows to each rank, from every rank
    rows = np.repeat(np.arange(float(size)), sent) + 10 * me
    checks = {
        "all_reduce": (lambda late: platform.all_reduce(x, None, late), total),
        "all_reduce of much": (
            lambda late: platform.all_reduce(platform.from_numpy(large * (me + 1)), None, late),
            sum(large * (rank + 1) for rank in range(size)),
        ),
        "all_gather": (lambda late: platform.all_gather_into_tensor(x, None, late), np.concatenate(parts)),
        "reduce_scatter": (lambda late: platform.reduce_scatter_tensor(x, None, late), total[2 * me : 2 * me + 2]),
        "broadcast": (lambda late: platform.broadcast(x, 1, None, late), parts[1]),
        "all_to_all": (
            lambda late: platform.all_to_all_single(x, (2 * size, 2), None, late)[: 2 if late else 1],
            np.concatenate([part[2 * me : 2 * me + 2] for part in parts]),
        ),
        "rows": (
            lambda late: getattr(platform, f"differentiable_all_to_all_single{'_async' if late else ''}")(
                platform.from_numpy(rows), sent, [me + 1] * size
            ),
            np.concatenate([np.full(me + 1, me + 10.0 * rank) for rank in range(size)]),
        ),
        "barrier": (lambda late: platform.barrier(None, late), None),
    }
    for name, (form, want) in checks.items():
        for turn in range(size + 1):
            found = form(late := me != turn)
            if late and name != "rows":
                found = (found if name == "barrier" else found[1]).wait()
            found = found[0] if name == "all_to_all" and not late else found
            if want is not None:
                np.testing.assert_array_equal(platform.tensor_to_numpy(found), want, err_msg=f"{name} {turn}")
    return True


def _apart(platform_name):
    """Rank by rank another collective, some blocking and some started: what is told, and a sum after each."""
    platform = platform_named(platform_name)
    me, size = platform.get_rank(), platform.get_world_size()

    def make(*shape):
        return platform.from_numpy(np.full(shape, 1.0, np.float32))

    def late(member, *given):
        def run():
            getattr(platform, member)(*given, None, True)[1].wait()

        return run

    def rows(form, *given):
        return lambda: platform.tensor_to_numpy(getattr(platform, f"differentiable_all_to_all_single{form}")(*given))

    much, little = make(9000 * size), make(size)
    uneven = (make(3), [2, 1] + [0] * (size - 2), [3] + [0] * (size - 1))
    programs = [
        (lambda: platform.all_reduce(much), late("all_reduce", little)),
        (lambda: platform.all_reduce(little), late("all_reduce", much)),
        (lambda: platform.differentiable_all_reduce(little), rows("_async", much)),
        (late("all_reduce", much), rows("_async", little)),
        (platform.barrier, late("broadcast", much, 0)),
        (lambda: platform.barrier(None, True).wait(), lambda: platform.all_gather_into_tensor(much)),
        (lambda: platform.all_gather_object([], me), lambda: platform.barrier(None, True).wait()),
        (lambda: platform.all_gather_object([], me), lambda: platform.all_reduce(much)),
        (rows("", *uneven), rows("_async", *uneven)),
    ]
    told = []
    for turn in range(size):
        for first, second in programs:
            with pytest.raises(CollectiveMismatchError) as caught:
                (first if me == turn else second)()
            told.append(str(caught.value))
            total = platform.tensor_to_numpy(platform.all_reduce(little)).tolist()
            assert total == [float(size)] * size
    return told


def _both(platform_name):
    return _forms(platform_name), _apart(platform_name)


def test_blocking_and_started_forms_meet_or_are_told_apart(platform_name):
    """Forms of one collective have one result, bit for bit; of different ones every rank is told, and all go on."""
    require_transport(platform_name)
    for world_size in (2, 3) if platform_name == "torch" else (3,):
        found = launch(_both, world_size, platform_name, (platform_name,), timeout=120)
        assert [met for met, _ in found] == [True] * world_size
        _compare([told for _, told in found], world_size)


def _compare(found, world_size):
    much, little = f"f32[{9000 * world_size}]", f"f32[{world_size}]"
    rows = "differentiable_all_to_all_single(rows of f32[])"
    pairs = [
        (f"all_reduce({much}, sum)", f"all_reduce({little}, sum)"),
        (f"all_reduce({little}, sum)", f"all_reduce({much}, sum)"),
        (f"differentiable_all_reduce({little}, sum)", rows),
        (f"all_reduce({much}, sum)", rows),
        ("barrier()", f"broadcast({much}, src=0)"),
        ("barrier()", f"all_gather_into_tensor({much})"),
        ("all_gather_object()", "barrier()"),
        ("all_gather_object()", f"all_reduce({much}, sum)"),
    ]
    everyone = list(range(world_size))
    for me, told in enumerate(found):
        wanted = []
        for turn in range(world_size):
            for first, second in pairs:
                lines = [f"  rank {rank}: {first if rank == turn else second}" for rank in range(world_size)]
                wanted.append("\n".join([f"members of the group {everyone} do different things:", *lines]))
            form = "" if me == turn else "_async"
            wanted.append(f"differentiable_all_to_all_single{form}: rank 0 sends 2 rows to rank 0, which expects 3")
        assert told == wanted


def test_a_statement_is_what_it_was_made_of():
    """It comes back from what travels; of a long one the label keeps the beginning and a checksum of all."""
    one = Statement(1, "all_reduce", "all_reduce", "float32", (2, 3), "sum")
    assert claimed(claim(one)) == one
    assert one.same(replace(one, place=0))
    assert not one.same(replace(one, fact="max"))
    assert one.transfer(3) == Transfer(1, (0, 0, 0), (0, 0, 0), "float32", ())
    assert not one.same(one.transfer(3))
    texts = ["é" * LABEL + end for end in "ab"]
    labels = [label(text, started=text.endswith("b")) for text in texts]
    assert [started(told) for told in labels] == [False, True]
    assert [len(told) for told in labels] == [LABEL] * 2
    assert text_of(labels[0])[:100] == text_of(labels[1])[:100] == "é" * 100
    with pytest.raises(CollectiveMismatchError, match="different things"):
        compare((0, 1), [text_of(told) for told in labels])
    compare((0, 1), [text_of(label("same"))] * 2)


def test_a_later_member_fits_the_earlier_ones():
    """It sends what they expect and expects what they send, in rows of the first one's kind; the rest is its own."""
    first, second = Transfer(2, (1, 2, 3), (4, 5, 6), "float32", (7,)), Transfer(0, (1, 1, 1), (2, 2, 2), "int8", ())
    assert claimed(claim(first)) == first
    assert first.transfer(3) == first
    assert first.after([]).received == (4, 5, 3)
    assert second.after([first]) == Transfer(0, (1, 1, 4), (1, 2, 1), "float32", (7,))
    third = Transfer(1, (9, 9, 9), (9, 9, 9), "int8", ())
    assert third.after([first, second]) == Transfer(1, (2, 9, 5), (1, 9, 2), "float32", (7,))
