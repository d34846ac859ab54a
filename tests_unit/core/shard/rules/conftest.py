"""Shared by tests of rules: samples by shape, and the check of a function on many meshes."""

import numpy as np
import pytest

from hyper_parallel.verify.checker.function import check_function

# Combinations of placements that are sampled per mesh; all of them if there are fewer.
LIMITS = {(2,): 20, (3,): 7, (4,): 4, (2, 2): 4}


def sample(spec, number):
    """Normal values for a shape, integers below `high` for `(high, shape)`, an array as it is."""
    if isinstance(spec, np.ndarray):
        return spec
    rng = np.random.default_rng([number, 7])
    if len(spec) == 2 and isinstance(spec[1], tuple):
        return rng.integers(0, spec[0], spec[1])
    return rng.standard_normal(spec)


@pytest.fixture
def holds():
    """`holds(fn, *specs)`: values and gradients of `fn` are the plain ones under the placements of every mesh."""

    def check(fn, *specs, limits=None, refused=False, platform="torch"):
        arrays = [sample(spec, number) for number, spec in enumerate(specs)]
        for mesh, limit in (limits or LIMITS).items():
            report = check_function(fn, arrays, mesh, platform=platform, limit=limit)
            assert report.ok, (mesh, report.forward, report.wrong[:5])
            assert refused or not report.rejected, (mesh, report.rejected[:3])
        return report

    return check


@pytest.fixture
def ranks():
    """`ranks(world, fn)`: results of `fn(mesh)` on a simulated mesh of one axis called tp."""
    from hyper_parallel.core.dtensor.mesh import init_device_mesh
    from hyper_parallel.verify.simulate import simulate

    def run(world, fn, shape=None, names=("tp",)):
        return simulate(lambda: fn(init_device_mesh("cpu", shape or (world,), mesh_dim_names=names)), world, "torch")

    return run


@pytest.fixture
def refuses(ranks):
    """`refuses(fn, *specs, words)`: every rank refuses the call with `words` before anything moves.

    Operands are sharded along dim 0. One device refuses the call as well, unless `plain_too` is False.
    """
    import torch

    from hyper_parallel.core.dtensor.events import record_events
    from hyper_parallel.core.dtensor.module import distribute_tensor
    from hyper_parallel.core.dtensor.placements import Replicate, Shard

    def check(fn, *specs_and_words, plain_too=True):
        *specs, words = specs_and_words
        tensors = [torch.from_numpy(np.asarray(sample(spec, number))) for number, spec in enumerate(specs)]
        if plain_too:
            with pytest.raises((RuntimeError, IndexError, TypeError, ValueError, AssertionError)):
                fn(*(tensor.clone() for tensor in tensors))

        def run(mesh):
            operands = [distribute_tensor(x, mesh, [Shard(0) if x.ndim else Replicate()]) for x in tensors]
            with record_events() as events, pytest.raises((ValueError, TypeError, NotImplementedError)) as caught:
                fn(*operands)
            return events.collectives(), str(caught.value)

        assert ranks(2, run) == [([], words)] * 2

    return check
