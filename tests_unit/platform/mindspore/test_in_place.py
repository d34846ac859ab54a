"""Writing in place, where some rank's piece is empty and where what is written has a gradient."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.verify.check import check_function

pytestmark = pytest.mark.platforms("mindspore")

RNG = np.random.default_rng(0)
X, Y, ROW = RNG.standard_normal((2, 3)), RNG.standard_normal((2, 3)) + 3, RNG.standard_normal(3) + 3


def _written(z, write, plain):
    """``z`` written in place; on plain tensors, whose CPU kernels do not write, what that means."""
    if not isinstance(z, DTensor):
        return plain(z)
    write(z)
    return z


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
}


@pytest.mark.parametrize("mesh", [(3,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", sorted(WRITERS))
@pytest.mark.untraced
def test_writes_into_empty_pieces_keep_every_rank_together(name, mesh):
    """What is written into a tensor of which a rank holds nothing has the plain values and gradients on every rank."""
    fn, y = WRITERS[name]
    report = check_function(fn, [X, y], mesh, platform="mindspore", limit=12)
    assert report.ok, report.wrong[:3]
    assert all("writing in place would have to change the layout of x" in one for one in report.rejected)
