"""The Llama of the examples: a checkpoint of PyTorch trains on MindSpore with equal losses."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hyper_parallel.verify.simulate import simulate

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "llama_on_mindspore.py"


def train(path, folder):
    """Return the losses of the script's MindSpore half on this rank."""
    spec = importlib.util.spec_from_file_location("llama_on_mindspore", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example.train_on_mindspore(folder)


@pytest.mark.platforms("torch", "mindspore", together=True)
def test_losses_are_those_of_pytorch(tmp_path):
    """Each step's loss, on two and three ranks with sharded parameters."""
    command = [sys.executable, str(SCRIPT), "torch", str(tmp_path)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    losses = [float(word) for word in out.split()[1:]]
    assert len(losses) == 3
    for world in (2, 3):
        for mine in simulate(train, world, platform="mindspore", args=(str(SCRIPT), str(tmp_path))):
            np.testing.assert_allclose(mine, losses, atol=6e-5)
