"""Rearranging, dropping, cutting and stretching dims on PyTorch."""

import numpy as np
import pytest
import torch

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.errors import UnsupportedOperatorError

pytestmark = pytest.mark.platforms("torch")


COMPLEX = np.random.default_rng(5).standard_normal((3, 4, 2)).view(np.complex128)[..., 0]
DIMS = {
    "transpose": lambda x: x.transpose(0, -1),
    "transpose of a number": lambda x: x.sum().transpose(0, -1),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "permute": lambda x: x.permute(2, 0, 1),
    "torch.permute": lambda x: torch.permute(x, (2, 0, 1)),
    "movedim": lambda x: x.movedim(0, -1),
    "movedim of two": lambda x: torch.movedim(x, (0, 1), (2, 0)),
    "mT": lambda x: x.mT,
    "T": lambda x: x[0].T,
    "t": lambda x: x[:, 0].t(),
    "squeeze": lambda x: x[:, :1].squeeze(),
    "squeeze of nothing": lambda x: x.squeeze(0),
    "unsqueeze": lambda x: x.unsqueeze(-1),
    "expand": lambda x: x[:, :1].expand(2, -1, 5, 6),
    "expand_as": lambda x: x[:, :1].expand_as(x),
    "broadcast_to": lambda x: torch.broadcast_to(x, (2, *x.shape)),
    "narrow": lambda x: x.narrow(1, 1, 2),
    "narrow to all": lambda x: torch.narrow(x, 1, 0, 5),
    "select": lambda x: x.select(1, -1),
    "diagonal": lambda x: x.diagonal(1, 2, 0),
    "unfold": lambda x: x.unfold(1, 3, 2),
    "repeat": lambda x: x.repeat(2, 1, 3, 1),
    "tile": lambda x: x.tile((2, 1)),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "repeat_interleave first": lambda x: torch.repeat_interleave(x, 3, dim=0),
    "repeat_interleave flat": lambda x: x.repeat_interleave(2),
    "roll": lambda x: x.roll(1, 0),
    "roll flat": lambda x: torch.roll(x, 2),
    "flip": lambda x: x.flip(0, 2),
    "torch.flip": lambda x: torch.flip(x, [1]),
    "tril": lambda x: x.tril(),
    "triu": lambda x: torch.triu(x, 1),
    "tril below": lambda x: x.tril(-1),
}  # fmt: skip


@pytest.mark.parametrize("name", DIMS)
def test_dims(holds, name):
    """Rearranging, cutting and stretching dims gives the plain tensor, also where a dim is 1 only locally."""
    holds(DIMS[name], (4, 5, 6))


REARRANGED = {
    "diag_embed": (lambda x: torch.diag_embed(x, 1), (3, 4)),
    "diag_embed in front": (lambda x: x.diag_embed(-2, 0, 2), (3, 4)),
    "diag of a vector": (lambda x: torch.diag(x, -1), (5,)),
    "diag of a matrix": (lambda x: x.diag(1), (4, 5)),
    "diagflat": (lambda x: torch.diagflat(x, 1), (2, 3)),
    "rot90": (torch.rot90, (3, 4)),
    "rot90 back": (lambda x: x.rot90(-1, [2, 0]), (3, 4, 5)),
    "rot180": (lambda x: torch.rot90(x, 2, (0, 1)), (3, 4)),
    "H": (lambda x: x.H, COMPLEX),
    "mH": (lambda x: x.mH @ x, COMPLEX),
    "meshgrid": (lambda x, y: torch.meshgrid(x, y, indexing="ij"), (3,), (4,)),
    "meshgrid by columns": (lambda x, y, z: torch.meshgrid([x, y, z], indexing="xy"), (3,), (4,), (2,)),
    "unfold of a number": (lambda x: x.sum().unfold(0, 1, 1), (3, 4)),
    "permute_copy": (lambda x: torch.permute_copy(x, (2, 0, 1)), (3, 4, 5)),
    "slice_copy": (lambda x: torch.slice_copy(x, 1, 1, 3), (3, 5)),
}  # fmt: skip


@pytest.mark.parametrize("name", REARRANGED)
@pytest.mark.untraced
def test_rearranged(holds, name):
    """Rearranged elements are at the same places as on one device, for every layout."""
    holds(*REARRANGED[name])


