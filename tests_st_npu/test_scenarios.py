"""The bundled scenarios over real processes. On CPU this is a rehearsal: both frameworks communicate over gloo."""

from __future__ import annotations

from hyper_parallel.verify.faults import FAULTS
from hyper_parallel.verify.model.run import verify_scenario
from hyper_parallel.verify.scenarios import SCENARIOS


def test_a_scenario_trains_like_one_device(platform_name, scenario, suite_device):
    """Over real processes every output, gradient and updated weight equals the single device's."""
    report = verify_scenario(scenario, platform=platform_name, launch="processes", device=suite_device)
    assert report.ok, str(report)


def test_a_fault_is_found(platform_name, fault, suite_device):
    """An injected fault is found over real processes, too, and its module is named."""
    report = verify_scenario(
        SCENARIOS[1], platform=platform_name, launch="processes", steps=1, inject=fault, device=suite_device
    )
    assert not report.ok
    assert sum(report.counts.values()) > 0
    assert report.faulty_module == FAULTS[fault][0], str(report)
