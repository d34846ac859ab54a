"""Small programs written by hand, for the tests of what runs, judges and shrinks programs."""

import numpy as np

from hyper_parallel import Replicate, Shard
from hyper_parallel.verify.fuzz.program import Leaf, Program, Step, TensorRef

SIZES = (5, 3)
ROWS = (Shard(0),)


def x(number):
    """Return the place of a tensor in arguments."""
    return TensorRef(number)


def leaf(shape=SIZES, placements=ROWS, dtype="float64", *, seed=0, integral=True, requires_grad=True):
    """Return a leaf with random values."""
    rng = np.random.default_rng([seed, len(shape)])
    values = rng.integers(-3, 4, shape) if integral else rng.standard_normal(shape)
    return Leaf(values.astype("float32" if dtype == "bfloat16" else dtype), dtype, tuple(placements), requires_grad)


def step(call, *args, outs=(1,), several=False, aliases=False, **kwargs):
    """Return a step."""
    return Step(call, args, kwargs, tuple(outs), several, aliases)


def unary(call, *, mesh=(3,), mode="backward", **options):
    """Return a program of one call on one sharded leaf, differentiated with another."""
    placements = tuple(Shard(0) if axis == 0 else Replicate() for axis in range(len(mesh)))
    leaves = {0: leaf(placements=placements, **options)}
    if mode == "forward":
        return Program((0, 0), mesh, leaves, (step(call, x(0)),), integral=options.get("integral", True))
    integral = options.get("integral", True)
    leaves[2] = leaf(placements=placements, seed=1, requires_grad=mode == "double", integral=integral)
    return Program((0, 0), mesh, leaves, (step(call, x(0)),), mode, (1,), (2,), integral=integral)
