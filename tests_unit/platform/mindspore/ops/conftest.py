"""Kernels of MindSpore as tests call them: arrays in, arrays out."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.shard.entry import binder
from hyper_parallel.core.shard.rule import find_rule
from hyper_parallel.platform.select import platform_named


def _called(name, args, kwargs, by_signature):
    platform = platform_named("mindspore")
    operands = [platform.from_numpy(arg) if isinstance(arg, np.ndarray) else arg for arg in args]
    if by_signature:
        operands, kwargs = (), binder(find_rule(name).signature).bind(tuple(operands), kwargs)
    return platform.tensor_to_numpy(platform.local_op(name)(*operands, **kwargs))


@pytest.fixture
def canonical():
    """Call a kernel with the arguments of its rule."""
    return lambda name, *args, **kwargs: _called(name, args, kwargs, by_signature=True)


@pytest.fixture
def kernel():
    """Call a kernel as dispatch does, with the arguments of shards."""
    return lambda name, *args, **kwargs: _called(name, args, kwargs, by_signature=False)


@pytest.fixture
def refusal():
    """Return the message with which a kernel refuses its arguments."""

    def message(error, name, *args, **kwargs):
        with pytest.raises(error) as caught:
            _called(name, args, kwargs, by_signature=False)
        return str(caught.value)

    return message
