"""Members that disagree about what they start, over gloo in real processes."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.platform.contract.agreement import LABEL, Statement, Transfer, compare, label, text_of
from hyper_parallel.platform.select import platform_named
from hyper_parallel.pytest_plugin.ranks import need_carrier
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
    need_carrier(platform_name)
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


def test_a_statement_is_what_it_was_made_of():
    """It comes back from what travels; of a long one the label keeps the beginning and a checksum of all."""
    one = Statement("all_reduce", "all_reduce", "float32", (2, 3), "sum")
    assert Statement.parsed(one.json) == one
    texts = ["é" * LABEL + end for end in "ab"]
    labels = [label(text) for text in texts]
    assert [len(told) for told in labels] == [LABEL] * 2
    assert text_of(labels[0])[:100] == text_of(labels[1])[:100] == "é" * 100
    with pytest.raises(CollectiveMismatchError, match="different things"):
        compare((0, 1), [text_of(told) for told in labels])
    compare((0, 1), [text_of(label("same"))] * 2)


def test_a_later_member_fits_the_earlier_ones():
    """It sends what they expect and expects what they send, in rows of the first one's kind; the rest is its own."""
    first, second = Transfer(2, (1, 2, 3), (4, 5, 6), "float32", (7,)), Transfer(0, (1, 1, 1), (2, 2, 2), "int8", ())
    assert Transfer.parsed(first.json) == first
    assert second.after([]) == second
    assert second.after([first]) == Transfer(0, (1, 1, 4), (2, 2, 1), "float32", (7,))
    third = Transfer(1, (9, 9, 9), (9, 9, 9), "int8", ())
    assert third.after([first, second]) == Transfer(1, (2, 9, 5), (1, 9, 2), "float32", (7,))
