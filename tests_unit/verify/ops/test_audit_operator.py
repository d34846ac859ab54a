"""One operator on another library's distributed tensors: each kind of error is reported."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.dtensor.placements import Replicate
from hyper_parallel.core.shard import rules
from hyper_parallel.platform.select import use_platform
from hyper_parallel.transport.base import active_transport
from hyper_parallel.verify.ops.audit import WORLDS
from hyper_parallel.verify.ops.audit_operator import _MOST, _Auditor, _tuples

pytestmark = pytest.mark.platforms("torch")

rules.load()


def peer_class(fault):  # noqa: C901 - one small class with a fault at each method
    """Distributed tensors that never communicate: right on replicated operands, wrong in the way of ``fault``.

    Args:
        fault: ``raises``, ``refuses``, ``unwraps``, ``forgets`` (gradients), ``bares`` (gradients), ``waits`` (rank 0
            alone enters a collective), or nothing.
    """
    import torch

    class Peer:
        def __init__(self, world):
            self.world, self.leaves, peer = world, [], self

            class PeerTensor(torch.Tensor):
                placements = ("whole",)

                @classmethod
                def __torch_function__(cls, func, types, args=(), kwargs=None):
                    result = super().__torch_function__(func, types, args, kwargs)
                    return peer.spoiled(result) if getattr(func, "__name__", "") in ("relu", "relu_") else result

            self.tensor_class = PeerTensor

        def spoiled(self, result):
            if fault == "raises":
                raise KeyError("relu")
            if fault == "refuses":
                raise RuntimeError("relu has no sharding strategy")
            if fault == "waits" and active_transport().rank == 0:
                active_transport().all_gather_object(1, tuple(range(self.world)))
            return result.as_subclass(torch.Tensor) if fault == "unwraps" else result

        def wrap(self, shard, *_, differentiated=False):
            wrapped = torch.from_numpy(shard.copy()).as_subclass(self.tensor_class)
            if differentiated:
                self.leaves.append(wrapped.requires_grad_())
            return wrapped

        def is_wrapped(self, value):
            return isinstance(value, self.tensor_class)

        def whole(self, tensor):
            return tensor.detach().numpy()

        def backward(self, outs, seeds):
            torch.autograd.backward(
                [out for out in outs if out.requires_grad], [seed for seed in seeds if seed is not None]
            )
            for leaf in self.leaves:
                if leaf.grad is not None and fault == "forgets":
                    leaf.grad = None
                elif leaf.grad is not None and fault != "bares":
                    leaf.grad = leaf.grad.as_subclass(self.tensor_class)

    return Peer


def audited(fault):
    """Return the audit of relu on such tensors."""
    with use_platform("torch"):
        auditor = _Auditor("torch-dtensor", "relu")
        auditor.peer = peer_class(fault)
        return auditor.run()


def test_a_shard_taken_for_the_global_tensor_is_wrong():
    """Replicated operands are right; a shard taken for the global tensor is wrong, with sample, sizes and place."""
    report = audited("")
    assert report.counts["ok"] > 0
    assert set(report.counts) == {"ok", "wrong"}
    (finding,) = report.findings
    assert finding.text.startswith("output of relu, sample 0 {")
    assert "on 2 ranks [Shard(0)]: output 0 ['whole'] has shape [" in finding.text
    # The call alone, then after the one before it.
    assert [program.count(".relu(") for program in finding.programs] == [1, 2]


@pytest.mark.parametrize(
    "fault, outcome, text",
    [
        ("raises", "crash", "KeyError: 'relu'"),
        ("unwraps", "plain", "a result is a plain tensor"),
        ("forgets", "wrong", "gradient of operand 0 is None"),
        ("bares", "plain", "gradient of operand 0 is a plain tensor"),
    ],
)
def test_each_kind_of_error_is_reported(fault, outcome, text):
    """An exception, a plain result, a missing gradient and a plain gradient are each reported as such."""
    report = audited(fault)
    assert report.counts[outcome] > 0
    assert any(finding.kind == outcome and f"[Replicate()]: {text}" in finding.text for finding in report.findings)


def test_a_refusal_is_no_fault():
    """A refusal without a sharding strategy is counted, and is not a finding."""
    report = audited("refuses")
    assert (set(report.counts), report.findings, report.holds) == ({"rejects"}, [], True)


def test_ranks_that_disagree_are_a_crash_of_one_placement():
    """A rank that enters a collective alone ends the world; the check counts as a crash, and the next one is made."""
    report = audited("waits")
    assert set(report.counts) == {"crash"}
    cases = sum(report.spellings.values())
    assert sum(report.counts.values()) + sum(report.skipped.values()) > cases * len(WORLDS)
    assert "CollectiveMismatchError" in report.findings[0].text


def test_placements_are_sampled_where_there_are_too_many():
    """Three matrices have 64 tuples of placements: a limited number is sampled, in order, repeatably and distinct."""
    arrays = [np.ones((2, 3))] * 3
    drawn = list(_tuples(arrays, 7))
    assert len(set(drawn)) == len(drawn) == _MOST
    assert drawn == list(_tuples(arrays, 7))
    assert list(_tuples([np.ones((), np.int64)], 7)) == [(Replicate(),)]


def test_an_operator_without_a_public_spelling_is_exempt():
    """What PyTorch does not offer to users is not a part of the audit, and says so."""
    with use_platform("torch"):
        report = _Auditor("torch-dtensor", "statistics_norm").run()
    assert (report.outcome, report.exempt) == ("exempt", "no public spelling of its own: its users are audited")
