"""Fixtures and hooks of all unit tests."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
import threading
from pathlib import Path

import hypothesis
import pytest

# How long an example takes depends on what else runs on the machine. The everyday check tries the same examples every
# time; a night tries new ones, and prints how to repeat what it finds: --hypothesis-profile=night.
hypothesis.settings.register_profile("everyday", deadline=None, derandomize=True)
hypothesis.settings.register_profile("night", deadline=None, derandomize=False, print_blob=True, max_examples=1000)
hypothesis.settings.load_profile("everyday")

# Whether a line of progress appears depends on the machine's load; tests compare what commands write.
os.environ["HP_PROGRESS_LINES"] = "0"

# A shell without job control starts what runs in the background with SIGINT ignored, and programs started from it
# inherit that; tests send SIGINT to commands.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

_UNSEEN = pytest.StashKey[bool]()


def pytest_collection_finish():
    """Let the garbage collector leave alone what was collected of tests: it stays to the end, and is most of the heap.

    A full collection, which many tests ask for, then takes a fraction of the time.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Pause the tracer of coverage in tests marked ``untraced``; ranks are traced as the process that starts them."""
    if item.get_closest_marker("untraced") is None:
        if sys.gettrace() is not None and item.config.stash.get(_UNSEEN, False):
            _forget_plans()
            item.config.stash[_UNSEEN] = False
        return (yield)
    here, elsewhere = sys.gettrace(), threading.gettrace()
    sys.settrace(None)
    threading.settrace(None)
    item.config.stash[_UNSEEN] = True
    try:
        return (yield)
    finally:
        threading.settrace(elsewhere)
        sys.settrace(here)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Forget plans at the end of each file, so that the heap, which many tests search for garbage, does not grow."""
    if nextitem is None or nextitem.path != item.path:
        _forget_plans()


def _forget_plans():
    """Clear the caches of plans, so that a covered test plans its calls again.

    Which test files a worker ran before varies: without this a line is covered in some runs and not in others.
    """
    from hyper_parallel._caches import empty_layout_caches

    empty_layout_caches()


@pytest.fixture(scope="session")
def load_file():
    """Return a function that loads a Python file as a module of its stem's name, prefixed.

    Pytest's importlib mode puts no test folder on the path, so tests cannot import a file beside them.
    """

    def load(path):
        spec = importlib.util.spec_from_file_location(f"hyper_parallel_{path.parent.name}_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses and pickle look their module up
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def reports(request, tmp_path):
    """The folder of the JUnit report if there is one, so that results are published beside it; else ``tmp_path``."""
    junit = request.config.getoption("xmlpath")
    return Path(junit).resolve().parent if junit else tmp_path
