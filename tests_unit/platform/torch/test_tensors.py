from __future__ import annotations

from typing import NamedTuple

import pytest

from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.errors import UnsupportedOnBackend, UnsupportedOperatorError
from hyper_parallel.platform.select import get_torch_platform
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")


def test_shapes():
    """Joining, slicing and reshaping keep elements in row-major order, empty tensors included."""
    import torch

    platform, x = get_torch_platform(), torch.arange(6.0).reshape(2, 3)
    assert torch.equal(platform.cat([x, x[:0]], 0), x)
    assert platform.narrow(x, 1, 1, 2).tolist() == [[1, 2], [4, 5]]
    assert platform.reshape(x.T, (6,)).tolist() == [0, 3, 1, 4, 2, 5]
    assert platform.contiguous(x.T).stride() == (2, 1)


def test_a_tensor_cannot_move_to_a_device_that_is_not_there(monkeypatch):
    """The mesh of such a device is named with what is missing; meta tensors and those that are there are unchanged."""
    import torch

    from hyper_parallel.platform.torch import tensors

    platform, x, delayed = get_torch_platform(), torch.ones(2), torch.ones(2, device="meta")
    monkeypatch.setattr(tensors, "missing_device", lambda device: f"no {device}: buy one")
    assert platform.to_device(x, "cpu") is x
    assert platform.to_device(delayed, "npu") is delayed
    with pytest.raises(UnsupportedOnBackend) as caught:
        platform.to_device(x, "cuda")
    assert str(caught.value) == (
        "a mesh on cuda: PyTorch sees no such device; no cuda: buy one, or make the mesh for cpu"
    )
    monkeypatch.setattr(tensors, "missing_device", lambda _: "")
    assert platform.to_device(x, "meta").is_meta
    assert platform.differing_device(x, "cuda") == "cpu"


def test_zeros_without_memory_get_some():
    """Zeros that are only a mark, which PyTorch returns as some second gradients, can be sent and read, views too."""
    import torch

    platform = get_torch_platform()
    mark = torch._efficientzerotensor((3, 2))[1:]
    assert platform.contiguous(mark).data_ptr() % mark.element_size() == 0 < platform.contiguous(mark).data_ptr()
    assert platform.contiguous(mark).tolist() == platform.tensor_to_numpy(mark).tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("world", [2, 3])
def test_second_gradients_that_are_only_a_mark_are_gathered(world):
    """The second gradient of a norm beside a narrowed tensor is a view of zeros without memory; ranks read zeros."""
    import torch

    x, y = torch.randn(3, 3), torch.randn(2, 3)
    cotangents = [torch.randn(3), torch.randn(2, 1), torch.randn(3, 3), torch.randn(2, 3)]

    def program(x, y, by_norm, by_mean, by_x, by_y):
        joined = torch.cat((x, y))
        outputs = [torch.norm(joined, 1, 0), joined.narrow(0, 0, 2).mean(1, True)]
        first = torch.autograd.grad(outputs, [x, y], [by_norm, by_mean], create_graph=True)
        return [*first, *torch.autograd.grad(first, [x, y], [by_x, by_y])]

    def on_rank():
        mesh = init_device_mesh("cpu", (world,))
        leaves = [distribute_tensor(leaf, mesh, [Replicate()]).requires_grad_() for leaf in (x, y)]
        results = program(*leaves, *(distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in cotangents))
        moved = [result.redistribute(placements=[Shard(1)]) for result in results]
        return [tensor.full_tensor().detach().clone() for tensor in (*results, *moved)]

    expected = program(x.clone().requires_grad_(), y.clone().requires_grad_(), *cotangents)
    for results in simulate(on_rank, world, "torch"):
        for result, value in zip(results, [*expected, *expected], strict=True):
            torch.testing.assert_close(result, value.clone())


def test_copies_and_aliases():
    """A copy has new storage and no graph; a detached tensor has the same storage and no graph."""
    import torch

    platform, x = get_torch_platform(), torch.ones(2, requires_grad=True)
    for made, shares in ((platform.copy(x), False), (platform.detach(x), True)):
        assert not made.requires_grad
        assert (made.data_ptr() == x.data_ptr()) is shares


