"""Where tests leave results that are published."""

from pathlib import Path

import pytest


@pytest.fixture
def reports(request, tmp_path):
    """The folder of the JUnit report, where one is asked for; else one that is thrown away."""
    junit = request.config.getoption("xmlpath")
    return Path(junit).resolve().parent if junit else tmp_path
