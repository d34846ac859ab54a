"""Bins, histograms and distances on PyTorch, by the call that a user writes."""

import numpy as np
import pytest
import torch

from hyper_parallel.core.dtensor.events import record_events
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Partial, Shard

pytestmark = pytest.mark.platforms("torch")

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
    holds(fn, *specs, drawn={(2,): 12, (3,): 6})


def test_a_histogram_of_a_given_range_moves_counts_only(ranks):
    """Shards count for themselves: what travels is the counts, and only when they are asked for."""

    def run(mesh):
        x = distribute_tensor(torch.linspace(-1, 1, 10), mesh, [Shard(0)])
        with record_events() as log:
            counts = torch.histc(x, 4, -1, 1)
        return counts.placements, log.collectives(), counts.full_tensor().tolist()

    assert ranks(3, run) == [((Partial("sum"),), [], [3.0, 2.0, 2.0, 3.0])] * 3


def test_distances_are_computed_the_way_one_device_does(ranks):
    """From 26 points on PyTorch multiplies matrices; a rank that holds fewer of them does as well."""

    def run(mesh):
        x = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
        found = torch.cdist(distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(x, mesh, [Shard(0)]))
        return float((found.full_tensor() - torch.cdist(x, x)).abs().max())

    assert max(ranks(3, run)) < 2e-3


def test_weighted_counts_of_an_empty_piece_are_weights(ranks):
    """A rank that holds nothing counts in the weights' dtype, where PyTorch itself counts in integers."""

    def run(mesh):
        x, weights = torch.tensor([1, 3]), torch.tensor([0.5, 2.25], dtype=torch.float64)
        found = torch.bincount(distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(weights, mesh, [Shard(0)]))
        return found.dtype is torch.float64, found.full_tensor().tolist()

    assert ranks(3, run) == [(True, [0.0, 0.5, 0.0, 2.25])] * 3
