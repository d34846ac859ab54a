"""Gradients of a distributed run equal the dense ones on every rank, with no factor.

Every function runs on both frameworks in float64, under random cotangents; compared are the outputs and the gradients
of every input and every parameter, each in the layout that the gradient contract gives it, within 64 units in the last
place of the largest value.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.verify.checker.function import check_function

MESHES = pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2), (2, 3)], ids=str)
R, P, S0, S1, S2 = Replicate(), Partial(), Shard(0), Shard(1), Shard(2)
EPS = 1e-5


def torch_functions():
    """The functions of the cases, from PyTorch."""
    import torch
    from torch.nn import functional

    return SimpleNamespace(
        linear=functional.linear,
        tanh=torch.tanh,
        rsqrt=torch.rsqrt,
        embedding=functional.embedding,
    )


def mindspore_functions():
    """The functions of the cases, from MindSpore, as they run in float64 on CPU."""
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
    """Column and row parallel layers with widths that divide by no mesh have the dense gradients."""
    arrays = sample((5, 7), (10, 7), (10,), (5, 10), (5,))
    column, row = [(R, S0), (S0, S0)], [(R, S1), (S1, S1)]
    check(platform_name, mlp, arrays, mesh, [[(R, R), (S0, R)], column, [(R, S0)], row, [(R, R)]])


@MESHES
def test_column_then_row_of_a_sharded_sequence(platform_name, mesh):
    """Column and row parallel layers between sequence shards have the dense gradients."""
    arrays = sample((2, 5, 7), (10, 7), (10,), (5, 10), (5,), seed=1)
    check(
        platform_name,
        mlp,
        arrays,
        mesh,
        [[(S0, S1), (R, S1)], [(R, S0), (R, R)], [(R, S0)], [(R, S1), (R, R)], [(R, R)]],
    )


def batch(functions, x, w, b):
    """A layer's output, and the mean of its squares over the batch."""
    y = functions.tanh(functions.linear(x, w, b))
    return y, (y * y).mean()


@MESHES
@pytest.mark.parametrize("size", [7, 1], ids=["uneven", "empty on most ranks"])
def test_data_parallel_of_an_uneven_batch(platform_name, mesh, size):
    """The mean over an uneven batch weighs samples, not ranks, and so do gradients of replicated weights."""
    arrays = sample((size, 3), (4, 3), (4,), seed=2)
    check(platform_name, batch, arrays, mesh, [[(S0, S0), (R, S0), (S0, R)], [(R, R)], [(R, R)]])


@MESHES
def test_data_parallel_of_averages(platform_name, mesh):
    """A batch that is Partial or sharded, with weights sharded as in FSDP, has the dense gradients."""
    arrays = sample((7, 3), (4, 3), (4,), seed=3)
    check(platform_name, batch, arrays, mesh, [[(S0, S0), (R, P)], [(S0, S0), (R, S1)], [(S0, S0)]])


def layer_norm(functions, x, weight, bias):
    """Layer norm as a formula."""
    centered = x - x.mean(-1, keepdim=True)
    return centered * functions.rsqrt((centered * centered).mean(-1, keepdim=True) + EPS) * weight + bias


def rms_norm(functions, x, weight):
    """Root-mean-square norm as a formula."""
    return x * functions.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


SEQUENCES = [(S1, S1), (S0, S1), (R, S1), (S1, S0)]


@MESHES
def test_layer_norm_of_a_sharded_sequence(platform_name, mesh):
    """On a sharded sequence the gradients of replicated weight and bias are summed over all positions."""
    check(platform_name, layer_norm, sample((2, 5, 7), (7,), (7,), seed=4), mesh, [SEQUENCES, [(R, R)], [(R, R)]])


@MESHES
def test_rms_norm_of_a_sharded_sequence(platform_name, mesh):
    """RMS norm of a sharded sequence, and of a sharded normed dim, has the dense gradients."""
    tries = [[*SEQUENCES, (S2, S1), (S1, S2)], [(R, R)]]
    check(platform_name, rms_norm, sample((2, 5, 7), (7,), seed=5), mesh, tries)


def block(functions, x, weight, bias, w1, b1, w2, b2):
    """A norm, an MLP and a residual, so that a tensor is used twice."""
    return x + mlp(functions, layer_norm(functions, x, weight, bias), w1, b1, w2, b2)


@MESHES
def test_norm_before_tensor_parallel(platform_name, mesh):
    """A block under sequence and tensor parallelism has the dense gradient of every parameter."""
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
    """An embedding with an uneven sharded vocabulary adds up gradients of rows that are used twice."""
    ids = np.array([[0, 10, 5, 5, 3], [7, 0, 8, 4, 10], [1, 6, 5, 9, 3]], dtype=np.int64)
    tries = [[(R, R), (S0, R), (S0, S1)], [(R, S0), (S0, S0), (S0, R), (S0, S1)]]

    def embedding(functions, ids, w):
        y = functions.embedding(ids, w)
        return y, y * y

    check(platform_name, embedding, [ids, *sample((11, 3), seed=8)], mesh, tries)
