"""Linear algebra and distances: leading dims may be sharded, matrices are gathered."""

from types import BuiltinFunctionType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import linalg

from hyper_parallel import distribute_tensor
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import record_events
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard

pytestmark = pytest.mark.platforms("torch")


def matrices(*shape, seed=3):
    """Well-conditioned matrices of leading dims `shape[:-2]`."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal(shape) + 3 * np.eye(shape[-2], shape[-1])


def symmetric(x):
    """Positive definite matrices made of any."""
    return x @ x.mT + 2 * torch.eye(x.shape[-1], dtype=torch.float64) if not isinstance(x, DTensor) else _shifted(x)


def _shifted(x):
    eye = DTensor.from_local(2 * torch.eye(x.shape[-1], dtype=torch.float64), x.device_mesh)
    return x @ x.mT + eye


SQUARE = {
    "cholesky": lambda x: linalg.cholesky(symmetric(x)),
    "cholesky upper": lambda x: linalg.cholesky(symmetric(x), upper=True),
    "cholesky_ex": lambda x: linalg.cholesky_ex(symmetric(x)),
    "cholesky_inverse": lambda x: torch.cholesky_inverse(linalg.cholesky(symmetric(x))),
    "inv": linalg.inv,
    "inverse": lambda x: x.inverse(),
    "inv_ex": linalg.inv_ex,
    "det": torch.det,
    "logdet": lambda x: symmetric(x).logdet(),
    "slogdet": linalg.slogdet,
    "eigh": lambda x: linalg.eigh(symmetric(x)),
    "eigvalsh": lambda x: linalg.eigvalsh(symmetric(x)),
    "matrix_power": lambda x: linalg.matrix_power(x, 3),
    "negative power": lambda x: torch.matrix_power(x, -2),
    "matrix_exp": torch.matrix_exp,
    "lu_factor": linalg.lu_factor,
    "eigh by its overload": lambda x: torch.ops.aten._linalg_eigh(symmetric(x)),
    "eigvalsh by the overload of eigh": lambda x: torch.ops.aten._linalg_eigh(symmetric(x.detach()), "L", False)[0],
    "lu_unpack": lambda x: torch.lu_unpack(*linalg.lu_factor(x)),
    "lu_unpack of pivots": lambda x: torch.lu_unpack(*linalg.lu_factor(x), unpack_data=False)[0],
    "lu_unpack of factors": lambda x: torch.lu_unpack(*linalg.lu_factor(x), unpack_pivots=False)[1:],
    "norm of the whole": lambda x: linalg.norm(x[0], 1),
    "norm of a vector": lambda x: linalg.norm(x[0, 0], 3),
    "lu_solve": lambda x: torch.lu_solve(x, *linalg.lu_factor(x)),
    "ldl_factor": lambda x: linalg.ldl_factor(symmetric(x).detach()),
    "nuclear norm": lambda x: linalg.matrix_norm(x, "nuc"),
    "spectral norm": lambda x: linalg.norm(x, 2, dim=(-2, -1)),
    "cond": linalg.cond,
    "two norms": lambda x: linalg.norm(x, "fro", (0, 2), keepdim=True),
}


if isinstance(torch.cholesky, BuiltinFunctionType):  # from 2.14 on it only raises
    SQUARE["torch.cholesky"] = lambda x: torch.cholesky(symmetric(x), upper=True)


@pytest.mark.parametrize("name", SQUARE)
@pytest.mark.untraced
def test_square_matrices(holds, name):
    """Values and gradients of functions of square matrices do not depend on how these are laid out."""
    holds(SQUARE[name], matrices(4, 3, 3))


OBLONG = {
    "qr": linalg.qr,
    "qr complete": lambda x: linalg.qr(x.mT.contiguous(), "complete"),
    "qr without a basis": lambda x: linalg.qr(x.detach(), mode="r")[1],
    "svd": lambda x: linalg.svd(x, full_matrices=False),
    "full svd": lambda x: linalg.svd(x.detach()),
    "transposed svd": torch.svd,
    "svdvals": linalg.svdvals,
    "svd by its overload": torch.ops.aten._linalg_svd,
    "svdvals by the overload of svd": lambda x: torch.ops.aten._linalg_svd(x.detach(), False, False)[1],
    "pinv": linalg.pinv,
    "pinverse": lambda x: x.pinverse(),
    "lu": linalg.lu,
    "matrix_rank": linalg.matrix_rank,
    "geqrf": lambda x: torch.geqrf(x.detach()),
}


@pytest.mark.parametrize("name", OBLONG)
def test_oblong_matrices(holds, name):
    """Values and gradients of functions of oblong matrices do not depend on how these are laid out."""
    holds(OBLONG[name], matrices(3, 5, 4))


EQUATIONS = {
    "solve": (linalg.solve, (4, 3, 3), (4, 3, 2)),
    "solve from the right": (lambda a, b: linalg.solve(a, b, left=False), (4, 3, 3), (4, 2, 3)),
    "solve for vectors": (linalg.solve, (4, 3, 3), (4, 3)),
    "solve for one vector": (linalg.solve, (3, 3), (3,)),
    "solve broadcast": (linalg.solve, (4, 3, 3), (1, 3, 5)),
    "solve_ex": (linalg.solve_ex, (4, 3, 3), (4, 3, 2)),
    "solve_triangular": (lambda a, b: linalg.solve_triangular(a, b, upper=True), (4, 3, 3), (4, 3, 2)),
    "triangular_solve": (lambda a, b: torch.triangular_solve(b, a), (4, 3, 3), (4, 3, 2)),
    "cholesky_solve": (lambda a, b: torch.cholesky_solve(b, linalg.cholesky(symmetric(a))), (4, 3, 3), (4, 3, 2)),
    "lstsq": (lambda a, b: linalg.lstsq(a, b).solution, (3, 5, 2), (3, 5, 4)),
    "tensorsolve": (linalg.tensorsolve, (2, 3, 6), (2, 3)),
    "householder_product": (lambda a, t: linalg.householder_product(a / 8, t / 4), (4, 5, 3), (4, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", EQUATIONS)
@pytest.mark.untraced
def test_equations(holds, name):
    """Solutions and their gradients do not depend on how either side is laid out; sides broadcast."""
    fn, left, right = EQUATIONS[name]
    holds(fn, matrices(*left) if len(left) > 1 else left, right)


def test_a_right_hand_side_is_never_taken_for_vectors(holds):
    """A right-hand side stays a matrix even if its rows equal the local number of matrices."""
    holds(linalg.solve, matrices(4, 2, 2), (2, 2), limits={(2,): 20, (4,): 10, (2, 2): 10})


PRODUCTS = {
    "cross": (linalg.cross, (4, 3), (4, 3)),
    "cross broadcast": (lambda x, y: linalg.cross(x, y, dim=1), (4, 3, 5), (1, 3, 5)),
    "cross by size": (torch.cross, (3, 4, 3), (3, 4, 3)),
    "cross along a dim": (lambda x, y: torch.cross(x, y, dim=1), (3, 3), (3, 3)),
    "multi_dot": (lambda x, y: linalg.multi_dot([x, y, x]), (4, 5), (5, 4)),
    "vecdot": (linalg.vecdot, (4, 5), (4, 5)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(holds, name):
    """Products of vectors and matrices have the plain values; cross finds its dim of size 3 in the global shape."""
    holds(*PRODUCTS[name])


def test_vander(holds):
    """The powers of vander, and their default number, are those of the global tensor."""
    holds(linalg.vander, (4, 5))
    holds(lambda x: linalg.vander(x, N=3), (7,))


def test_covariance(holds):
    """Covariance of sharded variables, observations and weights has the plain values and gradients."""
    holds(torch.cov, (4, 7))
    holds(lambda x, w: torch.cov(x, correction=0, aweights=w * w), (4, 7), (7,))
    holds(torch.corrcoef, (4, 7))


@pytest.mark.parametrize("fn", [linalg.inv, linalg.eigh, linalg.svd, linalg.qr, linalg.det])
def test_sharded_leading_dims_cost_nothing(ranks, fn):
    """Functions of matrices with sharded leading dims communicate nothing."""

    def run(mesh):
        x = DTensor.from_local(torch.eye(3).expand(2, 3, 3).contiguous(), mesh, [Shard(0)])
        with record_events() as events:
            out = fn(x)
        first = out[0] if isinstance(out, tuple) else out
        return len(events), first.placements

    assert ranks(2, run) == [(0, (Shard(0),))] * 2


def test_sharded_matrices_are_gathered_once(ranks):
    """A sharded matrix is gathered once, and the event is logged."""

    def run(mesh):
        x = DTensor.from_local(torch.eye(4).chunk(2)[mesh.coordinate[0]], mesh, [Shard(0)])
        with record_events() as events:
            out = linalg.inv(x)
        return [event.collective for event in events], out.placements

    assert ranks(2, run) == [(["all_gather"], (Replicate(),))] * 2


def test_right_hand_sides_may_be_partial(ranks):
    """A partial right-hand side gives a partial solution without communication, since solve is linear in it."""

    def run(mesh):
        a = DTensor.from_local(torch.eye(3) * 2, mesh)
        b = DTensor.from_local(torch.ones(3, 2), mesh, [Partial()])
        with record_events() as events:
            out = linalg.solve(a, b)
        return len(events), out.placements, out.full_tensor().tolist()

    assert ranks(2, run) == [(0, (Partial("sum"),), [[1.0, 1.0]] * 3)] * 2


DISTANCES = {
    **{
        f"cdist {p}": (lambda x, y, p=p: torch.cdist(x, y, p=p), (3, 5, 4), (3, 6, 4))
        for p in (0.0, 1.0, 2.0, 3.0, np.inf)
    },
    "cdist in planes": (torch.cdist, (2, 5, 3), (2, 4, 3)),
    "cdist of vectors": (lambda x, y: torch.cdist(x, y, p=1.0), (5, 3), (4, 3)),
    "cdist without a product": (
        lambda x, y: torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist"), (26, 3), (4, 3),
    ),
    "cdist of many": (torch.cdist, (26, 2), (3, 2)),
    "cdist, broadcast": (torch.cdist, (5, 4), (3, 6, 4)),
    "pdist": (lambda x: F.pdist(x, 3.0), (5, 4)),
    "pairwise": (F.pairwise_distance, (5, 4), (5, 4)),
    "pairwise, broadcast": (lambda x, y: F.pairwise_distance(x, y, p=1.0, keepdim=True), (5, 4), (1, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", DISTANCES)
def test_distances(holds, name):
    """Distances between sharded vectors are the plain ones."""
    holds(DISTANCES[name][0], *DISTANCES[name][1:], limits={(2,): 12, (3,): 6, (4,): 3, (2, 2): 3})


def test_distances_are_computed_the_way_one_device_does(ranks):
    """The algorithm (matmul from 26 points on) is chosen by the global size, not by the local one."""

    def run(mesh):
        x = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
        result = torch.cdist(distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(x, mesh, [Shard(0)]))
        return float((result.full_tensor() - torch.cdist(x, x)).abs().max())

    assert max(ranks(3, run)) < 2e-3


MISFITS = {
    "cross": (
        linalg.cross, (4, 3), (3,),
        "cross(x=f64[4@tp, 3], y=f64[3@tp]): x [4, 3] and y [3] do not match along dim 1",
    ),
    "cross without a dim of 3": (torch.cross, (4, 2), (4, 2), "cross: no dim of size 3 in [4, 2] and [4, 2]"),
    "vander": (linalg.vander, (), "vander(x=f64[]): x needs at least 1 dim"),
    "qr": (
        lambda x: linalg.qr(x, "full"), (4, 3),
        "qr(x=f64[4@tp, 3]): mode must be one of 'reduced', 'complete', 'r', got 'full'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_a_call_that_does_not_fit_is_refused(refuses, name):
    """A call that fails on one device fails on every rank with its reason, before anything moves."""
    refuses(*MISFITS[name])
