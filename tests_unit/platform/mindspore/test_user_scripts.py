"""Ordinary MindSpore scripts run as written on distributed cells, equal to one device, or are refused aloud."""

from __future__ import annotations

import importlib.util
import traceback
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_module, distribute_tensor
from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.core.tensor_parallel.parallelize import parallelize_module
from hyper_parallel.core.tensor_parallel.styles.colwise import ColwiseParallel
from hyper_parallel.core.tensor_parallel.styles.rowwise import RowwiseParallel
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")

PATH = str(Path(__file__).with_name("user_scripts.py"))
EQUAL = (
    "mlp_and_train_one_step", "convolutions_with_batch_norm", "transformer_encoder", "two_optimizers",
    "dynamic_loss_scale", "accumulation", "clipped_by_global_norm", "model_train_with_callbacks", "checkpoint",
    "optimizers_of_mint", "language_model_with_a_tied_head", "mixed_dtypes", "cell_with_hooks",
    "a_training_step_of_its_own", "gru", "lstm",
)  # fmt: skip
PLANNED = ("model_train_with_callbacks",)  # its inputs are plain: its cell gets a plan of parallelize_module
REFUSED = {
    "backward_hooks": "UnsupportedOperatorError: backward hooks of Dense would get this rank's shards of the gradients",
}
WORLDS = [2, pytest.param(3, marks=pytest.mark.sweep)]


def _results(path, world, distributed):
    """Run every script; return its values as arrays, or its error, by name."""
    from mindspore import Tensor

    spec = importlib.util.spec_from_file_location("user_scripts", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))

    def array(value):
        value = value.full_tensor() if isinstance(value, DTensor) else value
        return np.array(value.asnumpy() if isinstance(value, Tensor) else value)

    def result(name, script):
        def net(cell):
            if not distributed:
                return cell
            if name in PLANNED:
                return parallelize_module(cell, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
            return distribute_module(cell, mesh)

        def data(values):
            return distribute_tensor(Tensor(values), mesh, [Shard(0)]) if distributed else Tensor(values)

        try:
            return [array(value) for value in script(net, data)]
        except Exception as error:  # noqa: BLE001 - how a script is refused is what is compared
            return "".join(traceback.format_exception_only(error))

    return {name: result(name, script) for name, script in module.SCRIPTS.items()}


@cache
def _alone():
    return simulate(_results, 1, "mindspore", (PATH, 1, False), timeout=300)[0]


@cache
def _together(world):
    return simulate(_results, world, "mindspore", (PATH, world, True), timeout=300)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", EQUAL)
def test_a_script_trains_as_on_one_device(name, world):
    """Losses, weights and what else a script computes are those of one device, with equal dtypes, on every rank."""
    expected = _alone()[name]
    assert isinstance(expected, list), expected
    rtol = 5e-3 if name in ("dynamic_loss_scale", "mixed_dtypes") else 1e-4  # half precision inside
    for results in _together(world):
        values = results[name]
        assert isinstance(values, list), values
        assert [(value.dtype, value.shape) for value in values] == [(value.dtype, value.shape) for value in expected]
        for position, (value, correct) in enumerate(zip(values, expected, strict=True)):
            np.testing.assert_allclose(value, correct, rtol, rtol / 10, err_msg=f"value {position}")


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", REFUSED)
def test_a_script_that_cannot_be_served_is_refused(name, world):
    """It runs on one device; distributed it raises on every rank, and says what to do."""
    assert isinstance(_alone()[name], list), _alone()[name]
    for results in _together(world):
        assert isinstance(results[name], str)
        assert REFUSED[name] in results[name]


def test_every_script_is_tried():
    """The scripts are those that must be equal and those that are refused."""
    assert set(_alone()) == {*EQUAL, *REFUSED}


def _after_an_error():
    """Weights after a step that follows a step whose loss raised."""
    import mindspore as ms
    from mindspore import Tensor, nn

    class Raises(nn.Cell):
        """A loss that raises."""

        def construct(self, output, target):
            """Raise."""
            raise ArithmeticError(output.shape, target.shape)

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    cell = nn.Dense(5, 3)
    cell.weight.set_data(Tensor(np.ones((3, 5), np.float32)))
    distribute_module(cell, mesh)
    x = distribute_tensor(Tensor(np.ones((4, 5), np.float32)), mesh, [Shard(0)])
    optimizer = nn.Momentum(cell.trainable_params(), 0.1, 0.9)
    with pytest.raises(ArithmeticError):
        nn.TrainOneStepCell(nn.WithLossCell(cell, Raises()), optimizer)(x, x)
    _, gradients = ms.value_and_grad(lambda: cell(x).sum(), None, optimizer.parameters)()
    optimizer(gradients)
    return cell.weight.full_tensor().asnumpy()


def test_training_goes_on_after_a_cell_that_raised():
    """A cell that raises while it is differentiated leaves MindSpore recording; writes of the next step still work."""
    for weight in simulate(_after_an_error, 2, "mindspore", timeout=200):
        np.testing.assert_allclose(weight, np.full((3, 5), 1 - 0.1 * 4), rtol=1e-6)
