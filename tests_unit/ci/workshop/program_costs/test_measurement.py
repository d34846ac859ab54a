"""The cost of a command counts every process that it starts."""

from __future__ import annotations

import sys

import pytest

from workshop.program_costs.measurement import cost_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

CHILD = """
import time
block = bytearray(64 << 20)
end = time.process_time() + 0.5
while time.process_time() < end:
    pass
time.sleep(0.5)
"""


def test_children_count(tmp_path):
    """Processor time and memory of a child are in the cost; the parent's own are a fraction of them."""
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}], check=True)"
    cost = cost_of([sys.executable, "-c", parent], tmp_path)
    assert (cost.status, cost.output) == (0, "")
    assert cost.processor >= 0.4
    assert cost.memory >= 64 << 20
    assert cost.seconds >= 1


def test_a_failed_command_keeps_its_output(tmp_path):
    """The exit status and the end of the output are those of the command, which runs in the folder."""
    cost = cost_of([sys.executable, "-c", "import os; print(os.getcwd()); raise SystemExit('no room')"], tmp_path)
    assert cost.status == 1
    assert sorted(cost.output.splitlines()) == sorted([str(tmp_path), "no room"])
