"""The framework of a state is that of what it holds, whatever else the process has imported."""

from __future__ import annotations

import pytest

from hyper_parallel.core.checkpoint import load, save
from hyper_parallel.core.checkpoint.state import platform_of_state
from hyper_parallel.platform.select import get_torch_platform, use_platform


@pytest.mark.platforms("torch", "mindspore", together=True)
def test_the_framework_is_that_of_the_tensors(tmp_path):
    """Where both frameworks are imported and MindSpore is current, a state of PyTorch is PyTorch's."""
    import mindspore
    import torch

    assert mindspore.__version__
    with use_platform("mindspore") as current:
        x = torch.arange(3.0)
        save({"n": 1, "x": [x.clone()]}, tmp_path)
        x.zero_()
        load({"n": 1, "x": [x]}, tmp_path)
        assert x.tolist() == [0.0, 1.0, 2.0]
        assert platform_of_state([1, {"a": "b"}]) is current


@pytest.mark.platforms("torch")
def test_a_state_of_values_alone_is_saved(tmp_path):
    """A state without tensors has an empty data file, and comes back."""
    with use_platform("torch") as current:
        assert current is get_torch_platform()
        save({"n": [1, (2, None)]}, tmp_path)
        assert load({"n": 0}, tmp_path) == {"n": [1, (2, None)]}
