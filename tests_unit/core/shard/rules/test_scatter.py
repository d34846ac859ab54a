"""Writing by index, scatters of every kind and their in-place forms on PyTorch."""

import numpy as np
import pytest
import torch

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import record_events
from hyper_parallel.core.dtensor.placements import Partial, Shard
from hyper_parallel.errors import UnsupportedOperatorError

pytestmark = pytest.mark.platforms("torch")


DISTINCT = np.array([[0, 2], [1, 4], [3, 0], [2, 1]])
SCATTERS = {
    "scatter by keyword": (lambda x, i: torch.scatter(x, 1, i, value=0.5), (4, 5), (5, (4, 2))),
    "scatter adding": (lambda x, i, s: x.detach().scatter(1, i, s.detach(), reduce="add"), (4, 5), (5, (4, 3)), (4, 3)),
    "scatter_reduce": (lambda x, i, s: x.scatter_reduce(1, i, s, "sum"), (4, 5), (5, (4, 3)), (4, 3)),
    "scatter_reduce alone": (
        lambda x, i, s: torch.scatter_reduce(x, 0, i, s, "mean", include_self=False), (4, 5), (4, (3, 5)), (3, 5),
    ),
    "scatter_reduce amax": (lambda x, i, s: x.scatter_reduce(-1, i, s, "amax"), (4, 5), (5, (4, 3)), (4, 3)),
    "scatter_reduce prod": (lambda x, i, s: x.scatter_reduce(0, i, s, "prod"), (4, 5), (4, (3, 5)), (3, 5)),
    "index_copy": (lambda x, s: x.index_copy(1, index(x, 3, 0), s), (4, 5), (4, 2)),
    "index_copy of a number": (lambda x, i, s: x.index_copy(0, i, s), (4,), np.array([2]), ()),
    "index_fill": (lambda x: x.index_fill(0, index(x, 2, 0), 0.5), (4, 5)),
    "index_fill with zeros": (lambda x: x.index_fill(1, index(x, 2, 0), 0), (4, 5)),
    "index_reduce": (lambda x, s: x.index_reduce(0, index(x, 1, 1, 3), s, "mean"), (4, 5), (3, 5)),
    "index_reduce amin": (lambda x, s: x.index_reduce(0, index(x, 1), s, "amin", include_self=False), (4, 5), (1, 5)),
    "index_put": (lambda x, i, v: x.index_put((i,), v), (5, 3), np.array([4, 1]), (2, 3)),
    "index_put adding": (lambda x, i, v: torch.index_put(x, (i, i), v, accumulate=True), (5, 5), (5, (4,)), (4,)),
    "index_put by a mask": (lambda x, m, v: x.index_put((m > 0,), v), (3, 4), (2, (3, 4)), (1,)),
    "put": (lambda x, i, s: x.put(i, s), (4, 5), np.array([3, 19, 0]), (3,)),
    "put adding": (lambda x, i, s: x.put(i, s, accumulate=True), (4, 5), (20, (2, 3)), (2, 3)),
    "masked_scatter": (lambda x, m, s: x.masked_scatter(m > 0, s), (4, 5), (2, (4, 5)), (20,)),
    "select_scatter": (lambda x, s: x.select_scatter(s, 1, -2), (4, 5, 3), (4, 3)),
    "slice_scatter": (lambda x, s: torch.slice_scatter(x, s, 1, 0, 5, 2), (4, 5), (4, 3)),
    "diagonal_scatter": (lambda x, s: x.diagonal_scatter(s, 1), (4, 5), (4,)),
    "diagonal_scatter inside": (lambda x, s: torch.diagonal_scatter(x, s, 0, 0, 2), (4, 5, 3), (5, 3)),
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
}  # fmt: skip


def index(x, *positions):
    """`positions` as an index tensor: a DTensor if `x` is one."""
    plain = torch.tensor(positions)
    return DTensor.from_local(plain, x.device_mesh) if isinstance(x, DTensor) else plain


@pytest.mark.parametrize("name", SCATTERS)
@pytest.mark.untraced
def test_scattered(holds, name):
    """Values and gradients of scatters do not depend on layouts."""
    holds(*SCATTERS[name], limits={(2,): 20, (3,): 7, (2, 2): 4})


