"""Sorting, and results whose size depends on values."""

import numpy as np
import pytest
import torch

from hyper_parallel import distribute_tensor
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import record_events
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard

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


EDGES = np.array([-1.5, -0.5, 0.0, 0.75])
CALLS = [
    (torch.bucketize, [(5, 3), EDGES]),
    (lambda x, edges: torch.searchsorted(edges, x, side="right"), [(5, 3), EDGES]),
    (lambda x: torch.histc(x.detach(), 4, -1, 1), [(5, 3)]),
    (lambda x: torch.histc(x.detach(), 4), [(5, 3)]),
    (lambda x: torch.histogram(x.detach(), 4).hist, [(5, 3)]),
    (lambda x: torch.histogramdd(x.detach(), [2, 3]).hist, [(5, 2)]),
    (lambda x, edges: torch.histogram(x.detach(), edges.detach())[0], [(5, 3), EDGES]),
    (torch.isin, [(7, (5, 3)), (7, (4,))]),
    (torch.bincount, [(6, (7,))]),
    (lambda x: torch.bincount(x, minlength=9), [(6, (7,))]),
    (torch.cdist, [(2, 5, 3), (2, 4, 3)]),
    (lambda x, y: torch.cdist(x, y, p=1.0), [(5, 3), (4, 3)]),
    (lambda x, y: torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist"), [(26, 3), (4, 3)]),
]


@pytest.mark.parametrize("fn, specs", CALLS)
def test_values_are_found_among_whole_tables(holds, fn, specs):
    """Values, counts and distances are the plain ones, wherever values and tables stand."""
    holds(fn, *specs, limits={(2,): 12, (3,): 6})


BOUNDARIES = np.array([-1.0, -0.25, 0.0, 0.5, 1.5])
SEARCHES = {
    "bucketize": (lambda x, e: torch.bucketize(x, e.detach()), (3, 4), BOUNDARIES),
    "searchsorted": (lambda e, x: torch.searchsorted(e.detach(), x.detach(), right=True), BOUNDARIES, (3, 4)),
    "rows": (lambda e, x: torch.searchsorted(e.sort(-1)[0].detach(), x.detach(), side="left"), (3, 5), (3, 4)),
    "by a sorter": (lambda e, x: torch.searchsorted(e, x, sorter=e.argsort()), (5,), (3, 4)),
    "isin": (torch.isin, (4, (3, 5)), (4, (2,))),
}  # fmt: skip


@pytest.mark.parametrize("name", SEARCHES)
def test_searches(holds, name):
    """Searchsorted and bucketize give the plain places for every layout of values and boundaries."""
    holds(*SEARCHES[name])


HISTOGRAM_COUNTS = {
    "bincount": (lambda x: x.bincount(minlength=3), (6, (7,))),
    "weighted bincount": (lambda x, w: torch.bincount(x, w.detach()), (6, (7,)), (7,)),
    "histc": (lambda x: torch.histc(x, 5, -1, 1), (3, 5)),
    "histc of its own bounds": (lambda x: x.histc(4), (3, 5)),
    "histogram": (lambda x: torch.histogram(x.detach(), 4, range=(-1.0, 1.0)), (3, 5)),
}  # fmt: skip


def test_a_histogram_of_a_given_range_moves_counts_only(ranks):
    """A histogram of a given range communicates counts only, and only when they are read."""

    def run(mesh):
        x = distribute_tensor(torch.linspace(-1, 1, 10), mesh, [Shard(0)])
        with record_events() as log:
            counts = torch.histc(x, 4, -1, 1)
        return counts.placements, log.collectives(), counts.full_tensor().tolist()

    assert ranks(3, run) == [((Partial("sum"),), [], [3.0, 2.0, 2.0, 3.0])] * 3


def test_weighted_counts_of_an_empty_shard_are_weights(ranks):
    """Weighted counts of an empty shard have the weights' dtype, although PyTorch itself returns integers."""

    def run(mesh):
        x, weights = torch.tensor([1, 3]), torch.tensor([0.5, 2.25], dtype=torch.float64)
        result = torch.bincount(distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(weights, mesh, [Shard(0)]))
        return result.dtype is torch.float64, result.full_tensor().tolist()

    assert ranks(3, run) == [(True, [0.0, 0.5, 0.0, 2.25])] * 3


def test_a_histogram_between_bounds_adds_up(ranks):
    """Each rank counts its local values, and the result is a partial sum."""

    def run(mesh):
        x = DTensor.from_local(torch.tensor([0.1, 0.6]), mesh, [Shard(0)])
        with record_events() as events:
            result = torch.histc(x, 2, 0, 1)
        return len(events), result.placements, result.full_tensor().tolist()

    assert ranks(3, run) == [(0, (Partial("sum"),), [3.0, 3.0])] * 3


MISFITS = {
    "searchsorted": (
        torch.searchsorted, (4, 3), (3, 2),
        ("searchsorted(table=f64[4@tp, 3], x=f64[3@tp, 2]): table [4, 3] and x [3, 2] must agree in all dims but the "
        "last"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_a_call_that_does_not_fit_is_refused(refuses, name):
    """A call that fails on one device fails on every rank with its reason, before anything moves."""
    refuses(*MISFITS[name])


@pytest.mark.parametrize("name", HISTOGRAM_COUNTS)
def test_counts_of_histograms(holds, name):
    """Counts are of the global tensor, and every rank gets results of the same size."""
    holds(*HISTOGRAM_COUNTS[name])
