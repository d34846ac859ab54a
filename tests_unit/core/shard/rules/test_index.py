"""Reading by index and gathering on PyTorch."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import record_events
from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.errors import LayoutError

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
    """Numbers, slices with steps, None and Ellipsis read the same elements as on a plain tensor."""
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
    "one_hot": (lambda x: F.one_hot(x, 7), (6, (4, 3))),
    "one_hot of the largest": (F.one_hot, (6, (4, 3))),
    "take": (torch.take, (4, 5), (20, (2, 3))),
    "take from the end": (lambda x, i: x.take(i - 20), (4, 5), (20, (7,))),
    "take_along_dim from the end": (lambda x, i: torch.take_along_dim(x, i - 5, 1), (4, 5), (5, (4, 3))),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_TENSOR)
@pytest.mark.untraced
def test_index_by_tensor(holds, name):
    """Integer and boolean index tensors of any layout pick the plain elements; gradients add up."""
    holds(BY_TENSOR[name][0], *BY_TENSOR[name][1:])


def test_zero_dim_masks(holds, ranks):
    """A mask without dims keeps all of a tensor or nothing of it, in a new first dim; among others it is refused."""

    def run(mesh):
        x, yes = DTensor.from_local(torch.zeros(4, 5), mesh), DTensor.from_local(torch.tensor(True), mesh)
        messages = []
        for wrong in (lambda: x[:, yes], lambda: x[torch.tensor(True)]):
            with pytest.raises(LayoutError) as caught:
                wrong()
            messages.append(str(caught.value))
        return messages

    assert (
        ranks(2, run)
        == [
            [
                "__getitem__: a mask without dims must be the only index, and a DTensor",
                "__getitem__: a mask without dims must be the only index, and a DTensor",
            ]
        ]
        * 2
    )
    holds(lambda x, m: x[m.sum() > 0], (4, 5), np.array([1, 2]))
    holds(lambda x, m: x[m.sum() > 9] + x.sum(), (4, 5), np.array([1, 2]))
    holds(lambda x, m: torch.masked_select(x.sum(), m.sum() > 0), (4, 5), np.array([1, 2]))


def test_indices_of_take_stay_sharded(ranks):
    """Each rank takes the elements of its shard of the indices, without communication."""

    def run(mesh):
        x = DTensor.from_local(torch.arange(6.0).reshape(2, 3), mesh)
        positions = DTensor.from_local(torch.tensor([1, 5]), mesh, [Shard(0)])
        with record_events() as events:
            result = x.take(positions)
        return len(events), result.placements, result.to_local().tolist()

    assert ranks(2, run) == [(0, (Shard(0),), [1.0, 5.0])] * 2


MISFITS = {
    "too many indices": (
        lambda x: x[0, 0, 0], (4, 3),
        "getitem(x=f64[4@tp, 3]): 3 indices for a tensor of 2 dims",
    ),
    "no such index": (
        lambda x: x[:, 3], (4, 3),
        "getitem(x=f64[4@tp, 3]): index 3 does not exist in dim 1 of [4, 3]",
    ),
    "no index": (
        lambda x: x[:, 1.0], (4, 3),
        ("getitem(x=f64[4@tp, 3]): index 1.0: only numbers, slices, None, Ellipsis and integer or boolean tensors are "
        "supported"),
    ),
    "gather": (
        lambda x, i: x.gather(0, i), (4, 3), (3, (4,)),
        "gather(x=f64[4@tp, 3], index=i64[4@tp]): x has 2 dims, index has 1",
    ),
    "index_select": (
        lambda x, i: x.index_select(0, i), (4, 3), (3, (4, 1)),
        "index_select(x=f64[4@tp, 3], index=i64[4@tp, 1]): index has 2 dims, it needs at most 1",
    ),
    "take_along_dim": (
        lambda x, i: x.take_along_dim(i, 0), (4, 3), (3, (4,)),
        "take_along_dim: x has 2 dims, indices have 1",
    ),
    "one_hot": (
        lambda x: F.one_hot(x, -5), (4, (4, 3)),
        ("one_hot(x=i64[4@tp, 3]): num_classes is -5; give a positive number: the size of the result must not depend "
        "on values"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_a_call_that_does_not_fit_is_refused(refuses, name):
    """A call that fails on one device fails on every rank with its reason, before anything moves."""
    refuses(*MISFITS[name])
