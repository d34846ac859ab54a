"""Writing in place, where some rank's piece is empty and where what is written has a gradient."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.platform.select import platform_named, use_platform
from hyper_parallel.verify.check import check_function

pytestmark = pytest.mark.platforms("mindspore")

RNG = np.random.default_rng(0)
X, Y, ROW = RNG.standard_normal((2, 3)), RNG.standard_normal((2, 3)) + 3, RNG.standard_normal(3) + 3

SQUARE, FIRST = RNG.standard_normal((3, 3)), np.zeros(1, np.int64)


def _written(z, write, plain):
    """``z`` written in place; on plain tensors, whose CPU kernels do not write, what that means."""
    if not isinstance(z, DTensor):
        return plain(z)
    write(z)
    return z


def _product(x, y):
    from mindspore import mint

    return mint.matmul(x, y)


def _over(row, z):
    """``row`` in place of the first of ``z``."""
    from mindspore import mint

    return mint.cat([row, z[1:]], 0)


def _iadd(x, y):
    z = x * 2
    z += y
    return z


def _isub(x, y):
    z = x * 2
    z -= y
    return z


def _imul(x, y):
    z = x * 2
    z *= y
    return z


def _idiv(x, y):
    z = x * 2
    z /= y
    return z


def _set(x, y):
    z = x * 2
    z[:, 1:] = y if len(y.shape) == 1 else y[:, 1:]
    return z * 3


def _set_number(x, y):
    z = x * 2
    z[:, 1:] = 4.0
    return z * y


WRITERS = {
    "+=": (_iadd, ROW),
    "+= of the same shape": (_iadd, Y),
    "-=": (_isub, ROW),
    "*=": (_imul, ROW),
    "/=": (_idiv, ROW),
    "setitem": (_set, Y),
    "setitem of a number": (_set_number, ROW),
    "add_": (lambda x, y: _written(x * 2, lambda z: z.add_(y, alpha=2), lambda z: z + 2 * y), ROW),
    "sub_": (lambda x, y: _written(x * 2, lambda z: z.sub_(y), lambda z: z - y), ROW),
    "mul_": (lambda x, y: _written(x * 2, lambda z: z.mul_(y), lambda z: z * y), ROW),
    "div_": (lambda x, y: _written(x * 2, lambda z: z.div_(y), lambda z: z / y), ROW),
    "copy_": (lambda x, y: _written(x * 2, lambda z: z.copy_(y), lambda z: z * 0 + y) * 3, ROW),
    "copy_ of the same shape": (lambda x, y: _written(x * 2, lambda z: z.copy_(y), lambda z: z * 0 + y) * 3, Y),
    "exp_": (lambda x, y: _written(x * 2, lambda z: z.exp_(), lambda z: z.exp()) * y, ROW),
    "clamp_": (lambda x, y: _written(x * 2, lambda z: z.clamp_(-1.0, 1.0), lambda z: z.clamp(-1.0, 1.0)) * y, ROW),
    "masked_fill_": (
        lambda x, y: _written(x * 2, lambda z: z.masked_fill_(z > 1, 3.0), lambda z: z.masked_fill(z > 1, 3.0)) * y,
        ROW,
    ),
    "fill_": (lambda x, y: (_written(x * 2, lambda z: z.fill_(2.0), lambda z: z * 0 + 2) + x) * y, ROW),
    "zero_": (lambda x, y: (_written(x * 2, lambda z: z.zero_(), lambda z: z * 0) + x) * y, ROW),
    "addmm_": (lambda x, y: _written(x * 2, lambda z: z.addmm_(x, y), lambda z: z + _product(x, y)), SQUARE),
    "index_copy_": (
        lambda x, at: _written(x * 2, lambda z: z.index_copy_(0, at, x[:1]), lambda z: _over(x[:1], z)),
        FIRST,
    ),
    "index_fill_": (
        lambda x, at: _written(x * 2, lambda z: z.index_fill_(0, at, 1.5), lambda z: _over(z[:1] * 0 + 1.5, z)),
        FIRST,
    ),
    "scatter_": (
        lambda x, at: _written(x * 2, lambda z: z.scatter_(0, at, x[:1]), lambda z: _over(x[:1], z)),
        np.zeros((1, 3), np.int64),
    ),
}


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_writes_of_one_rank_are_plain_ones(name):
    """Alone in its world, a rank writes the plain values: the same as below, once and in this process."""
    fn, y = WRITERS[name]
    platform = platform_named("mindspore")
    with use_platform("mindspore"):
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("m",))
        given = [platform.from_numpy(np.asarray(one)) for one in (X, y)]
        found = fn(*(DTensor.from_local(one, mesh, [Shard(0)]) for one in given))
        np.testing.assert_allclose(found.full_tensor().asnumpy(), fn(*given).asnumpy(), rtol=1e-6)


@pytest.mark.parametrize("mesh", [(3,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", sorted(WRITERS))
def test_writes_into_empty_pieces_keep_every_rank_together(name, mesh):
    """What is written into a tensor of which a rank holds nothing has the plain values and gradients on every rank."""
    fn, y = WRITERS[name]
    report = check_function(fn, [X, y], mesh, platform="mindspore", limit=12)
    assert report.ok, report.wrong[:3]
    assert all("writing in place would have to change the layout of x" in one for one in report.rejected)
