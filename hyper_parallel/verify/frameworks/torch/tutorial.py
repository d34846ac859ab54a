"""A regression that is trained as PyTorch's tutorials train: the embedded scenario ``3-tutorial``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Regression", "train_one_step"]


class Regression(nn.Module):
    """Two layers.

    Args:
        inputs, hidden, outputs: sizes of the layers.
        dtype: of their parameters.
    """

    def __init__(self, inputs: int, hidden: int, outputs: int, dtype: Any) -> None:
        super().__init__()
        self.up, self.activation = nn.Linear(inputs, hidden, dtype=dtype), nn.Tanh()
        self.down = nn.Linear(hidden, outputs, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return predictions (batch, outputs) of ``x`` (batch, inputs)."""
        return self.down(self.activation(self.up(x)))


def train_one_step(training: Any) -> Any:
    """Run forward, backward and the optimizer, save the model and load what was saved.

    Args:
        training: a :class:`~hyper_parallel.verify.training_loop.Training` of one batch: inputs and targets.

    Returns:
        the loss.
    """
    net, (inputs, targets) = training.model, training.batches[0]
    training.optimizer.zero_grad()
    loss = nn.functional.mse_loss(net(inputs), targets)
    loss.backward()
    training.optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.pt"
        torch.save(net.state_dict(), path)
        net.load_state_dict(torch.load(path, weights_only=True))
    return loss
