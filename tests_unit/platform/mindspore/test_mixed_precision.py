"""``to_float`` and amp levels over DTensors: what each cell returns, and the gradients, as on a single device."""

from __future__ import annotations

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, amp, nn

from hyper_parallel import DTensor, Shard, distribute_module, distribute_tensor, init_device_mesh
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")


class Doubled(nn.Cell):
    """A cell without parameters."""

    def construct(self, x):
        """Return twice the input."""
        return x * 2


class Holder(nn.Cell):
    """A view and a layer with weights."""

    def __init__(self):
        super().__init__()
        self.flatten, self.fc = nn.Flatten(), nn.Dense(6, 3)

    def construct(self, x):
        """Compute both."""
        return self.fc(self.flatten(x))


LEVELS = ("O2", "O3", "auto")  # O1 reads the source of a cell, which ranks of a test file do not have
CELLS = {
    "Dense": lambda: nn.Dense(6, 3).to_float(mindspore.float16),
    "Flatten": lambda: nn.Flatten().to_float(mindspore.float16),
    "GELU": lambda: nn.GELU().to_float(mindspore.float16),
    "ReLU": lambda: nn.ReLU().to_float(mindspore.float16),
    "Doubled": lambda: Doubled().to_float(mindspore.float16),
    "Holder": lambda: Holder().to_float(mindspore.float16),
    **{level: lambda level=level: amp.auto_mixed_precision(Holder(), level) for level in LEVELS},
}


def whole(value):
    """The dtype and the values of a whole tensor."""
    return str(value.dtype), (value.full_tensor() if isinstance(value, DTensor) else value).asnumpy()


def trained(make, mesh):
    """Return the dtypes that cells return, and the result with its gradients; on a mesh the rows are sharded."""
    mindspore.set_seed(0)
    net, seen = make(), []
    if mesh is not None:
        distribute_module(net, mesh)
    for path, cell in net.cells_and_names():
        cell.register_forward_hook(lambda _, __, output, path=path: seen.append((path, str(output.dtype))))
    draw = np.random.default_rng(0)
    x, cotangent = (Tensor(draw.standard_normal((5, 6)).astype(np.float32)) for _ in range(2))
    if mesh is not None:
        x, cotangent = (distribute_tensor(each, mesh, [Shard(0)]) for each in (x, cotangent))

    def loss(x):
        result = net(x)
        return (result * cotangent[:, : result.shape[1]]).sum(), result

    weights = net.trainable_params()
    (_, result), gradients = mindspore.value_and_grad(loss, 0, weights or None, has_aux=True)(x)
    return seen, list(map(whole, (result, gradients[0], *gradients[1]) if weights else (result, gradients)))


def ranked(name, world):
    """The records of a cell on one device and on a mesh."""
    return trained(CELLS[name], None), trained(CELLS[name], init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)))


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("world", [2, 3])
def test_cells_cast_dtensors_as_plain_tensors(name, world, tmp_path, monkeypatch):
    """What each cell returns has one device's dtype, and results and gradients are one device's, up to float16."""
    monkeypatch.chdir(tmp_path)  # MindSpore writes the classes that it rewrites there
    for (dtypes, one), (found, many) in simulate(ranked, world, "mindspore", (name, world)):
        assert found == dtypes
        narrow = [np.array_equal(values, values.astype(np.float16)) for _, values in (one[0], many[0])]
        assert narrow == [name != "auto"] * 2  # auto adds the bias in float32
        for (dtype, values), (own, result) in zip(one, many, strict=True):
            assert own == dtype
            np.testing.assert_allclose(result, values, rtol=4e-3, atol=4e-3)  # sums of five rows in float16
