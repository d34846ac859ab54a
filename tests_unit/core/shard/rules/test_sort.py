"""Sorting, searching, counting, and results whose size depends on values."""

import numpy as np
import pytest
import torch

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import record_events
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard

pytestmark = pytest.mark.platforms("torch")

TIES = np.array([[2, 1, 2, -1, 0], [0, 0, 3, 1, 3], [5, 4, 1, 4, 1]])
EDGES = np.array([-1.0, -0.25, 0.0, 0.5, 1.5])

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
    """Values, places and gradients of what was put in order do not depend on layouts."""
    holds(*ORDERS[name])


SEARCHES = {
    "bucketize": (lambda x, e: torch.bucketize(x, e.detach()), (3, 4), EDGES),
    "searchsorted": (lambda e, x: torch.searchsorted(e.detach(), x.detach(), right=True), EDGES, (3, 4)),
    "rows": (lambda e, x: torch.searchsorted(e.sort(-1)[0].detach(), x.detach(), side="left"), (3, 5), (3, 4)),
    "by a sorter": (lambda e, x: torch.searchsorted(e, x, sorter=e.argsort()), (5,), (3, 4)),
    "isin": (torch.isin, (4, (3, 5)), (4, (2,))),
}  # fmt: skip


@pytest.mark.parametrize("name", SEARCHES)
def test_searches(holds, name):
    """Places of values of any layout in an order of any layout."""
    holds(*SEARCHES[name])


COUNTS = {
    "unique": (torch.unique, (4, (3, 5))),
    "unique with places": (lambda x: x.unique(return_inverse=True, return_counts=True), (4, (3, 5))),
    "unique rows": (lambda x: torch.unique(x, dim=0), (2, (7, 2))),
    "unique_consecutive": (lambda x: torch.unique_consecutive(x, return_counts=True), (2, (9,))),
    "bincount": (lambda x: x.bincount(minlength=3), (6, (7,))),
    "weighted bincount": (lambda x, w: torch.bincount(x, w.detach()), (6, (7,)), (7,)),
    "histc": (lambda x: torch.histc(x, 5, -1, 1), (3, 5)),
    "histc of its own bounds": (lambda x: x.histc(4), (3, 5)),
    "histogram": (lambda x: torch.histogram(x.detach(), 4, range=(-1.0, 1.0)), (3, 5)),
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
    """What is counted is counted in the whole, and every rank gets results of the same size."""
    holds(*COUNTS[name])


def test_sorting_along_a_whole_dim_costs_nothing(ranks):
    """Rows in order where they are."""

    def run(mesh):
        x = DTensor.from_local(torch.arange(10.0).reshape(2, 5), mesh, [Shard(0)])
        with record_events() as events:
            values, places = torch.sort(x, descending=True)
        return len(events), values.placements, places.placements

    assert ranks(2, run) == [(0, (Shard(0),), (Shard(0),))] * 2


def test_a_histogram_between_bounds_adds_up(ranks):
    """Each rank counts what it holds; the sum is left pending."""

    def run(mesh):
        x = DTensor.from_local(torch.tensor([0.1, 0.6]), mesh, [Shard(0)])
        with record_events() as events:
            found = torch.histc(x, 2, 0, 1)
        return len(events), found.placements, found.full_tensor().tolist()

    assert ranks(3, run) == [(0, (Partial("sum"),), [3.0, 3.0])] * 3


def test_results_of_unknown_size_are_whole(ranks):
    """They keep the type in which PyTorch returns them."""

    def run(mesh):
        x = DTensor.from_local(torch.tensor([3, 1, 3]), mesh, [Shard(0)])
        values, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
        return values.tolist(), tuple(inverse.shape), counts.tolist(), values.placements

    assert ranks(2, run) == [([1, 3], (6,), [2, 4], (Replicate(),))] * 2
