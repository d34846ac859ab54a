"""One operator on somebody else's distributed tensors: what is told of each way to be wrong."""

from __future__ import annotations

import pytest

from hyper_parallel.core.dtensor.placements import Replicate
from hyper_parallel.core.shard import rules
from hyper_parallel.platform.select import use_platform
from hyper_parallel.verify.ops.audit import _MOST, _Audit, _tuples

pytestmark = pytest.mark.platforms("torch")

rules.load()


class Peer:
    """Distributed tensors that never talk: right where every operand is whole, wrong in one way of their own.

    Args:
        fault: ``raises``, ``refuses``, ``unwraps``, ``forgets`` (gradients), ``bares`` (gradients), or nothing.
    """

    def __init__(self, fault=""):
        import torch

        peer = self

        class Held(torch.Tensor):
            placements = ("whole",)

            @classmethod
            def __torch_function__(cls, func, types, args=(), kwargs=None):
                if func is torch.relu and peer.fault == "raises":
                    raise KeyError("relu")
                if func is torch.relu and peer.fault == "refuses":
                    raise RuntimeError("relu has no sharding strategy")
                found = super().__torch_function__(func, types, args, kwargs)
                return found.as_subclass(torch.Tensor) if func is torch.relu and peer.fault == "unwraps" else found

        self.fault, self.held, self.leaves = fault, Held, []

    def wrap(self, piece, *_, differentiated=False):
        """What it takes for the whole; only whole operands are."""
        import torch

        made = torch.from_numpy(piece.copy()).as_subclass(self.held)
        if differentiated:
            self.leaves.append(made.requires_grad_())
        return made

    def is_wrapped(self, one):
        """Whether it is one of ours."""
        return isinstance(one, self.held)

    def whole(self, one):
        """What it takes for the whole."""
        return one.detach().numpy()

    def backward(self, outs, seeds):
        """Gradients of the leaves."""
        import torch

        torch.autograd.backward([one for one in outs if one.requires_grad], [one for one in seeds if one is not None])
        for leaf in self.leaves:
            if leaf.grad is not None and self.fault == "forgets":
                leaf.grad = None
            elif leaf.grad is not None and self.fault != "bares":
                leaf.grad = leaf.grad.as_subclass(self.held)

    def gathered(self, own):
        """What each rank saw."""
        return [own, ("ok", "", ("", 0))]

    def call(self, *given):
        """A call as it is written in a program; here, where it held what."""
        return given[-1]

    def program(self, call, _seeds, gradient, index, _right, before):
        """A program that shows a wrong value; here, which one."""
        return f"{'gradient' if gradient else 'output'} {index} of {call} after {before}"


def audited(fault):
    """Counts, what is shown first, and the programs that may show it."""
    with use_platform("torch"):
        return _Audit("relu", Peer(fault), 0).run()


def test_pieces_taken_for_the_whole_are_wrong():
    """What is whole is right, and what the worst rank saw of a piece is told with the sample, the sizes and where."""
    counts, (shown,), programs = audited("")
    assert counts["ok"] > 0
    assert set(counts) == {"ok", "wrong"}
    assert shown.startswith("wrong: sample 0 {")
    assert "[Shard(0)]: output 0 ['whole'] has shape [" in shown
    assert programs[:2] == ["output 0 of (Shard(0),) after None", "output 0 of (Shard(0),) after (Replicate(),)"]


@pytest.mark.parametrize(
    "fault, outcome, text",
    [
        ("raises", "crash", "KeyError: 'relu'"),
        ("unwraps", "plain", "a result is a plain tensor"),
        ("forgets", "wrong", "gradient of operand 0 is none"),
        ("bares", "plain", "gradient of operand 0 is a plain tensor"),
    ],
)
def test_each_way_to_be_wrong_is_told(fault, outcome, text):
    """An exception, a plain result, a gradient that is missing and one that is plain, where all else is right."""
    counts, shown, _ = audited(fault)
    assert counts[outcome] > 0
    (said,) = [one for one in shown if one.startswith(f"{outcome}: ") and "[Replicate()]" in one]
    assert said.endswith(text)


def test_a_refusal_is_no_fault():
    """What says that it has no strategy is counted, and not shown."""
    counts, shown, programs = audited("refuses")
    assert (set(counts), shown, programs) == ({"rejects"}, [], [])


def test_placements_are_drawn_where_there_are_too_many():
    """Of three matrices there are 64 tuples: as many as are tried are drawn, in order, and each draw is repeatable."""
    import numpy as np

    arrays = [np.ones((2, 3))] * 3
    drawn = list(_tuples(arrays, 7))
    assert len(set(drawn)) == len(drawn) == _MOST
    assert drawn == list(_tuples(arrays, 7))
    assert list(_tuples([np.ones((), np.int64)], 7)) == [(Replicate(),)]
