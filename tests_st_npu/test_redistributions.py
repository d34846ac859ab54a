"""The table of all redistributions over real processes: uneven and empty shards, reductions, dtypes, gradients.

Values are small integers, so that every device and every order of summation gives exactly NumPy's result.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hyper_parallel import DTensor, Partial, Replicate, Shard, distribute_tensor
from hyper_parallel.platform.select import current_platform

pytestmark = [pytest.mark.launch("processes"), pytest.mark.world_size(3)]

_SHAPES = ((5, 7), (1, 4))
"""On three ranks: shards of 2, 2 and 1 rows or 3, 3 and 1 columns, then of 1, 0 and 0 rows or 2, 2 and 0 columns."""

_MOVES = ("float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool")
_REDUCED = {"float32": ("sum", "avg", "max", "min"), "float16": ("sum", "max"), "bfloat16": ("sum", "max"),
            "int64": ("sum", "max", "min"), "int32": ("sum", "min")}  # fmt: skip
_REDUCTIONS = {"sum": sum, "avg": lambda parts: sum(parts) / len(parts), "max": np.maximum.reduce,
               "min": np.minimum.reduce}  # fmt: skip
_PLAIN = (Shard(0), Shard(1), Replicate())


def _parts(shape, ranks, dtype):
    """Return a partial value for every rank: multiples of the number of ranks, so that averages are exact, too."""
    rng = np.random.default_rng(sum(shape))
    parts = [ranks * rng.integers(0, 2 if dtype == "bool" else 5, shape) for _ in range(ranks)]
    return [np.minimum(part, 1) if dtype == "bool" else part for part in parts]


def _tensor(array, dtype, device):
    """Return a plain tensor of this dtype on the device."""
    platform = current_platform()
    plain = platform.from_numpy(array.astype("float32" if dtype in ("float16", "bfloat16") else dtype))
    return platform.to_device(platform.tensor_type_cast(plain, platform.str_to_dtype(dtype)), device)


def _whole(x):
    """Return the global value of a DTensor as an array of float64."""
    platform = current_platform()
    return platform.tensor_to_numpy(platform.tensor_type_cast(x.full_tensor(), platform.str_to_dtype("float32")))


def _sources(parts, rank, dtype, mesh, device):
    """Yield every source with the global value that it stands for."""
    for placement in _PLAIN:
        yield placement, distribute_tensor(_tensor(parts[0], dtype, device), mesh, [placement]), parts[0]
    for op in _REDUCED.get(dtype, ()):
        x = DTensor.from_local(_tensor(parts[rank], dtype, device), mesh, [Partial(op)])
        yield Partial(op), x, _REDUCTIONS[op](parts)


@pytest.mark.parametrize("dtype", _MOVES)
def test_every_source_reaches_every_target(dtype, mesh, device, rank):
    """From every placement and reduction to every other one the dtype and the global value are unchanged."""
    targets = (*_PLAIN, *(Partial(op) for op in _REDUCED.get(dtype, ())))
    for shape in _SHAPES:
        parts = _parts(shape, mesh.size(), dtype)
        for before, x, wanted in _sources(parts, rank, dtype, mesh, device):
            for after in targets:
                moved = x.redistribute(placements=[after])
                assert moved.to_local().dtype == x.to_local().dtype
                np.testing.assert_array_equal(_whole(moved), wanted, err_msg=f"{dtype} {shape}: {before} to {after}")


def _torch_gradient(weighted, leaf):
    """The gradient of a function of ``leaf``."""
    leaf.requires_grad_()
    weighted(leaf).backward()
    return leaf.grad


def _mindspore_gradient(weighted, leaf):
    """The same by MindSpore's transform."""
    import mindspore

    return mindspore.value_and_grad(weighted, 0)(leaf)[1]


_GRADIENTS = {"torch": _torch_gradient, "mindspore": _mindspore_gradient}


def test_gradients_come_back_through_every_redistribution(mesh, device, rank):
    """The gradient of what was moved is the cotangent, of a shard its part, of every summand of a sum the whole."""
    cotangents, gradient_of = np.random.default_rng(8), _GRADIENTS[current_platform().platform_type]
    for shape in _SHAPES:
        parts = _parts(shape, mesh.size(), "float32")
        for before, after in itertools.product((*_PLAIN, Partial()), (*_PLAIN, Partial())):
            wanted = cotangents.integers(-4, 5, shape)
            weights = _tensor(wanted, "float32", device)
            leaf = _tensor(parts[rank if before == Partial() else 0], "float32", device)
            leaf = leaf if before == Partial() else distribute_tensor(leaf, mesh, [before])

            def weighted(leaf, before=before, after=after, weights=weights):
                x = DTensor.from_local(leaf, mesh, [before]) if before == Partial() else leaf
                return (x.redistribute(placements=[after]).full_tensor() * weights).sum()

            gradient = gradient_of(weighted, leaf)
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            array = current_platform().tensor_to_numpy(whole)
            np.testing.assert_array_equal(array, wanted, err_msg=f"{shape}: {before} to {after}")
