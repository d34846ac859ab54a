"""Recordings of the training of ``training.py``, made in this process."""

import contextlib
import io
import runpy
import sys
from pathlib import Path

import pytest

from hyper_parallel.verify import record_run

SCRIPT = runpy.run_path(str(Path(__file__).with_name("training.py")))["SCRIPT"]


@pytest.fixture
def script(tmp_path):
    """The script's path."""
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


@pytest.fixture
def record(tmp_path, script, monkeypatch):
    """A function that records the script with arguments and returns the folder."""
    import torch

    def run(name, *arguments, **options):
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        folder, dtype = tmp_path / name, torch.get_default_dtype()
        try:
            with record_run(folder, **options), contextlib.redirect_stdout(io.StringIO()):
                runpy.run_path(str(script), run_name="__main__")
        finally:
            torch.set_default_dtype(dtype)
        return folder

    return run
