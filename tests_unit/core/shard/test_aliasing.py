"""Results of operators that only alias share storage with the input exactly where the framework's own do."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.simulate import simulate

PLACES = [[Replicate()], [Shard(0)], [Shard(1)], [Partial()], [Partial("max")]]
WHOLE = np.arange(1.0, 16.0).reshape(5, 3)


def spellings(name):
    """Functions that may hand back their argument."""
    if name == "torch":
        import torch
        from torch.nn import functional as F

        return {
            "dropout in eval": lambda x: F.dropout(x, 0.5, training=False),
            "dropout of p=0": lambda x: F.dropout(x, 0.0),
            "Dropout in eval": torch.nn.Dropout(0.5).eval(),
            "contiguous": lambda x: x.contiguous(),
            "to the same dtype": lambda x: x.to(torch.float64),
            "to a copy": lambda x: x.to(torch.float64, copy=True),
            "double": lambda x: x.double(),
            "type_as": lambda x: x.type_as(x),
            "clone": lambda x: x.clone(),
            "detach": lambda x: x.detach(),
            "view": lambda x: x.view(5, 3),
            "reshape": lambda x: x.reshape(5, 3),
            "expand": lambda x: x.expand(5, 3),
            "slice": lambda x: x[:],
            "squeeze": lambda x: x.squeeze(),
            "movedim": lambda x: x.movedim(0, 0),
            "flatten": lambda x: x.flatten(0, 1).view(5, 3),
            "narrow": lambda x: x.narrow(0, 0, 5),
            "double transpose": lambda x: x.t().t(),
            "transposed and contiguous": lambda x: x.t().contiguous().t(),
            "relu": torch.relu,
            "transposed and reshaped": lambda x: x.t().reshape(-1).view(5, 3),
            "transposed and flattened": lambda x: x.t().flatten(),
            "expanded and flattened": lambda x: x.expand(2, 5, 3).flatten(0, 1)[:5],
            "moved and reshaped": lambda x: x[None].transpose(0, 2).reshape(3, 5),
            "conj_physical": torch.conj_physical,
            "conj": torch.conj,
            "real": torch.real,
            "a section": lambda x: x.tensor_split(2)[1],
            "einsum of a permutation": lambda x: torch.einsum("ij->ji", x),
            "einsum of a diagonal": lambda x: torch.einsum("ii->i", x[:3]),
            "einsum of a sum": lambda x: torch.einsum("ij->i", x),
            "pixel_shuffle": lambda x: F.pixel_shuffle(x[:, None, :, None], 1).view(5, 3),
            "pixel_unshuffle": lambda x: F.pixel_unshuffle(x[:, None, :, None], 1).view(5, 3),
            "channel_shuffle": lambda x: F.channel_shuffle(x[:, None, :, None], 1).view(5, 3),
        }
    import mindspore
    from mindspore import mint, ops

    return {
        "dropout in eval": lambda x: mint.nn.functional.dropout(x, 0.5, training=False),
        "Dropout in eval": mindspore.nn.Dropout(p=0.5).set_train(False),
        "contiguous": lambda x: x.contiguous(),
        "cast to the same dtype": lambda x: ops.cast(x, mindspore.float64),
        "to the same dtype": lambda x: x.to(mindspore.float64),
        "view": lambda x: x.view(5, 3),
        "reshape": lambda x: x.reshape(5, 3),
        "slice": lambda x: x[:],
        "narrow": lambda x: mint.narrow(x, 0, 0, 5),
        "rows": lambda x: x[1:3],
        "transpose": lambda x: mint.transpose(x, 0, 1),
        "split": lambda x: mint.split(x, 2, 0)[1],
    }


def host(value):
    """NumPy values of a plain tensor or a DTensor."""
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return (value.detach().numpy() if hasattr(value, "detach") else value.asnumpy()).copy()


def is_shared(function, x):
    """Whether a write to the result shows in ``x``; None where the write is refused."""
    result, before = function(x), host(x)
    try:
        result.mul_(0.0)
    except UnsupportedOperatorError:
        return None
    assert not host(result).any(), "the write was lost"
    return bool((host(x) != before).any())


def on_rank(platform_name):
    """For each spelling and placement, whether storage is shared."""
    platform = platform_named(platform_name)
    mesh = init_device_mesh("cpu", (platform.transport().world_size,), mesh_dim_names=("tp",))
    return {
        name: [
            is_shared(function, distribute_tensor(platform.from_numpy(WHOLE), mesh, place)) for place in PLACES
        ]
        for name, function in spellings(platform_name).items()
    }  # fmt: skip


@pytest.mark.untraced
@pytest.mark.platforms("torch")
@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_storage_is_shared_as_on_plain_tensors(world):
    """A write to the result shows in the input exactly where it does on plain tensors, or is refused."""
    import torch

    wanted = {name: is_shared(function, torch.tensor(WHOLE)) for name, function in spellings("torch").items()}
    assert {name for name, shared in wanted.items() if not shared} == {
        "dropout of p=0", "to a copy", "clone", "relu", "transposed and contiguous", "transposed and reshaped",
        "transposed and flattened", "expanded and flattened", "pixel_shuffle",
        "pixel_unshuffle", "channel_shuffle", "einsum of a sum",
    } - ({"dropout of p=0"} if wanted["dropout of p=0"] else set())  # fmt: skip
    for result in simulate(on_rank, world, "torch", args=("torch",)):
        for name, shared in result.items():
            assert set(shared) <= {wanted[name], None}, (name, shared)
            assert shared[0] is wanted[name], (name, shared)


@pytest.mark.platforms("mindspore")
@pytest.mark.parametrize("world", [2, 3])
def test_no_write_is_lost_in_a_view(world):
    """A write to a result that is its operand reaches it on MindSpore; one through a view is refused, never lost."""
    itself = {"dropout in eval", "Dropout in eval", "contiguous", "cast to the same dtype", "to the same dtype"}
    for result in simulate(on_rank, world, "mindspore", args=("mindspore",)):
        for name, shared in result.items():
            *linear, extremum = shared  # whose multiplication in place is refused
            assert linear == [True if name in itself else None] * len(linear), (name, shared)
            assert extremum is None


def the_same_object(platform_name):
    """Whether the result is the argument itself, per spelling."""
    platform = platform_named(platform_name)
    mesh = init_device_mesh("cpu", (platform.transport().world_size,), mesh_dim_names=("tp",))
    x = distribute_tensor(platform.from_numpy(WHOLE), mesh, [Shard(0)])
    return {name for name, function in spellings(platform_name).items() if function(x) is x}


@pytest.mark.platforms("torch")
def test_the_operand_itself_is_returned():
    """Where PyTorch returns its argument, the DTensor itself is returned, with its hooks and gradient."""
    import torch

    x = torch.tensor(WHOLE)
    wanted = {name for name, function in spellings("torch").items() if function(x) is x}
    wanted -= {"conj", "real"}  # which are views of complex numbers: another DTensor of the same local tensor
    assert {"contiguous", "double", "dropout in eval", "Dropout in eval", "to the same dtype", "type_as"} <= wanted
    for result in simulate(the_same_object, 2, "torch", args=("torch",)):
        assert result == wanted


def refused_view(platform_name):
    """The text of a refused write."""
    platform = platform_named(platform_name)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = distribute_tensor(platform.from_numpy(WHOLE), mesh, [Shard(1)])
    texts = []
    for write in (lambda: x[1:3].add_(1.0), lambda: x.view(5, 3).copy_(x), lambda: x[1:3].__setitem__(0, 1.0)):
        with pytest.raises(UnsupportedOperatorError) as caught:
            write()
        texts.append(str(caught.value))
    x[1:3] = x[1:3] + 1.0
    return texts, host(x)


@pytest.mark.platforms("mindspore")
def test_the_message_of_a_refused_write():
    """The refusal of a write through a view gives the reason and an alternative that works."""
    reason = (
        "x cannot be written to: it is a view, and this framework loses writes to views; write to the "
        "tensor itself, as in x[index] = value, or use the out-of-place form"
    )
    for texts, values in simulate(refused_view, 2, "mindspore", args=("mindspore",)):
        assert texts == [
            f"add(x=f64[2, 3@tp]): {reason}",
            f"copy(x=f64[5, 3@tp], y=f64[5, 3@tp]): {reason}",
            f"setitem(x=f64[2, 3@tp]): {reason}",
        ]
        np.testing.assert_array_equal(values, WHOLE + np.array([[0], [1], [1], [0], [0]]))


WRITES = {
    "view": lambda g, _local: g.view(3, 1).mul_(3.0),
    "slice": lambda g, _local: g[0:2].mul_(3.0),
    "local tensor": lambda _g, local: local().mul_(3.0),
    "itself": lambda g, _local: g.mul_(3.0),
}


@pytest.mark.platforms("torch")
@pytest.mark.parametrize("write", WRITES)
def test_a_gradient_passes_what_was_written_after_a_gather(write):
    """A write into a gathered tensor, also through a view or its local tensor, takes part in backward."""
    import torch

    values = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    weight = torch.arange(1.0, 7.0, dtype=torch.float64).view(3, 2)
    seed = torch.tensor([0.5, -2.0], dtype=torch.float64)

    dense = values.clone().requires_grad_(True)
    g = dense * 1.0
    WRITES[write](g, lambda: g)
    expected = g @ weight
    expected.backward(seed)

    def on_rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = distribute_tensor(values, mesh, [Shard(0)]).requires_grad_(True)
        g = x.redistribute(placements=[Replicate()])
        WRITES[write](g, g.to_local)
        out = g @ distribute_tensor(weight, mesh, [Shard(1)])
        out.backward(distribute_tensor(seed, mesh, [Shard(0)]))
        return out.full_tensor().detach(), x.grad.full_tensor()

    for out, grad in simulate(on_rank, 2, "torch"):
        assert torch.equal(out, expected.detach())
        assert torch.equal(grad, dense.grad)


@pytest.mark.platforms("torch")
def test_a_hook_on_a_gathered_local_tensor_sees_its_gradient():
    """A hook on to_local() of a gathered tensor sees, and may replace, every gradient that follows."""
    import torch

    def on_rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = distribute_tensor(torch.tensor([1.0, 2.0, 5.0]), mesh, [Shard(0)]).requires_grad_(True)
        w = distribute_tensor(torch.arange(1.0, 7.0).view(3, 2), mesh, [Shard(1)])
        gathered = x.redistribute(placements=[Replicate()])
        gathered.to_local().register_hook(lambda grad: grad * 10)
        (gathered @ w).sum().backward()
        return x.grad.full_tensor().tolist()

    assert simulate(on_rank, 2, "torch") == [[30.0, 70.0, 110.0]] * 2
