"""``routed_experts`` is refused on MindSpore, where some gradients were wrong."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel import routed_experts
from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.platform.select import platform_named


@pytest.mark.platforms("mindspore")
def test_mindspore_is_refused():
    """Before anything is computed."""
    platform = platform_named("mindspore")
    x, experts, weights = [platform.from_numpy(array) for array in (np.ones((3, 2)), np.zeros((3, 1)), np.ones((3, 1)))]
    with pytest.raises(UnsupportedOnBackend) as caught:
        routed_experts(x, experts, weights, (platform.from_numpy(np.ones((2, 2, 2))),), lambda rows, up: rows @ up)
    assert str(caught.value) == (
        "routed_experts: not supported by MindSpore, where the gradient of a bias added to no rows, those of an expert "
        "without tokens, is uninitialised memory; train on PyTorch"
    )
