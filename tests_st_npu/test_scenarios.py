"""The embedded scenarios over real processes. On CPU this is a rehearsal: both frameworks communicate over gloo."""

from __future__ import annotations

import pytest

from hyper_parallel.verify.faults import FAULTS
from hyper_parallel.verify.model import verify_scenario
from hyper_parallel.verify.scenarios import SCENARIOS


@pytest.mark.usefixtures("on_processor")
def test_a_scenario_trains_like_one_device(platform_name, scenario):
    """Over real processes every output, gradient and updated weight equals the single device's."""
    report = verify_scenario(scenario, platform=platform_name, launch="processes")
    assert report.ok, str(report)


@pytest.mark.usefixtures("on_processor")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(platform_name, fault):
    """An injected fault is found over real processes, too, and its module is named."""
    report = verify_scenario(SCENARIOS[1], platform=platform_name, launch="processes", steps=1, inject=fault)
    assert not report.ok
    assert sum(report.counts.values()) > 0
    assert report.faulty_module == FAULTS[fault][0], str(report)
