"""Trains a regression on MindSpore as its tutorials do; several ranks share the two layers.

msrun --worker_num 4 --local_worker_num 4 examples/mindspore_training.py
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.communication import get_group_size, init

from hyper_parallel import ColwiseParallel, RowwiseParallel, init_device_mesh, parallelize_module


class Regression(nn.Cell):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.activation, self.down = nn.Dense(10, 16), nn.ReLU(), nn.Dense(16, 5)

    def construct(self, x: Tensor) -> Tensor:
        """Return predictions (batch, 5) of ``x`` (batch, 10)."""
        return self.down(self.activation(self.up(x)))


class Losses(ms.Callback):
    """Keeps the loss of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_train_step_end(self, run_context: Any) -> None:
        """Append the step's loss."""
        self.losses.append(float(run_context.original_args().net_outputs.asnumpy()))


def main() -> None:
    """Train two epochs, save, load into a second model, and train that for another epoch."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--graph-mode", action="store_true")
    options = arguments.parse_args()
    if options.graph_mode:
        ms.set_context(mode=ms.GRAPH_MODE)
    init()
    random = np.random.default_rng(0)
    inputs, targets = random.normal(size=(24, 10)).astype(np.float32), random.normal(size=(24, 5)).astype(np.float32)

    def train(net: nn.Cell, epochs: int) -> None:
        data = ms.dataset.NumpySlicesDataset((inputs, targets), ["inputs", "targets"], shuffle=False).batch(9)
        # As tutorials have it: the optimizer is made before the first forward.
        optimizer = nn.Adam(net.trainable_params(), 0.02)
        losses = Losses()
        loss = nn.MSELoss()
        ms.Model(net, loss, optimizer).train(epochs, data, callbacks=[losses], dataset_sink_mode=False)
        print("losses", *(f"{value:.4f}" for value in losses.losses))

    first, second = (_parallelized(Regression()) for _ in range(2))
    train(first, 2)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "regression.ckpt")
        ms.save_checkpoint(first, path)
        ms.load_param_into_net(second, ms.load_checkpoint(path))
    train(second, 1)


def _parallelized(net: nn.Cell) -> nn.Cell:
    ms.set_seed(1)
    for parameter in net.trainable_params():
        values = np.random.default_rng(parameter.size).normal(size=parameter.shape, scale=0.3)
        parameter.set_data(Tensor(values.astype(np.float32)))
    if get_group_size() > 1:
        mesh = init_device_mesh("cpu", (get_group_size(),), mesh_dim_names=("tp",))
        parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return net


if __name__ == "__main__":
    main()
