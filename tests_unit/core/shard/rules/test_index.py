"""Reading and writing by index, gathering, scattering and embedding."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import record_events
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.errors import LayoutError, UnsupportedOperatorError

pytestmark = pytest.mark.platforms("torch")


BASIC = {
    "number": lambda x: x[1],
    "last": lambda x: x[-1, ..., 2],
    "range": lambda x: x[1:3],
    "step": lambda x: x[:, ::2],
    "more than there is": lambda x: x[:100, None],
    "ellipsis": lambda x: x[..., 0],
    "None": lambda x: x[None, :, None],
    "list": lambda x: x[[0, 2, 2]],
    "list further in": lambda x: x[:, [0, 2]],
    "number and list": lambda x: x[1, :, [0, 2]],
}


@pytest.mark.parametrize("name", BASIC)
def test_basic_index(holds, name):
    """Numbers, slices with steps, None and Ellipsis read what they read of a plain tensor."""
    holds(BASIC[name], (4, 5, 6))


MASK = np.array([True, False, True, True, False])
BY_TENSOR = {
    "first": (lambda x, i: x[i], (4, 5, 6), (4, (3,))),
    "second": (lambda x, i: x[:, i], (4, 5, 6), (5, (2, 3))),
    "two": (lambda x, i, j: x[i, j], (4, 5, 6), (4, (3,)), (5, (2, 3))),
    "two apart": (lambda x, i, j: x[i, :, j], (4, 5, 6), (4, (3,)), (6, (3,))),
    "behind a range": (lambda x, i: x[1:3, i], (4, 5, 6), (5, (3,))),
    "behind a number": (lambda x, i: x[0, :, i], (4, 5, 6), (6, (3,))),
    "mask": (lambda x, m: x[m > 0], (4, 5, 6), (2, (4, 5))),
    "mask further in": (lambda x, m: x[:, m], (4, 5, 6), MASK),
    "masked_select": (torch.masked_select, (4, 5), MASK),
    "nonzero": (lambda m: m.nonzero(), (2, (4, 5))),
    "nonzero as tuple": (lambda m: torch.nonzero(m, as_tuple=True), (2, (4, 5))),
    "gather": (lambda x, i: x.gather(1, i), (4, 5), (5, (4, 3))),
    "gather fewer": (lambda x, i: torch.gather(x, 0, i), (4, 5), (4, (2, 3))),
    "gather last": (lambda x, i: torch.gather(x, -1, i), (4, 5), (5, (4, 5))),
    "gather in integers": (lambda x, i: x.gather(0, i), (9, (4, 5)), (4, (3, 5))),
    "gather by one number": (lambda x, i: x.gather(0, i), (4,), (4, ())),
    "gather of a number": (lambda x, i: x.gather(0, i), (), np.array([0, 0])),
    "index_select in integers": (lambda x, i: x.index_select(0, i), (9, (4, 5)), (4, (7,))),
    "index_select by one number": (lambda x, i: x.index_select(1, i), (4, 5), (5, ())),
    "index_select of a number": (lambda x, i: x.index_select(0, i), (), np.array([0])),
    "index_select": (lambda x, i: x.index_select(0, i), (4, 5), (4, (7,))),
    "index_select last": (lambda x, i: torch.index_select(x, -1, i), (4, 5), (5, (3,))),
    "take_along_dim": (lambda x, i: torch.take_along_dim(x, i, 1), (4, 5), (5, (1, 3))),
    "take_along_dim flat": (torch.take_along_dim, (4, 5), (20, (3,))),
    "scatter": (
        lambda x, i, s: x.scatter(1, i, s), (4, 5), np.array([[0, 2], [1, 4], [3, 0], [2, 1]]), (4, 2),
    ),
    "scatter a number": (lambda x, i: torch.scatter(x, 1, i, 0.5), (4, 5), (5, (4, 2))),
    "scatter nothing": (lambda x, i, s: x.scatter(0, i, s), (4, 5), (4, (0, 5)), (0, 5)),
    "scatter in a number": (lambda x, i, s: x.scatter(0, i, s), (), np.array(0), ()),
    "scatter_add": (lambda x, i, s: x.scatter_add(1, i, s), (4, 5), (5, (4, 3)), (4, 3)),
    "scatter_add fewer": (lambda x, i, s: torch.scatter_add(x, 0, i, s), (4, 5), (4, (3, 4)), (3, 4)),
    "index_add": (lambda x, i, s: x.index_add(0, i, s), (4, 5), (4, (3,)), (3, 5)),
    "index_add times": (lambda x, i, s: torch.index_add(x, 1, i, s, alpha=2), (4, 5), (5, (3,)), (4, 3)),
    "index_add to a number": (lambda x, i, s: x.index_add(0, i, s), (), np.array([0]), ()),
    "one_hot": (lambda x: F.one_hot(x, 7), (6, (4, 3))),
    "one_hot of the largest": (F.one_hot, (6, (4, 3))),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_TENSOR)
@pytest.mark.untraced
def test_index_by_tensor(holds, name):
    """Integer and boolean tensors of any layout pick what they pick of a plain tensor; gradients add up."""
    holds(BY_TENSOR[name][0], *BY_TENSOR[name][1:])


def first_row(y):
    """Write zeros to one row."""
    y[0] = 0


def columns(y, value):
    """Write a tensor that may stretch."""
    y[:, 1:3] = value


def one_column(y, value):
    """Write a vector to a column."""
    y[:, 0] = value


def everything(y, value):
    """Write all."""
    y[...] = value


def picked(y, index, value):
    """Write where an index tensor says."""
    y[:, index] = value


def masked(y, mask):
    """Write where a mask says."""
    y[mask] = 0.5


WRITES = {
    "row": (first_row, (4, 5, 6)),
    "columns": (columns, (4, 5, 6), (4, 2, 6)),
    "stretched": (columns, (4, 5, 6), (4, 1, 6)),
    "vector": (one_column, (4, 5, 6), (6,)),
    "all": (everything, (4, 5, 6), (5, 6)),
    "integers": (one_column, (4, 5, 6), (9, (6,))),
    "picked": (picked, (4, 5, 6), np.array([0, 3]), (4, 2, 6)),
    "masked": (masked, (4, 5, 6), np.array([True, False, True, False])),
    "index_add_": (lambda y, i, s: y.index_add_(0, i, s), (4, 5), (4, (3,)), (3, 5)),
    "scatter_add_": (lambda y, i, s: y.scatter_add_(1, i, s), (4, 5), (5, (4, 3)), (4, 3)),
}


@pytest.mark.parametrize("name", WRITES)
def test_writing(holds, name):
    """A write changes what it changes of a plain tensor, or is refused; no write is lost."""
    write, *specs = WRITES[name]

    def run(x, *rest):
        y = x * 1.0
        write(y, *rest)
        return y

    holds(run, *specs, refused=True, drawn={(2,): 30, (3,): 7, (2, 2): 5})


def test_a_write_that_would_move_is_refused(ranks):
    """Writing to part of a sharded dim says what to do instead."""

    def run(mesh):
        x = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
        with pytest.raises(UnsupportedOperatorError) as caught:
            x[0] = 0
        return str(caught.value)

    assert ranks(2, run)[0] == (
        "setitem(x=f32[4@tp, 3]): writing in place would have to change the layout of x; use the out-of-place form, "
        "or x = x.redistribute(placements=[Replicate()]) first"
    )


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7])
def test_embedding(holds, rows):
    """Tables sharded along either dim, unevenly or with empty pieces, give the plain vectors and gradients."""
    holds(F.embedding, (rows, (4, 3)), (rows, 5))


@pytest.mark.parametrize("padding", [3, -1])
def test_padding_row_gets_no_gradient(holds, padding):
    """`padding_idx` counts rows of the whole table, wherever the row lives."""
    holds(lambda ids, table: F.embedding(ids, table, padding), (5, (4, 3)), (5, 6))


def test_a_sharded_vocabulary_costs_one_reduction(ranks):
    """Looking up in a table sharded along the vocabulary leaves a sum pending and gathers nothing."""

    def run(mesh):
        table = DTensor.from_local(torch.ones(3, 4, requires_grad=True), mesh, [Shard(0)])
        ids = DTensor.from_local(torch.tensor([0, 5, 2]), mesh, [Replicate()])
        with record_events() as log:
            found = F.embedding(ids, table)
            pending = found.placements
            found.redistribute(placements=[Replicate()]).sum().backward()
        return pending, log.collectives("forward"), log.collectives("backward")

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


def test_a_mask_writes_to_shards(ranks):
    """`x[mask] = number` writes element by element and keeps the layout."""

    def run(mesh):
        x = DTensor.from_local(torch.arange(6.0).reshape(2, 3), mesh, [Shard(0)])
        with record_events() as log:
            x[x > 4] = -1.0
        return x.to_local().tolist(), log.collectives()

    assert ranks(2, run) == [([[0.0, 1.0, 2.0], [3.0, 4.0, -1.0]], [])] * 2


@pytest.mark.parametrize("name", ["max_norm", "scale_grad_by_freq", "sparse"])
def test_embedding_options_that_need_the_whole(ranks, name):
    """Options that look at the whole table are refused on pieces, with the line that helps."""

    def run(mesh):
        table = DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0)])
        ids = DTensor.from_local(torch.tensor([0, 5, 2]), mesh, [Replicate()])
        with pytest.raises(LayoutError) as caught:
            F.embedding(ids, table, **{name: 1.0 if name == "max_norm" else True})
        return str(caught.value)

    assert ranks(2, run)[0] == (
        f"embedding(x=i64[3], weight=f32[6@tp, 4]): {name} looks at rows or counts of the whole table, so it needs "
        "whole operands: x = x.redistribute(); weight = weight.redistribute()"
    )
