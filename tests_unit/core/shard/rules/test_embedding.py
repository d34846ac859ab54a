"""Embeddings and bags of them on PyTorch."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import distribute_tensor
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import record_events
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.errors import LayoutError

pytestmark = pytest.mark.platforms("torch")


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7])
def test_embedding(holds, rows):
    """Tables sharded along either dim, unevenly or with empty shards, give the plain vectors and gradients."""
    holds(F.embedding, (rows, (4, 3)), (rows, 5))


@pytest.mark.parametrize("padding", [3, -1])
def test_padding_row_gets_no_gradient(holds, padding):
    """`padding_idx` counts rows of the whole table, wherever the row lives."""
    holds(lambda ids, table: F.embedding(ids, table, padding), (5, (4, 3)), (5, 6))


def test_a_sharded_vocabulary_costs_one_reduction(ranks):
    """Looking up in a table sharded along the vocabulary gives partial sums and gathers nothing."""

    def run(mesh):
        table = DTensor.from_local(torch.ones(3, 4, requires_grad=True), mesh, [Shard(0)])
        ids = DTensor.from_local(torch.tensor([0, 5, 2]), mesh, [Replicate()])
        with record_events() as log:
            result = F.embedding(ids, table)
            before = result.placements
            result.redistribute(placements=[Replicate()]).sum().backward()
        return before, log.collectives("forward"), log.collectives("backward")

    assert ranks(2, run) == [((Partial("sum"),), ["all_reduce"], [])] * 2


def test_a_class_that_does_not_exist_is_an_error(ranks):
    """An index outside the table is an error although no rank holds it, not a row of zeros."""

    def run(mesh):
        table = DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0)])
        ids = DTensor.from_local(torch.tensor([0, 6, 2]), mesh, [Replicate()])
        with pytest.raises(IndexError) as caught:
            F.embedding(ids, table)
        return str(caught.value)

    assert ranks(2, run)[0] == "index out of range: indices are 0 to 6, the dim has size 6"


def test_sparse_gradients_need_all_ids_on_every_rank(ranks):
    """A sparse gradient is not summed over ranks, so sharded ids are refused; bags need the whole table."""

    def run(mesh):
        table = DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0)])
        ids = DTensor.from_local(torch.tensor([[0, 5, 2]]), mesh, [Shard(0)])
        texts = []
        for function in (F.embedding, F.embedding_bag):
            with pytest.raises(LayoutError) as caught:
                function(ids, table, sparse=True)
            texts.append(str(caught.value))
        return texts

    assert ranks(2, run)[0] == [
        (
            "embedding(x=i64[2@tp, 3], weight=f32[6@tp, 4]): a sparse gradient is not summed over ranks, so every rank "
            "needs all ids: x = x.redistribute()"
        ),
        (
            "embedding_bag(x=i64[2@tp, 3], weight=f32[6@tp, 4]): sparse needs the complete table, so the operands must "
            "be replicated: x = x.redistribute(); weight = weight.redistribute()"
        ),
    ]


FEW = {(2,): 8, (3,): 4, (4,): 3, (2, 2): 3}
RNG = np.random.default_rng(5)
IDS = RNG.integers(0, 7, (5, 3))
LINE = RNG.integers(0, 7, 9)
BAGS = {
    **{
        mode: (lambda ids, table, mode=mode: F.embedding_bag(ids, table, mode=mode), IDS, (7, 4))
        for mode in ("sum", "mean", "max")
    },
    "weighted": (lambda i, w, s: F.embedding_bag(i, w, mode="sum", per_sample_weights=s), IDS, (7, 4), (5, 3)),
    "padded": (lambda i, w: F.embedding_bag(i, w, padding_idx=2), IDS, (7, 4)),
    "offsets": (lambda i, w, o: F.embedding_bag(i, w, o, mode="max"), LINE, (7, 4), np.array([0, 2, 2, 5])),
    "last offset": (
        lambda i, w, o: F.embedding_bag(i, w, o, mode="sum", include_last_offset=True),
        LINE, (7, 4), np.array([0, 2, 9]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAGS)
def test_bags(holds, name):
    """Bags of ids may be sharded, and the width of the table."""
    holds(BAGS[name][0], *BAGS[name][1:], limits=FEW)


REFUSED = {
    "bags": (lambda ids, x: F.embedding_bag(ids[:, 0], x), "bags are rows of a matrix, or a vector and offsets"),
    "renormalised bags": (
        lambda ids, x: F.embedding_bag(ids, x, max_norm=1.0),
        (
            "max_norm needs the complete table, so the operands must be replicated: "
            "x = x.redistribute(); weight = weight.redistribute()"
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(ranks, name):
    """Shapes that do not fit, and options that need the whole operand, are errors with the reason."""
    fn, words = REFUSED[name]

    def run(mesh):
        ids = distribute_tensor(torch.ones(4, 3, dtype=torch.int64), mesh, [Shard(0)])
        with pytest.raises(LayoutError) as caught:
            fn(ids, distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]))
        return str(caught.value)

    assert ranks(2, run)[0].endswith(words)


MISFITS = {
    "embedding": (
        F.embedding, (3, (4, 3)), (4,),
        "embedding(x=i64[4@tp, 3], weight=f64[4@tp]): weight has 1 dims, it must have 2",
    ),
    "padding_idx": (
        lambda i, w: F.embedding(i, w, padding_idx=7), (3, (4, 3)), (4, 2),
        "embedding(x=i64[4@tp, 3], weight=f64[4@tp, 2]): padding_idx 7 is out of range for a table of 4 rows",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_a_call_that_does_not_fit_is_refused(refuses, name):
    """A call that fails on one device fails on every rank with its reason, before anything moves."""
    refuses(*MISFITS[name])
