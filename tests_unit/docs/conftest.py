"""The shared fixture of the tests of the pages."""

import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def pages():
    """The module that reads pages; test folders are no packages."""
    name = "hyper_parallel_docs_pages"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("pages.py"))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
