"""Sorting, and results whose size depends on values."""

import numpy as np
import pytest
import torch

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import record_events
from hyper_parallel.core.dtensor.placements import Replicate, Shard

pytestmark = pytest.mark.platforms("torch")


TIES = np.array([[2, 1, 2, -1, 0], [0, 0, 3, 1, 3], [5, 4, 1, 4, 1]])
ORDERS = {
    "sort": (torch.sort, (3, 5)),
    "sort first dim": (lambda x: x.sort(0, descending=True), (4, 3, 5)),
    "stable sort": (lambda x: torch.sort(x, stable=True, dim=0), TIES),
    "argsort": (lambda x: x.argsort(stable=True), TIES),
    "msort": (torch.msort, (5, 3)),
    "topk": (lambda x: torch.topk(x, 3), (4, 7)),
    "smallest": (lambda x: x.topk(2, dim=0, largest=False), (5, 4)),
    "kthvalue": (lambda x: torch.kthvalue(x, 2), (4, 5)),
    "kthvalue kept": (lambda x: x.kthvalue(3, dim=0, keepdim=True), (4, 5)),
    "quantile": (lambda x: torch.quantile(x, 0.3, dim=1), (4, 5)),
    "quantile of all": (lambda x: x.quantile(0.5, interpolation="lower"), (4, 5)),
    "quantiles": (lambda x, q: torch.quantile(x, q.detach(), 0, keepdim=True), (4, 5), np.array([0.1, 0.5, 0.9])),
    "nanquantile": (lambda x: x.nanquantile(0.7, dim=-1, keepdim=True), (4, 5)),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_order(holds, name):
    """Values, indices and gradients of sorted tensors do not depend on layouts."""
    holds(*ORDERS[name])


COUNTS = {
    "unique": (torch.unique, (4, (3, 5))),
    "unique with places": (lambda x: x.unique(return_inverse=True, return_counts=True), (4, (3, 5))),
    "unique rows": (lambda x: torch.unique(x, dim=0), (2, (7, 2))),
    "unique_consecutive": (lambda x: torch.unique_consecutive(x, return_counts=True), (2, (9,))),
    "argwhere": (torch.argwhere, (2, (3, 4))),
    "nonzero_static": (lambda x: torch.nonzero_static(x, size=9), (2, (3, 4))),
    "repeats": (lambda x, n: torch.repeat_interleave(x, n, dim=1), (3, 4), (3, (4,))),
    "repeats of all": (lambda x, n: x.repeat_interleave(n), (3, 4), (3, (12,))),
    "one tensor of repeats": (lambda x, n: torch.repeat_interleave(x, n, 0), (3, 4), np.array([2])),
    "counts": (torch.repeat_interleave, (3, (5,))),
    "combinations": (lambda x: torch.combinations(x, 2), (5,)),
    "tensor_split": (lambda x, i: torch.tensor_split(x, i, 1), (3, 5), np.array([1, 3])),
    "narrow": (lambda x, i: x.narrow(0, i.sum(), 2), (5, 3), np.array([1, 1])),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_counts(holds, name):
    """Counts are of the global tensor, and every rank gets results of the same size."""
    holds(*COUNTS[name])


def test_sorting_along_a_whole_dim_costs_nothing(ranks):
    """Sorting along a whole dim communicates nothing."""

    def run(mesh):
        x = DTensor.from_local(torch.arange(10.0).reshape(2, 5), mesh, [Shard(0)])
        with record_events() as events:
            values, indices = torch.sort(x, descending=True)
        return len(events), values.placements, indices.placements

    assert ranks(2, run) == [(0, (Shard(0),), (Shard(0),))] * 2


def test_results_of_unknown_size_are_whole(ranks):
    """Results whose size depends on values are replicated and of PyTorch's return type."""

    def run(mesh):
        x = DTensor.from_local(torch.tensor([3, 1, 3]), mesh, [Shard(0)])
        values, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
        return values.tolist(), tuple(inverse.shape), counts.tolist(), values.placements

    assert ranks(2, run) == [([1, 3], (6,), [2, 4], (Replicate(),))] * 2


OUT = {
    "sort": lambda x, out: torch.sort(x, out=out),
    "topk": lambda x, out: torch.topk(x, 4, out=out),
}


@pytest.mark.parametrize("name", OUT)
def test_out_of_several(ranks, name):
    """out= of several results redistributes them to the layouts of the given tensors, which are returned."""

    def run(mesh):
        whole = torch.tensor([[3.0, 1.0, 2.0, 0.0]] * 4) + torch.arange(4.0)[:, None]
        x = DTensor.from_local(whole.chunk(2)[mesh.coordinate[0]], mesh, [Shard(0)])
        values = DTensor.from_local(torch.zeros(4, 4), mesh)
        indices = DTensor.from_local(torch.zeros(4, 2, dtype=torch.int64), mesh, [Shard(1)])
        returned = OUT[name](x, (values, indices))
        wanted = OUT[name](whole, None)
        return (
            returned[0] is values and returned[1] is indices,
            torch.equal(values.to_local(), wanted[0]),
            torch.equal(indices.full_tensor(), wanted[1]),
        )

    assert ranks(2, run) == [(True, True, True)] * 2