def test_makers():
    """Tensors are made with the given value, dtype and shape."""
    import torch

    platform = get_torch_platform()
    assert platform.zeros((2,), dtype=torch.int32).tolist() == [0, 0]
    assert platform.full((2,), 3.0, dtype=torch.float64).dtype is torch.float64
    assert platform.zeros_like(torch.ones(2, dtype=torch.int8)).dtype is torch.int8
    assert platform.ones_like(torch.zeros(2)).tolist() == [1, 1]
    assert platform.arange(1, 6, 2).tolist() == [1, 3, 5]


def test_kinds():
    """Floating and complex tensors may carry gradients, others not; sizes are in bytes."""
    import torch

    platform = get_torch_platform()
    assert platform.is_tensor(torch.nn.Parameter(torch.ones(1)))
    assert not platform.is_tensor([1.0])
    dtypes = (torch.bfloat16, torch.complex64, torch.int64)
    assert [platform.is_floating(torch.ones(1, dtype=dtype)) for dtype in dtypes] == [True, True, False]
    assert platform.itemsize(torch.ones(1, dtype=torch.float64)) == 8


def test_numpy_bridge():
    """NumPy arrays are copied into tensors, and bfloat16 tensors become float32 arrays."""
    import numpy as np
    import torch

    platform, array = get_torch_platform(), np.arange(3, dtype=np.int32)
    made = platform.from_numpy(array)
    array[0] = 7
    assert made.tolist() == [0, 1, 2]
    assert made.dtype is torch.int32
    assert platform.tensor_to_numpy(torch.ones(1, dtype=torch.bfloat16)).dtype == np.float32
    assert platform.tensor_to_numpy(torch.ones(1, requires_grad=True)).tolist() == [1]


def test_dtype_names():
    """Every framework's spelling of a dtype is understood; an unknown one lists the candidates."""
    import torch

    platform = get_torch_platform()
    assert {platform.str_to_dtype(name) for name in ("torch.float32", "mindspore.float32", "Float32", "float32")} \
        == {torch.float32}  # fmt: skip
    with pytest.raises(ValueError, match=r"unknown dtype 'float33'; known: (bcomplex32, )?bfloat16, "):
        platform.str_to_dtype("float33")


def test_trees_keep_their_types():
    """tree_map keeps lists, tuples, named tuples and dicts."""

    class Pair(NamedTuple):
        a: int
        b: int

    tree = {"x": [1, (2,)], "y": Pair(3, 4)}
    mapped = get_torch_platform().tree_map(lambda leaf: leaf * 2, tree)
    assert mapped == {"x": [2, (4,)], "y": Pair(6, 8)}
    assert type(mapped["y"]) is Pair


def test_an_empty_array_gives_usual_strides():
    """What is made of an empty array is stored as other empty tensors are, and is not an expanded tensor."""
    import numpy as np
    import torch

    platform = get_torch_platform()
    for shape in ((3, 0), (0, 2), (2, 0, 4), (0,)):
        assert platform.from_numpy(np.zeros(shape)).stride() == torch.empty(shape).stride()


def test_a_view_of_the_whole_tensor_is_told_from_strides_of_a_part():
    """A part with one element along a dim has views that the whole tensor does not have."""
    import torch

    platform = get_torch_platform()
    row = torch.zeros(2, 1)
    assert platform.can_view(row, (2, 3), (6,))
    assert not platform.can_view(row.t(), (3, 2), (6,))
    assert platform.can_view(row.t()[None], (1, 3, 2), (3, 2))
    assert not platform.can_view(row.expand(2, 2, 1), (2, 2, 3), (4, 3))