IN_PLACE = {
    "scatter_": (lambda y, i, s: y.scatter_(1, i, s), (4, 5), DISTINCT, (4, 2)),
    "scatter_reduce_": (lambda y, i, s: y.scatter_reduce_(1, i, s, "amax"), (4, 5), (5, (4, 3)), (4, 3)),
    "index_copy_": (lambda y, s: y.index_copy_(1, index(y, 3, 0), s), (4, 5), (4, 2)),
    "index_fill_": (lambda y: y.index_fill_(0, index(y, 2, 0), 0.5), (4, 5)),
    "index_reduce_": (lambda y, s: y.index_reduce_(1, index(y, 1, 4), s, "amin"), (4, 5), (4, 2)),
    "index_put_": (lambda y, i, v: y.index_put_((i,), v), (4, 5), np.array([0, 3]), (2, 5)),
    "index_put_ adding": (lambda y, i, v: y.index_put_((i,), v, accumulate=True), (4, 5), (4, (3,)), (3, 5)),
    "put_": (lambda y, i, s: y.put_(i, s), (4, 5), np.array([3, 19, 0]), (3,)),
    "masked_scatter_": (lambda y, m, s: y.masked_scatter_(m > 0, s), (4, 5), (2, (4, 5)), (20,)),
    "tril_": (lambda y: y.tril_(1), (4, 5)),
    "triu_": (lambda y: y.triu_(), (5, 4, 3)),
    "fill_diagonal_": (lambda y: y.fill_diagonal_(0.5), (5, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(holds, name):
    """In-place scatters write the values of their out-of-place forms, gradients included, or are refused."""
    write, *specs = IN_PLACE[name]

    def run(x, *rest):
        y = x * 1.0
        returned = write(y, *rest)
        return returned + 0 * y

    holds(run, *specs, refused=True, limits={(2,): 30, (3,): 12})


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
    """Write at an index tensor."""
    y[:, index] = value


def masked(y, mask):
    """Write at a mask."""
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
    """A write changes the same elements as on a plain tensor, or is refused; no write is lost."""
    write, *specs = WRITES[name]

    def run(x, *rest):
        y = x * 1.0
        write(y, *rest)
        return y

    holds(run, *specs, refused=True, limits={(2,): 30, (3,): 7, (2, 2): 5})


def test_a_write_that_would_move_is_refused(ranks):
    """A write to part of a sharded dim is refused with the fix."""

    def run(mesh):
        x = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
        with pytest.raises(UnsupportedOperatorError) as caught:
            x[0] = 0
        return str(caught.value)

    assert ranks(2, run)[0] == (
        "setitem(x=f32[4@tp, 3]): writing in place would have to change the layout of x; use the out-of-place form, "
        "or x = x.redistribute(placements=[Replicate()]) first"
    )


def test_a_mask_writes_to_shards(ranks):
    """`x[mask] = number` writes element by element and keeps the layout."""

    def run(mesh):
        x = DTensor.from_local(torch.arange(6.0).reshape(2, 3), mesh, [Shard(0)])
        with record_events() as log:
            x[x > 4] = -1.0
        return x.to_local().tolist(), log.collectives()

    assert ranks(2, run) == [([[0.0, 1.0, 2.0], [3.0, 4.0, -1.0]], [])] * 2


def test_partial_values_pass_what_is_linear(ranks):
    """diag_embed and a fill with zero keep a Partial tensor Partial, without communication."""

    def run(mesh):
        x = DTensor.from_local(torch.ones(3), mesh, [Partial()])
        with record_events() as events:
            result = torch.diag_embed(x), x.index_fill(0, index(x, 1), 0)
        return len(events), [tensor.placements for tensor in result], result[1].full_tensor().tolist()

    assert ranks(2, run) == [(0, [(Partial("sum"),)] * 2, [2.0, 0.0, 2.0])] * 2


def write(x, value):
    """Write a row."""
    x[0] = value


MISFITS = {
    "what is written": (
        write, (4, 3), (9, (2,)),
        "setitem(x=f64[4@tp, 3], value=i64[2@tp]): value [2] does not broadcast to [3]",
    ),
    "scatter": (
        lambda x, i, s: x.scatter(0, i, s), (4, 3), (4, (4,)), (4, 3),
        ("scatter(x=f64[4@tp, 3], index=i64[4@tp], src=f64[4@tp, 3]): x has 2 dims, index has 1 dims, src has 2 dims; "
        "they must have the same number of dims"),
    ),
    "index_add": (
        lambda x, i, s: x.index_add(0, i, s), (4, 3), (4, (2,)), (3, 3),
        ("index_add(x=f64[4@tp, 3], index=i64[2@tp], source=f64[3@tp, 3]): x [4, 3], index [2] and source [3, 3] "
        "do not match along dim 0"),
    ),
    "index_copy": (
        lambda x, i, s: x.index_copy(0, i, s), (4, 3), (4, (1,)), (2, 3),
        ("index_copy(x=f64[4@tp, 3], index=i64[1@tp], source=f64[2@tp, 3]): x [4, 3], index [1] and source [2, 3] "
        "do not match along dim 0"),
    ),
    "select_scatter": (
        lambda x, s: x.select_scatter(s, 1, 3), (4, 3), (4,),
        "select_scatter(x=f64[4@tp, 3], src=f64[4@tp]): index 3 does not exist in dim 1 of [4, 3]",
    ),
    "slice_scatter": (
        lambda x, s: x.slice_scatter(s, 1, 0, 3, 2), (4, 3), (4, 3),
        "slice_scatter(x=f64[4@tp, 3], src=f64[4@tp, 3]): src is [4, 3], the part that it replaces is [4, 2]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_a_call_that_does_not_fit_is_refused(refuses, name):
    """A call that fails on one device fails on every rank with its reason, before anything moves."""
    refuses(*MISFITS[name])


BEYOND = {
    "storage written by address": (
        lambda x, s: torch.as_strided_scatter(x, s, (2, 2), (1, 2)), (6,), (2, 2),
        ("as_strided_scatter(x=f64[6@tp], src=f64[2@tp, 2]): strides address storage, of which ranks have different "
        "shards; x = x.redistribute().contiguous() first"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BEYOND)
def test_what_only_one_device_can_do_is_refused(refuses, name):
    """A call that has no meaning on local shards raises an error with the reason."""
    refuses(*BEYOND[name], plain_too=False)
