"""A reader that goes away, such as ``head``: what was asked for as a file is there nevertheless."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.platforms("torch")

COMMANDS = {
    "model": ["verify", "model", "--scenario", "3-layer-tied", "--platform", "torch", "--steps", "1"],
    "bugs": ["verify", "bugs", "--platform", "torch", "--only", "average_for_sum"],
}


@pytest.mark.parametrize("name", ["model", pytest.param("bugs", marks=pytest.mark.sweep)])
def test_the_page_is_written_before_the_pipe_breaks(name, tmp_path):
    """With nobody reading stdout the command ends with status 1, and its page and report are whole."""
    reader, writer = os.pipe()
    os.close(reader)
    html, report = tmp_path / "page.html", tmp_path / "report.json"
    words = [*COMMANDS[name], "--json", "--html", str(html), "--report", str(report)]
    command = [sys.executable, "-m", "hyper_parallel", *words]
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}  # so that the first write fails, not the one at the end
    try:
        done = subprocess.run(command, check=False, stdout=writer, stderr=subprocess.PIPE, env=env, timeout=300)
    finally:
        os.close(writer)
    assert done.returncode == 1, done.stderr
    assert b"Traceback" not in done.stderr
    assert "</html>" in html.read_text(encoding="utf-8")
    assert '"ok": true' in report.read_text(encoding="utf-8")
