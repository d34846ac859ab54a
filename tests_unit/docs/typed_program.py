"""A user's program that `tox -e typing` checks in strict mode: what type checkers know of the library.

The statements of types are what is tested; nothing here runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from typing_extensions import assert_type

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    fully_shard,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.verify import simulate, verify_program


def train() -> float:
    """Train nothing: operators of DTensors give DTensors, and a full tensor is one of the framework."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
    assert_type(x, DTensor)
    assert_type(x + 1, DTensor)
    assert_type(x * 2 - x[0] @ x.redistribute(placements=[Replicate()]), DTensor)
    assert_type(-x / 3 > x, DTensor)
    assert_type(x.full_tensor(), Any)
    model = parallelize_module(
        nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)), mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()}
    )
    fully_shard(model)
    return float(x.full_tensor().sum())


def main() -> bool:
    """Verify it, and run it on simulated ranks."""
    report = verify_program(train, 2, platform="torch")
    assert_type(report.ok, bool)
    simulate(train, 2, platform="torch")
    return report.ok
