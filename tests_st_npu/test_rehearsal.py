"""What runs on the rehearsal device: a device that is not the CPU, but computes on it (rehearsal/README.md)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hyper_parallel.pytest_plugin import SkipReason, skip_without

pytestmark = pytest.mark.platforms("torch")

_SECONDS = 120
_MASKS = """
import torch
import torch.distributed as dist
from hyper_parallel.verify import simulate


def drawn(rank, meet):
    torch.manual_seed(100 + rank)
    masks = []
    for _ in range(3):
        masks.append(torch.nn.functional.dropout(torch.ones(64, device="npu"), 0.5))
        meet()
    return torch.stack(masks)


before = torch.npu.get_rng_state_all()
worlds = [simulate(lambda: drawn(dist.get_rank(), dist.barrier), size, "torch") for size in (2, 3, 4)]
assert all(map(torch.equal, torch.npu.get_rng_state_all(), before)), "the caller's generators have changed"
for masks in worlds:
    for rank, of_rank in enumerate(masks):
        assert of_rank.device.type == "npu", of_rank.device
        assert torch.equal(of_rank, drawn(rank, lambda: None)), f"rank {rank} of {len(masks)} has other masks"
print("worlds compared:", len(worlds))
"""


@pytest.fixture(scope="session")
def rehearsal(request):
    """The variables of a process that has two cards of the rehearsal device; built once on a machine."""
    device = request.config.getoption("hp_device")
    if device != "cpu":
        skip_without(SkipReason.NO_TOOL, f"the rehearsal device would take the place of {device}; run it on CPU")
    path = Path(__file__).with_name("rehearsal") / "build.py"
    specification = importlib.util.spec_from_file_location("hp_rehearsal_build", path)
    build = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(build)
    try:
        return {**os.environ, **build.environment(2)}
    except build.CannotBuildError as error:
        skip_without(SkipReason.NO_TOOL, str(error))


def test_simulated_ranks_have_masks_of_their_own_on_a_shared_card(rehearsal):
    """Dropout on a card that all simulated ranks share gives each rank the mask that it draws alone."""
    done = subprocess.run(
        [sys.executable, "-c", _MASKS], env=rehearsal, capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    assert (done.returncode, done.stdout) == (0, "worlds compared: 3\n"), done.stderr