def _stride_calls():
    """Elementwise calls of one, two and three tensors, and of one that returns two."""
    import torch

    functional = torch.nn.functional
    return {
        "neg": torch.neg,
        "clone": torch.clone,
        "gelu": functional.gelu,
        "dropout": lambda x: functional.dropout(x, 0.5, True),
        "no dropout": lambda x: functional.dropout(x, 0.5, False) + 0.0,
        "frexp": lambda x: torch.frexp(x)[0],
        "add a number": lambda x: x + 1.0,
        "compare": lambda x: x < 0.0,
        "double": lambda x: x.float(),
        "of two": lambda x: x * x.clone(),
        "of a usual one": lambda x: torch.ones_like(x, memory_format=torch.contiguous_format) - x,
        "of fewer dims": lambda x: x * x.new_ones(x.shape[-1:]),
        "of three": lambda x: torch.addcmul(x, x, x),
        "where": lambda x: torch.where(x > 0, x, 0.0),
        "contiguous": lambda x: x.contiguous(),
        "detached": lambda x: x.detach(),
        "no conversion": lambda x: x.to(torch.float64),
        "a usual copy": lambda x: x.clone(memory_format=torch.contiguous_format),
    }


@pytest.mark.parametrize("world", [2, 3, 4])
def test_elementwise_results_have_the_strides_of_one_device_on_every_rank(world):
    """In whatever order the dims of an operand lie, with shards of several elements, of one, and of none."""
    import torch

    from hyper_parallel.core.dtensor.mesh import init_device_mesh
    from hyper_parallel.core.dtensor.module import distribute_tensor
    from hyper_parallel.core.dtensor.placements import Replicate, Shard
    from hyper_parallel.verify.simulate import simulate

    values = torch.randn(2, 3, 5, dtype=torch.float64)
    orders = [(0, 2, 1), (1, 0, 2), (2, 1, 0), (1, 2, 0)]
    cases = [(name, order, dim) for name in _stride_calls() for order in orders for dim in (0, 1, None)]

    def facts(x, name, order):
        result = _stride_calls()[name](x.permute(order))
        return result.stride(), result.is_contiguous()

    def on_rank():
        mesh, results = init_device_mesh("cpu", (world,)), []
        for name, order, dim in cases:
            x = distribute_tensor(values, mesh, [Replicate() if dim is None else Shard(dim)])
            results.append(facts(x, name, order))
        return results

    for results in simulate(on_rank, world, "torch", timeout=60):
        for case, result in zip(cases, results, strict=True):
            assert result == facts(values, *case[:2]), case


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_write_to_a_flattened_result_reaches_the_operand_on_all_ranks_or_on_none(world):
    """Values and second gradients of a program that writes what may or may not be a view are those of one device."""
    import torch

    from hyper_parallel.core.dtensor.mesh import init_device_mesh
    from hyper_parallel.core.dtensor.module import distribute_tensor
    from hyper_parallel.core.dtensor.placements import Replicate, Shard
    from hyper_parallel.verify.simulate import simulate

    values, weight = torch.randn(2, 3, 4).double(), torch.randn(3).double()

    def run(x, w, order):
        y = (x if order is None else x.permute(order)).neg()
        flat = y.flatten(0, 1)
        flat += (w * w).sum()
        (first,) = torch.autograd.grad((y * y).sum() + (flat * flat).sum(), w, create_graph=True)
        return y.detach(), torch.autograd.grad((first * first).sum(), w)[0]

    cases = [(order, dim, needs) for order in (None, (0, 2, 1), (1, 0, 2)) for dim in (0, 1, 2) for needs in (0, 1)]

    def on_rank():
        mesh, results = init_device_mesh("cpu", (world,)), []
        for order, dim, needs in cases:
            x = distribute_tensor(values, mesh, [Shard(dim)])
            w = distribute_tensor(weight, mesh, [Replicate()]).requires_grad_()
            try:
                outs = run(x.requires_grad_() if needs else x, w, order)
            except UnsupportedOperatorError:  # the view would have to move the tensor, so that the write is refused
                outs = ()
            results.append([out.full_tensor() for out in outs])
        return results

    ranks = simulate(on_rank, world, "torch", timeout=60)
    assert sum(bool(result) for result in ranks[0]) >= len(cases) // 3
    for results in ranks:
        for (order, _, _), result in zip(cases, results, strict=True):
            expected = run(values, weight.clone().requires_grad_(), order)
            for actual, expects in zip(result, expected if result else (), strict=True):
                torch.testing.assert_close(actual, expects)
