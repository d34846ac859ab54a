"""Reference for layouts in NumPy: global tensors from local ones, and every layout; independent of plans."""

from __future__ import annotations

import itertools
import math

import numpy as np

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh

REDUCE = {"sum": np.add.reduce, "avg": lambda a: np.mean(a, axis=0), "max": np.maximum.reduce,
          "min": np.minimum.reduce, "prod": np.multiply.reduce, "all": np.logical_and.reduce,
          "any": np.logical_or.reduce}  # fmt: skip


def grid(shape, rank=0):
    """A mesh with axes a, b, c as ``rank`` sees it."""
    ranks = tuple(range(math.prod(shape)))
    return DeviceMesh._interned("cpu", tuple(shape), ranks, tuple("abcd"[: len(shape)]), rank)


def chunks(size, parts):
    """The bounds of chunks by the ceil rule, computed with a loop."""
    step = math.ceil(size / parts)
    edges = [min(step * i, size) for i in range(parts + 1)]
    return list(itertools.pairwise(edges))


def box(layout, at):
    """The half-open ranges of the rank at ``at``, found by splitting axis after axis."""
    results = []
    for size, axes in zip(layout.shape, layout.dim_axes, strict=True):
        low, high = 0, size
        for axis in axes:
            a, b = chunks(high - low, layout.mesh.shape[axis])[at[axis]]
            low, high = low + a, low + b
        results.append(slice(low, high))
    return tuple(results)


def assemble(locals_, layout):
    """The global tensor of ``locals_`` (one array per rank, row-major); replicas must be exactly equal."""
    values = {}
    for position, local in zip(np.ndindex(*layout.mesh.shape), locals_, strict=True):
        values[position] = np.asarray(local)
    for axis, op in sorted(layout.partials, reverse=True):
        merged = {}
        for position in values:
            group = [values[(*position[:axis], i, *position[axis + 1 :])] for i in range(layout.mesh.shape[axis])]
            merged[position] = REDUCE[op](np.stack(group)) if group else None
        values = merged
    whole = np.full(layout.shape, np.nan)
    filled = np.zeros(layout.shape, bool)
    for position, local in values.items():
        where = box(layout, position)
        assert local.shape == whole[where].shape, (position, local.shape, whole[where].shape)
        np.testing.assert_allclose(whole[where][filled[where]], local[filled[where]], rtol=1e-12)
        whole[where], filled[where] = local, True
    assert filled.all()
    return whole


def scatter(dense, layout, rng):
    """The local arrays of ``dense``, one per rank; partial values are random and of both signs."""
    parts = {(): dense}
    for axis, op in layout.partials:
        parts = {
            (*key, (axis, i)): partial
            for key, value in parts.items()
            for i, partial in enumerate(decompose(value, op, layout.mesh.shape[axis], rng))
        }
    results = []
    for position in np.ndindex(*layout.mesh.shape):
        key = tuple((axis, position[axis]) for axis, _ in layout.partials)
        results.append(np.array(parts[key][box(layout, position)], order="C"))
    return results


def decompose(value, op, count, rng):
    """Return ``count`` arrays whose reduction by ``op`` is ``value``."""
    if op in ("sum", "avg"):
        partials = [rng.normal(size=value.shape) * 3 for _ in range(count - 1)]
        scale = 1 if op == "sum" else count
        return [*partials, value * scale - sum(partials)]
    if op in ("max", "min"):
        sign = 1 if op == "max" else -1
        holder = rng.integers(count, size=value.shape)
        return [np.where(holder == i, value, value - sign * rng.random(value.shape)) for i in range(count)]
    if op == "prod":
        signs = [rng.choice([-1, 1], size=value.shape) for _ in range(count - 1)]
        partials = [sign * rng.uniform(0.5, 2, size=value.shape) for sign in signs]
        return [*partials, value / math.prod(partials)]
    raise AssertionError(op)


def dual(layout):
    """The layout of the gradient."""
    return Layout.of(layout.mesh, layout.dim_axes, (), layout.shape)


def every_layout(mesh, shape, partials=("sum",)):
    """Every layout, including every order of axes within a dim."""
    choices = [("r",), *[("s", d) for d in range(len(shape))], *[("p", op) for op in partials]]
    results = []
    for picks in itertools.product(choices, repeat=mesh.ndim):
        dim_axes = [[axis for axis, pick in enumerate(picks) if pick == ("s", d)] for d in range(len(shape))]
        owed = [(axis, pick[1]) for axis, pick in enumerate(picks) if pick[0] == "p"]
        results.extend(
            Layout.of(mesh, dims, owed, shape) for dims in itertools.product(*map(itertools.permutations, dim_axes))
        )
    return results


def for_rank(layout, rank):
    """The same layout as another rank sees it."""
    return Layout.of(grid(layout.mesh.shape, rank), layout.dim_axes, layout.partials, layout.shape)
