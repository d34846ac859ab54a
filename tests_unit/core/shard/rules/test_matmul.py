"""The matmul family: contracted dims give partial sums, other dims stay sharded."""

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import record_events
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.errors import LayoutError

pytestmark = pytest.mark.platforms("torch")


SHAPES = [
    [(5, 4), (4, 3)], [(4,), (4,)], [(4,), (4, 3)], [(5, 4), (4,)], [(2, 5, 4), (4, 3)], [(2, 5, 4), (2, 4, 3)],
    [(1, 5, 4), (2, 4, 3)], [(5, 4), (2, 4, 3)], [(3, 1, 5, 4), (2, 4, 3)], [(4,), (2, 4, 3)], [(2, 5, 4), (4,)],
    [(5, 1), (1, 3)],
]  # fmt: skip


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.untraced
def test_matmul(holds, shapes):
    """Matmul of operands of every number of dims is the plain one, with batch dims broadcast."""
    holds(lambda x, y: x @ y, *shapes)


NAMED = {
    "linear": (F.linear, (5, 4), (3, 4), (3,)),
    "linear without bias": (F.linear, (2, 5, 4), (3, 4)),
    "mm": (torch.mm, (5, 4), (4, 3)),
    "bmm": (torch.bmm, (2, 5, 4), (2, 4, 3)),
    "mv": (torch.mv, (5, 4), (4,)),
    "dot": (torch.dot, (5,), (5,)),
    "outer": (torch.outer, (5,), (4,)),
    "addmm": (lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=2), (3,), (5, 4), (4, 3)),
    "addmm of a column": (torch.addmm, (5, 1), (5, 4), (4, 3)),
    "baddbmm": (torch.baddbmm, (2, 1, 3), (2, 5, 4), (2, 4, 3)),
    "addmv": (torch.addmv, (5,), (5, 4), (4,)),
    "addbmm": (torch.addbmm, (5, 3), (2, 5, 4), (2, 4, 3)),
}


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.untraced
def test_named(holds, name):
    """Each product has the plain values and gradients, and an added operand is added once."""
    holds(NAMED[name][0], *NAMED[name][1:])


EQUATIONS = {
    "ij,jk->ik": [(5, 4), (4, 3)],
    "bhqd,bhkd->bhqk": [(2, 3, 5, 4), (2, 3, 7, 4)],
    "...ij,...jk": [(2, 5, 4), (4, 3)],
    "ii->i": [(4, 4)],
    "ij->": [(5, 4)],
    "ba": [(5, 4)],
    "i,j,k->kij": [(5,), (4,), (3,)],
    "ij,j": [(5, 4), (4,)],
    "bi,oi->b": [(5, 4), (3, 4)],
    "ik,kj->ij": [(5, 1), (4, 3)],
    "i...->...i": [(5, 4, 3)],
}


@pytest.mark.parametrize("equation", EQUATIONS)
def test_einsum(holds, equation):
    """Einsum follows its equation: diagonals stay whole, size-1 dims stretch, ellipses align at the right."""
    holds(lambda *xs: torch.einsum(equation, *xs), *EQUATIONS[equation])


def test_two_uneven_axes(holds):
    """A contraction over a 2x3 mesh of sizes that do not divide is exact."""
    holds(F.linear, (5, 4), (7, 4), (7,), limits={(2, 3): 20})


def test_row_then_column_costs_one_all_reduce(ranks):
    """A column- and a row-parallel linear communicate once forward and once backward; the bias is added once."""

    def run(mesh):
        x = DTensor.from_local(torch.ones(3, 4, requires_grad=True), mesh, [Replicate()])
        up = DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0)])
        down = DTensor.from_local(torch.ones(5, 3), mesh, [Shard(1)])
        bias = DTensor.from_local(torch.ones(5), mesh, [Replicate()])
        with record_events() as log:
            y = F.linear(F.linear(x, up), down, bias)
            before = y.placements
            y = y.redistribute(placements=[Replicate()])
            y.sum().backward()
        return before, log.collectives("forward"), log.collectives("backward"), float(y.detach().to_local().max())

    assert ranks(2, run) == [((Partial("sum"),), ["all_reduce"], ["all_reduce"], 25.0)] * 2


