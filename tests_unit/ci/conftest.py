"""The scripts of `ci/`, which is not a package, as modules."""

from pathlib import Path

import pytest

CI = Path(__file__).resolve().parents[2] / "ci"


@pytest.fixture(scope="session")
def script(load_file):
    """Return a function that loads `ci/name.py` as a fresh module."""
    return lambda name: load_file(CI / f"{name}.py")
