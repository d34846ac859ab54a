"""MindSpore's platform refuses members that only PyTorch has."""

from __future__ import annotations

import pytest

from hyper_parallel.errors import (
    UnsupportedOnBackend,
)
from hyper_parallel.platform.contract.fully_sharded import FullyShardedOptions
from hyper_parallel.platform.contract.replicated import ReplicatedOptions
from hyper_parallel.platform.select import platform_named

pytestmark = pytest.mark.platforms("mindspore")


def test_what_only_another_framework_has_is_refused():
    """Benchmarks and conversions that need PyTorch's own DTensor are refused with the reason."""
    platform = platform_named("mindspore")
    with pytest.raises(UnsupportedOnBackend) as caught:
        platform.benchmark(3)
    assert str(caught.value) == (
        "benchmark: mindspore has no distributed tensor of its own to compare with; measure on torch"
    )
    with pytest.raises(UnsupportedOnBackend) as caught:
        platform.from_torch(3)
    assert str(caught.value) == "from_torch: expected a torch.distributed.tensor.DTensor, got a int"
    with pytest.raises(UnsupportedOnBackend) as caught:
        platform.fully_sharded(object(), FullyShardedOptions((0, 1), (0,)), ())
    assert str(caught.value) == (
        "fully_sharded is not supported by mindspore on cpu: gradients are values of a function here, so nothing tells "
        "when a module's backward begins and ends; replicate parameters over the data axis, or train on PyTorch"
    )
    with pytest.raises(UnsupportedOnBackend) as caught:
        platform.replicated(object(), ReplicatedOptions((0, 1), 1, None))
    assert str(caught.value) == (
        "replicated is not supported by mindspore on cpu: gradients are values of a function here, so nothing tells "
        "when a parameter's gradient is complete; average the gradients with all_reduce(gradient, op='avg') of the "
        "platform"
    )