def test_wrong_sizes_are_named(ranks):
    """Sizes that do not fit are reported with the operands' layouts."""

    def run(mesh):
        x = DTensor.from_local(torch.ones(3, 4), mesh, [Replicate()])
        with pytest.raises(LayoutError) as caught:
            x @ x
        return str(caught.value)

    assert ranks(2, run)[0] == "matmul(x=f32[3, 4], y=f32[3, 4]): x has 4 columns, y has 3 rows"


MISFITS = {
    "linear": (
        F.linear, (4, 3), (4, 2),
        "linear(x=f64[4@tp, 3], weight=f64[4@tp, 2]): x has 3 features, weight expects 2",
    ),
    "matmul of a number": (
        torch.matmul, (4, 3), (),
        "matmul(x=f64[4@tp, 3], y=f64[]): both operands need at least one dim",
    ),
    "addmm of a vector": (
        lambda bias, x: torch.addmm(bias, x, bias), (4,), (4, 3),
        "addmm(bias=f64[4@tp], x=f64[4@tp, 3], y=f64[4@tp]): y has 1 dims, it must have 2",
    ),
    "addmm": (
        torch.addmm, (4,), (4, 3), (4, 4),
        "addmm(bias=f64[4@tp], x=f64[4@tp, 3], y=f64[4@tp, 4]): y has a dim of size 4 where 3 is needed",
    ),
    "bilinear": (
        F.bilinear, (4, 3), (4, 2), (5, 3, 3),
        ("bilinear(x=f64[4@tp, 3], y=f64[4@tp, 2], weight=f64[5@tp, 3, 3]): x [4, 3], "
        "y [4, 2] and weight [5, 3, 3] do not match …i, …j, nij"),
    ),
    "block_diag": (
        torch.block_diag, (4, 3, 2),
        "block_diag(tensors[0]=f64[4@tp, 3, 2]): blocks are matrices, got [[4, 3, 2]]",
    ),
    "einsum of two sizes": (
        lambda x, y: torch.einsum("ij,jk->ik", x, y), (4, 3), (4, 3),
        ("einsum(operands[0]=f64[4@tp, 3], operands[1]=f64[4@tp, 3]): einsum: 'j' has size 3 in one operand and 4 in "
        "another"),
    ),
    "einsum of two ellipses": (
        lambda x, y: torch.einsum("...i,...i->...", x, y), (4, 3), (3, 3),
        ("einsum(operands[0]=f64[4@tp, 3], operands[1]=f64[3@tp, 3]): einsum: dim 0 of the ellipsis "
        "has size 4 in one operand and 3 in another"),
    ),
    "einsum of fewer operands": (
        lambda x: torch.einsum("ij,jk->ik", x), (4, 3),
        "einsum(operands[0]=f64[4@tp, 3]): einsum: equation 'ij,jk->ik' has 2 operands, but 1 were given",
    ),
    "einsum to nowhere": (
        lambda x: torch.einsum("ij->ik", x), (4, 3),
        (
            "einsum(operands[0]=f64[4@tp, 3]): einsum: the output of 'ij->ik' names a dim twice, or one that no "
            "operand has"
        ),
    ),
    "einsum of other dims": (
        lambda x: torch.einsum("ijk->ik", x), (4, 3),
        "einsum(operands[0]=f64[4@tp, 3]): einsum: 'ijk' in 'ijk->ik' does not match an operand of 2 dims",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_a_call_that_does_not_fit_is_refused(refuses, name):
    """A call that fails on one device fails on every rank with its reason, before anything moves."""
    refuses(*MISFITS[name])
