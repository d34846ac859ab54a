"""The pytest plugin: runs tests on every rank of a world and on each framework, and reports the rank that failed.

pytest loads it by its entry point; ``-p no:hyper_parallel.pytest_plugin`` disables it. It imports no framework.
"""

from __future__ import annotations

from hyper_parallel.pytest_plugin.capability import SkipReason, skip_without
from hyper_parallel.pytest_plugin.fixtures import device, launch_name, mesh, rank, world_size
from hyper_parallel.pytest_plugin.hooks import (  # noqa: F401 - pytest finds them by name; not for `import *`
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_fixture_setup,
    pytest_generate_tests,
    pytest_ignore_collect,
    pytest_pyfunc_call,
    pytest_runtest_logreport,
    pytest_runtest_makereport,
    pytest_runtest_setup,
    pytest_sessionfinish,
    pytest_sessionstart,
    pytest_terminal_summary,
    pytest_unconfigure,
)
from hyper_parallel.pytest_plugin.marks import arg_mark
from hyper_parallel.pytest_plugin.measuring import pytest_runtestloop  # noqa: F401 - pytest finds it by name
from hyper_parallel.pytest_plugin.usage import pytest_testnodedown  # noqa: F401 - the same

__all__ = [
    "SkipReason",
    "arg_mark",
    "device",
    "launch_name",
    "mesh",
    "rank",
    "skip_without",
    "world_size",
]