def test_wrapped_diagonals_are_refused(ranks):
    """fill_diagonal_ with wrap, which fills several diagonals, is refused."""

    def run(mesh):
        with pytest.raises(UnsupportedOperatorError) as caught:
            DTensor.from_local(torch.zeros(7, 2), mesh).fill_diagonal_(1, wrap=True)
        return str(caught.value)

    assert ranks(2, run) == ["fill_diagonal_: only one diagonal of a matrix can be filled, x has shape [7, 2]"] * 2


MISFITS = {
    "no such dim": (
        lambda x: x.transpose(0, 2), (4, 3),
        "transpose(x=f64[4@tp, 3]): dim 2 does not exist in a tensor of 2 dims",
    ),
    "permute": (
        lambda x: x.permute(0, 0), (4, 3),
        "permute(x=f64[4@tp, 3]): dims [0, 0] must be a permutation of the 2 dims",
    ),
    "movedim to fewer": (
        lambda x: x.movedim((0, 1), (1,)), (4, 3),
        ("movedim(x=f64[4@tp, 3]): source (0, 1) and destination (1,) must have the same number of dims, each without "
         "repetition"),
    ),
    "movedim twice": (
        lambda x: x.movedim((0, 0), (1, 0)), (4, 3),
        ("movedim(x=f64[4@tp, 3]): source (0, 0) and destination (1, 0) must have the same number of dims, each "
         "without repetition"),
    ),
    "t": (lambda x: x.t(), (4, 3, 2), "t(x=f64[4@tp, 3, 2]): t() takes at most 2 dims, x has 3"),
    "mT": (lambda x: x.mT, (4,), "matrix_transpose(x=f64[4@tp]): mT takes at least 2 dims, x has 1"),
    "expand": (lambda x: x.expand(4, 5), (4, 3), "expand(x=f64[4@tp, 3]): sizes [4, 5] cannot be expanded from [4, 3]"),
    "expand a new dim": (
        lambda x: x.expand(-1, 4, 3), (4, 3),
        "expand(x=f64[4@tp, 3]): sizes [-1, 4, 3]: -1 cannot stand for a new dim",
    ),
    "narrow": (
        lambda x: x.narrow(1, 2, 2), (4, 3),
        "narrow(x=f64[4@tp, 3]): start 2 and length 2 are not within dim 1, which has size 3",
    ),
    "narrow from a fraction": (
        lambda x: x.narrow(1, 1.0, 1), (4, 3),
        "narrow(x=f64[4@tp, 3]): start is 1.0; it must be an integer",
    ),
    "select": (lambda x: x.select(1, 3), (4, 3), "select(x=f64[4@tp, 3]): index 3 does not exist in dim 1 of [4, 3]"),
    "diagonal": (lambda x: x.diagonal(0, 1, -1), (4, 3), "diagonal(x=f64[4@tp, 3]): dim1 and dim2 are both 1"),
    "unfold": (
        lambda x: x.unfold(1, 4, 1), (4, 3),
        "unfold(x=f64[4@tp, 3]): windows of 4 every 1 do not fit dim 1 of [4, 3]",
    ),
    "repeat": (lambda x: x.repeat(2), (4, 3), "repeat(x=f64[4@tp, 3]): repeats [2] name fewer dims than x has (2)"),
    "repeat_interleave": (
        lambda x, times: x.repeat_interleave(times, 1), (4, 3), (2, (2,)),
        "repeat_interleave: repeats has shape [2]; dim 1 of [4, 3] needs [3], or one number",
    ),
    "repeat_interleave by a list": (
        lambda x: x.repeat_interleave([1, 2, 3], 1), (4, 3),
        "repeat_interleave(x=f64[4@tp, 3]): repeats is [1, 2, 3]; it must be an integer, or a tensor of integers",
    ),
    "tril": (lambda x: x.tril(), (4,), "tril(x=f64[4@tp]): x needs at least 2 dims, it has 1"),
    "diag_embed": (torch.diag_embed, (), "diag_embed(x=f64[]): x needs at least 1 dim"),
    "diag_embed in one dim": (
        lambda x: torch.diag_embed(x, 0, 1, -2), (4, 3),
        "diag_embed(x=f64[4@tp, 3]): dim1 and dim2 are both 1",
    ),
    "diag": (torch.diag, (4, 3, 2), "diag: x needs 1 or 2 dims, it has 3"),
    "trace": (torch.trace, (4,), "trace: expected a matrix, x has 1 dims"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_a_call_that_does_not_fit_is_refused(refuses, name):
    """A call that fails on one device fails on every rank with its reason, before anything moves."""
    refuses(*MISFITS[name])
