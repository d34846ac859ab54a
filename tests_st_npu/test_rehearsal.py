"""What runs on the rehearsal device: a device that is not the CPU, but computes on it (rehearsal/README.md)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hyper_parallel.pytest_plugin import SkipReason, skip_without
from hyper_parallel.transport.processes import ENGINE_VARIABLE
from workshop.conformance.inventory import MEMBERS
from workshop.conformance.results import examine

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

_SCENARIO = """
from hyper_parallel.verify.model.run import verify_scenario
from hyper_parallel.verify.scenarios import scenario_named

for launch in ("simulated", "processes"):
    report = verify_scenario(scenario_named("3-rms-untied"), platform="torch", launch=launch, steps=1, device="npu")
    assert report.ok, report
    print(launch, sum(report.counts.values()), report.settings["device"])
report = verify_scenario(
    scenario_named("3-rms-untied"), platform="torch", steps=1, inject="drop-allreduce", device="npu"
)
print("fault found:", not report.ok and report.error == "" and sum(report.counts.values()) > 0)
"""
_COLLECTIVES = """
from hyper_parallel.transport.real.launched_processes import run_launched
from hyper_parallel.transport.serialization import pack


def on_accelerator():
    import torch

    from hyper_parallel.transport.base import active_transport

    transport, ranks = active_transport(), (0, 1, 2)
    x = torch.arange(3.0, device="npu") + transport.rank
    total = transport.all_reduce(x, "sum", ranks)
    parts = transport.all_gather(x, ranks, [(3,)] * 3)
    started = transport.start("all_reduce", x, "max", ranks).wait()
    torch.distributed.all_reduce(x)
    devices = sorted({str(y.device) for y in (total, *parts, started, x)})
    return transport.backend, devices, total.tolist(), [y.tolist() for y in parts], started.tolist(), x.tolist()


run = run_launched(pack((on_accelerator, ()), on_accelerator), 3, "torch", 60.0, "npu")
assert run.failure is None, run.failure
for rank, (engine, devices, *values) in enumerate(run.results):
    assert devices == [f"npu:{rank % 2}"], devices
    parts = [[0.0, 1.0, 2.0], [1.0, 2.0, 3.0], [2.0, 3.0, 4.0]]
    assert values == [[3.0, 6.0, 9.0], parts, [2.0, 3.0, 4.0], [3.0, 6.0, 9.0]], values
print(*{engine for engine, *_ in run.results})
"""


_CHECKS = """
from hyper_parallel.cli import main
from hyper_parallel.verify import check_function
from hyper_parallel.verify.checker.redistribution import verify_redistribution

report = verify_redistribution("torch", (3,), (5, 3), device="npu")
assert report.ok, report.text()
print(report.transitions, report.gradients, report.text().partition(",")[0])
command = ["verify", "ops", "--op", "softmax", "matmul", "cumsum", "--quick", "--platform", "torch", "--device", "npu"]
print("operators:", main(command))


def on_host(x):
    return x.cpu() if "DTensor" in type(x).__name__ else x * 1


lost = check_function(on_host, [__import__("numpy").ones((3, 2))], (2,), platform="torch", device="npu")
print(lost.ok, lost.wrong[:1])
"""
_CONTRACT = """
from workshop.conformance.inventory import MEMBERS
from workshop.conformance.results import examine

facets = [facet for facet in MEMBERS if facet != "memory"]
outcome = examine("torch", 3, "simulated", facets, device="npu")
assert outcome.ok, outcome.failures()
print(outcome.names)
"""


def test_the_contract_holds_over_plain_gloo(monkeypatch):
    """The other rehearsals follow HCCL's rules; the engine that trains on CPUs has the whole contract, too."""
    monkeypatch.delenv(ENGINE_VARIABLE, raising=False)
    outcome = examine("torch", 3, "processes")
    assert outcome.ok, outcome.failures()
    assert set(outcome.members) == {member for members in MEMBERS.values() for member in members}


@pytest.fixture(scope="session")
def rehearsal(request):
    """The variables of a process that has two devices of the rehearsal device; built once on a machine."""
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
    """Dropout on a device that all simulated ranks share gives each rank the mask that it draws alone."""
    assert _printed(_MASKS, rehearsal) == "worlds compared: 3\n"


@pytest.mark.sweep  # operators, redistributions and collectives of the device are tried every day
def test_a_scenario_trains_like_one_device_on_shared_devices(rehearsal):
    """Simulated ranks share the device, three processes share two; all values are compared, a fault is found."""
    assert _printed(_SCENARIO, rehearsal).splitlines() == [
        "simulated 738 npu; simulated ranks share one device",
        "processes 738 npu; ranks share devices if there are fewer",
        "fault found: True",
    ]


def test_operators_and_redistributions_hold_on_a_shared_card(rehearsal):
    """Rules and every change of placement, with gradients, hold on the device; an output on the host is wrong."""
    first, *others, operators, lost = _printed(_CHECKS, rehearsal).splitlines()
    assert first == "49 49 torch on npu"
    assert any(line.startswith("torch on npu: 3 operators (3 ok)") for line in others), others
    assert operators == "operators: 0"
    assert lost == "False ['rank 0: [Replicate()]: output 0 is on cpu, and --device is npu']"


def test_the_contract_holds_on_a_shared_card(rehearsal):
    """Every facet but the one that asks for autocast serves tensors of the device."""
    assert _printed(_CONTRACT, rehearsal) == "('torch', 'npu', 'simulated')\n"


@pytest.mark.parametrize("engine", ["", "hccl"])
def test_ranks_that_share_devices_communicate(rehearsal, engine):
    """3 processes on two devices exchange tensors of their devices, staged over gloo, and under the rules of HCCL."""
    assert _printed(_COLLECTIVES, {**rehearsal, ENGINE_VARIABLE: engine}) == f"{engine or 'staged'}\n"


def _printed(program, environment):
    """What a program prints in a process of its own that has the rehearsal's devices."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(program, encoding="utf-8")
        workshop = str(Path(__file__).parents[1] / "ci")
        search = os.pathsep.join([workshop, *filter(None, [environment.get("PYTHONPATH")])])
        done = subprocess.run(
            [sys.executable, str(path)],
            env={**environment, "PYTHONPATH": search},
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout
