"""The command of the package when it is not installed."""

from __future__ import annotations

import subprocess
import sys


def test_python_m_is_the_command(tmp_path):
    """``python -m hyper_parallel`` is ``hyper-parallel``: it shows its help and exits with 2 for an unknown command."""
    help_page = subprocess.run(
        [sys.executable, "-m", "hyper_parallel", "--help"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert help_page.stdout.startswith("usage: hyper-parallel ")
    unknown = subprocess.run(
        [sys.executable, "-m", "hyper_parallel", "verfy"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert unknown.returncode == 2
    assert "there is no command 'verfy'; did you mean verify?" in unknown.stderr
