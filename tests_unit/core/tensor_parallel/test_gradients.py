"""The gradients that a distributed run may get wrong: each is the dense one, on every rank, with no factor.

Every function runs on both frameworks in float64, under random cotangents; compared are the outputs and the gradients
of every input and every parameter, each in the layout that the gradient contract gives it, within 64 units in the last
place of the largest value.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.verify.check import check_function

MESHES = pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2), (2, 3)], ids=str)
R, P, S0, S1, S2 = Replicate(), Partial(), Shard(0), Shard(1), Shard(2)
EPS = 1e-5


def torch_functions():
    """What the cases call, as PyTorch spells it."""
    import torch
    from torch.nn import functional

    return SimpleNamespace(
        linear=functional.linear,
        tanh=torch.tanh,
        rsqrt=torch.rsqrt,
        embedding=functional.embedding,
    )


def mindspore_functions():
    """What the cases call, as MindSpore spells it and runs it in float64 on CPU."""
    from mindspore import mint, ops

    return SimpleNamespace(
        linear=mint.nn.functional.linear,
        tanh=mint.tanh,
        rsqrt=mint.rsqrt,
        embedding=lambda ids, w: ops.gather(w, ids, 0),
    )


FUNCTIONS = {"torch": torch_functions, "mindspore": mindspore_functions}


def sample(*shapes, seed=0):
    """Random float64 arrays."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


def check(platform_name, case, arrays, mesh, tries):
    """Check ``case`` in every combination of the placements of its operands; none may be refused.

    Args:
        platform_name: the framework.
        case: takes the table of functions, then tensors.
        arrays: the dense operands.
        mesh: its shape.
        tries: per operand what to try, a placement for each of two axes; one axis takes the last.
    """

    def run(*tensors):
        return case(FUNCTIONS[platform_name](), *tensors)

    placements = [list(dict.fromkeys(choice[-len(mesh) :] for choice in choices)) for choices in tries]
    report = check_function(run, arrays, mesh, platform=platform_name, placements=placements)
    assert report.ok, report.wrong[:5]
    assert report.rejected == []
    assert report.forward == np.prod([len(some) for some in placements])
    assert report.backward == report.forward * sum(array.dtype.kind == "f" for array in arrays)


def mlp(functions, x, w1, b1, w2, b2):
    """A column-parallel layer, a nonlinearity and a row-parallel layer."""
    return functions.linear(functions.tanh(functions.linear(x, w1, b1)), w2, b2)


@MESHES
def test_column_then_row_of_uneven_widths(platform_name, mesh):
    """Widths 7, 10 and 5 that divide by no mesh; two axes are data x tensor, or both tensor."""
    arrays = sample((5, 7), (10, 7), (10,), (5, 10), (5,))
    column, row = [(R, S0), (S0, S0)], [(R, S1), (S1, S1)]
    check(platform_name, mlp, arrays, mesh, [[(R, R), (S0, R)], column, [(R, S0)], row, [(R, R)]])


@MESHES
def test_column_then_row_of_a_sharded_sequence(platform_name, mesh):
    """The same between shards of a sequence of 5: gathered before, every weight's gradient whole or a true shard."""
    arrays = sample((2, 5, 7), (10, 7), (10,), (5, 10), (5,), seed=1)
    check(
        platform_name,
        mlp,
        arrays,
        mesh,
        [[(S0, S1), (R, S1)], [(R, S0), (R, R)], [(R, S0)], [(R, S1), (R, R)], [(R, R)]],
    )


def batch(functions, x, w, b):
    """A layer's output, and the mean over the batch of its squares."""
    y = functions.tanh(functions.linear(x, w, b))
    return y, (y * y).mean()


@MESHES
@pytest.mark.parametrize("size", [7, 1], ids=["uneven", "empty on most ranks"])
def test_data_parallel_of_an_uneven_batch(platform_name, mesh, size):
    """A batch that divides by no mesh: its mean weighs samples, not ranks, and so do the replicated weights' sums."""
    arrays = sample((size, 3), (4, 3), (4,), seed=2)
    check(platform_name, batch, arrays, mesh, [[(S0, S0), (R, S0), (S0, R)], [(R, R)], [(R, R)]])


@MESHES
def test_data_parallel_of_averages(platform_name, mesh):
    """A batch held as a partial sum or as shards, against sharded weights (FSDP's storage)."""
    arrays = sample((7, 3), (4, 3), (4,), seed=3)
    check(platform_name, batch, arrays, mesh, [[(S0, S0), (R, P)], [(S0, S0), (R, S1)], [(S0, S0)]])


def layer_norm(functions, x, weight, bias):
    """Layer norm written out."""
    centered = x - x.mean(-1, keepdim=True)
    return centered * functions.rsqrt((centered * centered).mean(-1, keepdim=True) + EPS) * weight + bias


def rms_norm(functions, x, weight):
    """Root-mean-square norm written out."""
    return x * functions.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


SEQUENCES = [(S1, S1), (S0, S1), (R, S1), (S1, S0)]


@MESHES
def test_layer_norm_of_a_sharded_sequence(platform_name, mesh):
    """A sharded sequence of 5: the replicated weight and bias get the sum over all ranks' positions."""
    check(platform_name, layer_norm, sample((2, 5, 7), (7,), (7,), seed=4), mesh, [SEQUENCES, [(R, R)], [(R, R)]])


@MESHES
def test_rms_norm_of_a_sharded_sequence(platform_name, mesh):
    """The same without a bias, and with the normed dim itself sharded."""
    tries = [[*SEQUENCES, (S2, S1), (S1, S2)], [(R, R)]]
    check(platform_name, rms_norm, sample((2, 5, 7), (7,), seed=5), mesh, tries)


def block(functions, x, weight, bias, w1, b1, w2, b2):
    """A norm, an MLP and a residual: one tensor used twice."""
    return x + mlp(functions, layer_norm(functions, x, weight, bias), w1, b1, w2, b2)


@MESHES
def test_norm_before_tensor_parallel(platform_name, mesh):
    """A block under sequence and tensor parallelism: every parameter, through the gather, the reduction and around."""
    arrays = sample((2, 5, 7), (7,), (7,), (10, 7), (10,), (7, 10), (7,), seed=6)
    tries = [[(S0, S1), (S1, S1)], [(R, R)], [(R, R)], [(R, S0)], [(R, S0)], [(R, S1)], [(R, R)]]
    check(platform_name, block, arrays, mesh, tries)


@MESHES
def test_row_wise_bias(platform_name, mesh):
    """The bias of a layer whose output is a sum over ranks is added once, and gets its gradient once."""

    def row(functions, x, w, b):
        return functions.linear(x, w, b), functions.linear(x, w) + b

    tries = [[(S1, S1), (S0, S1)], [(R, S1), (S1, S1)], [(R, R), (R, S0), (R, P)]]
    check(platform_name, row, sample((3, 7), (5, 7), (5,), seed=7), mesh, tries)


@MESHES
def test_embedding_of_an_uneven_vocabulary(platform_name, mesh):
    """A sharded vocabulary of 11: rows used twice collect both cotangents, rows of other ranks none."""
    ids = np.array([[0, 10, 5, 5, 3], [7, 0, 8, 4, 10], [1, 6, 5, 9, 3]], dtype=np.int64)
    tries = [[(R, R), (S0, R), (S0, S1)], [(R, S0), (S0, S0), (S0, R), (S0, S1)]]

    def embedding(functions, ids, w):
        y = functions.embedding(ids, w)
        return y, y * y

    check(platform_name, embedding, [ids, *sample((11, 3), seed=8)], mesh, tries)
