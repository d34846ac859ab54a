"""Scattering on MindSpore, whose own CPU kernels lose sums and write elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")

RNG = np.random.default_rng(7)
F32 = np.float32


def real(*shape):
    """Random numbers of both signs."""
    return RNG.standard_normal(shape).astype(F32)


def test_scatter_into_a_vector_after_one_into_a_matrix(canonical):
    """Scatter into a vector after one into a matrix is right, unlike MindSpore's CPU kernel."""
    import mindspore
    from mindspore import Tensor, mint

    local = platform_named("mindspore").local_op("scatter")
    matrix, vector, weights = real(5, 3), real(15), Tensor(real(15))
    for _ in range(3):
        mint.scatter(Tensor(matrix), 0, Tensor(np.zeros((1, 3), np.int64)), Tensor(real(1, 3)))
        places, source = RNG.permutation(15)[:4], real(4)
        wanted = vector.copy()
        wanted[places] = source
        assert (canonical("scatter", vector, 0, places, source) == wanted).all()

        def weighed(x, src, places=places):
            return (local(x=x, dim=0, index=Tensor(places), src=src) * weights).sum()

        grads = mindspore.grad(weighed, (0, 1))(Tensor(vector), Tensor(source))
        kept = weights.asnumpy().copy()
        kept[places] = 0
        assert (grads[0].asnumpy() == kept).all()
        assert (grads[1].asnumpy() == weights.asnumpy()[places]).all()


def test_scatter_of_a_value_and_with_a_reduction(canonical):
    """A number is written by either name; a reduction that MindSpore lacks is refused, never ignored."""
    x, places = real(5, 3), np.array([[0, 1, 2]])
    wanted = x.copy()
    wanted[[0, 1, 2], [0, 1, 2]] = 1.5
    assert (canonical("scatter", x, 0, places, 1.5) == wanted).all()
    assert (canonical("scatter", x, 0, places, value=1.5) == wanted).all()
    with pytest.raises(UnsupportedOperatorError) as caught:
        canonical("scatter", x, 0, places, real(1, 3), reduce="add")
    assert str(caught.value) == "scatter with reduce='add': MindSpore has no such operator; scatter_add adds"


def test_no_sum_is_lost_where_indices_repeat(canonical):
    """Repeated indices add up every value, unlike in MindSpore's own multithreaded kernel."""
    rng = np.random.default_rng(0)
    for dim in (0, 1):
        for _ in range(100):
            x, index = rng.integers(-4, 5, (50, 20)).astype(np.float64), rng.integers(0, 20, (200, 20))
            index = index if dim == 0 else index.reshape(50, 80)
            source = rng.integers(-4, 5, index.shape).astype(np.float64)
            wanted = x.copy()
            np.add.at(wanted, (index, np.arange(20)) if dim == 0 else (np.arange(50)[:, None], index), source)
            assert (canonical("scatter_add", x, dim, index, source) == wanted).all()


def test_indices_out_of_bounds_are_an_error(canonical):
    """An index out of bounds is refused and does not reach the next row; negative ones count from the end."""
    x, source = np.zeros((3, 4), np.float32), np.ones((1, 2), np.float32)
    assert canonical("scatter_add", x, 1, np.array([[-1, 0]]), source)[0].tolist() == [1, 0, 0, 1]
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        canonical("scatter_add", x, 1, np.array([[4, 0]]), source)


def test_sums_into_a_tensor_without_dims(kernel):
    """Sums into a tensor without dims use the single index 0."""
    assert kernel("scatter_add", np.asarray(1.5, F32), 0, np.asarray(0), np.asarray(2.0, F32)) == 3.5


def test_methods_pass_a_reduction_by_name():
    """``Tensor.scatter`` adds with ``reduce="add"``, takes the dim by either name, and refuses other reductions."""
    from mindspore import Tensor

    x, source, places = real(4, 3), real(2, 3), np.array([[1, 1, 3], [0, 1, 0]])

    def on_rank():
        mesh = init_device_mesh("cpu", (2,))
        matrix, index, values = (distribute_tensor(Tensor(a), mesh, [Shard(1)]) for a in (x, places, source))
        added = matrix.scatter(0, index, src=values, reduce="add").full_tensor().asnumpy()
        written = matrix.scatter(axis=0, index=index, src=values).full_tensor().asnumpy()
        with pytest.raises(UnsupportedOperatorError) as caught:
            matrix.scatter(0, index, src=values, reduce="multiply")
        return added, written, str(caught.value)

    sums, replaced = x.copy(), x.copy()
    np.add.at(sums, (places, np.arange(3)), source)
    np.put_along_axis(replaced, places, source, 0)
    for added, written, message in simulate(on_rank, 2, "mindspore"):
        assert np.allclose(added, sums, rtol=1e-6)
        assert (written == replaced).all()
        assert message == "scatter with reduce='multiply': MindSpore has no such operator; scatter_add adds"


def _rows_replaced(shape, grid):
    """Results, what is left in the tensor and in a parameter, and the refusal where gradients flow."""
    import mindspore
    from mindspore import Parameter, Tensor, ops

    mesh = init_device_mesh("cpu", shape)
    draw = np.random.default_rng(5)
    values, rows = draw.normal(size=(7, 5, 3)).astype(F32), draw.normal(size=(2, 2, 5, 3)).astype(F32)
    places = np.array([[6, 0], [3, 2]], np.int32)
    wanted = values.copy()
    wanted[places.reshape(-1)] = rows.reshape(-1, 5, 3)

    def placed(array, placements):
        return distribute_tensor(Tensor(array), mesh, placements)

    x, updates = placed(values, grid), placed(rows, [Shard(each.dim + 1) for each in grid])
    index = placed(places, [Replicate()] * len(grid))
    weight = Parameter(placed(values, grid))
    for result in (ops.ScatterUpdate()(x, index, updates), x, ops.scatter_update(weight, index, updates), weight):
        assert tuple(result.placements) == tuple(grid)
        np.testing.assert_array_equal(result.full_tensor().asnumpy(), wanted)
    with pytest.raises(UnsupportedOperatorError) as refused:
        mindspore.grad(lambda whole: ops.scatter_update(whole * 1, index, updates).sum())(x)
    return str(refused.value)


@pytest.mark.parametrize("shape, placements", [((2,), [Shard(1)]), ((3,), [Shard(2)]), ((2, 2), [Shard(1), Shard(2)])])
def test_rows_are_replaced_in_place(shape, placements):
    """``scatter_update`` replaces rows of tensors and parameters by several indices, without communication."""
    messages = simulate(_rows_replaced, int(np.prod(shape)), "mindspore", args=(shape, placements))
    wanted = "operator ScatterUpdate: MindSpore's gradient of the replaced rows is wrong; "
    assert {message.partition("\n")[0] for message in messages} == {f"{wanted}write x[index] = updates"}
