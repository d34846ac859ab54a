"""The matmul family on every placement."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import record_events
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.core.shard.rules.einsum import parse_equation
from hyper_parallel.errors import LayoutError
from hyper_parallel.verify.check import check_function
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")
torch = pytest.importorskip("torch") if False else None  # replaced below


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Values of both signs, different for different shapes."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape)
