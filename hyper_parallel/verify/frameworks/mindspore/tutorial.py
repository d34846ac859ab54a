"""A regression that is trained as MindSpore's tutorials train: the embedded scenario ``3-tutorial``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import mindspore
from mindspore import Tensor, mint, nn
from mindspore.dataset import NumpySlicesDataset

__all__ = ["Regression", "train_one_step"]


class Regression(nn.Cell):
    """Two layers.

    Args:
        inputs, hidden, outputs: sizes of the layers.
        dtype: of their parameters.
    """

    def __init__(self, inputs: int, hidden: int, outputs: int, dtype: Any) -> None:
        super().__init__()
        self.arguments = inputs, hidden, outputs, dtype
        self.up, self.activation = nn.Dense(inputs, hidden, dtype=dtype), nn.Tanh()
        self.down = nn.Dense(hidden, outputs, dtype=dtype)

    def construct(self, x: Tensor) -> Tensor:
        """Return predictions (batch, outputs) of ``x`` (batch, inputs)."""
        return self.down(self.activation(self.up(x)))


class _Losses(mindspore.Callback):
    """Keeps the loss of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Any] = []

    def on_train_step_end(self, run_context: Any) -> None:
        """Keep what the training step returned."""
        self.losses.append(run_context.original_args().net_outputs)


def train_one_step(training: Any) -> Any:
    """Run ``Model.train`` over a dataset of one batch, save the model, and evaluate another that loads what was saved.

    The optimizer was made before the first forward; ``TrainOneStepCell`` calls it, and a callback keeps the loss. The
    trained model does not load: on one device MindSpore 2.10's compiled optimizers go on writing to the values that a
    parameter had before.

    Args:
        training: a :class:`~hyper_parallel.verify.training_loop.Training` of one batch: inputs and targets.

    Returns:
        the loss of the step, plus that of the model from the checkpoint.
    """
    losses, net, batch = _Losses(), training.model, training.batches[0]
    cell = nn.TrainOneStepCell(nn.WithLossCell(net, _squared_error), training.optimizer)
    data = NumpySlicesDataset(tuple(tensor.asnumpy() for tensor in batch), ["inputs", "targets"], shuffle=False)
    mindspore.Model(cell).train(1, data.batch(len(batch[0])), callbacks=[losses], dataset_sink_mode=False)
    return losses.losses[-1] + _squared_error(_restored(net)(batch[0]), batch[1])


def _restored(net: Any) -> Regression:
    """Return a model of plain parameters from a checkpoint of ``net``."""
    other = Regression(*net.arguments)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "net.ckpt")
        mindspore.save_checkpoint(net, path)
        mindspore.load_param_into_net(other, mindspore.load_checkpoint(path))
    return other


def _squared_error(output: Tensor, target: Tensor) -> Tensor:
    """The mean squared error; ``nn.MSELoss`` computes float64 in float32."""
    return mint.mean(mint.square(output - target))
