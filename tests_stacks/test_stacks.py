"""Training stacks as they are: the smallest program of each is equal on its ranks, and a bug of its kind is caught."""

from __future__ import annotations

import fnmatch
import os
import subprocess
import sys

import pytest

from hyper_parallel.verify import verify_program
from workshop.program_costs.stacks import STACKS

pytestmark = pytest.mark.platforms("torch")


def verified(name, *arguments):
    """Return the report of a program on its ranks; skip it if its stack is not installed."""
    stack = STACKS[name]
    if stack.missing():
        pytest.skip(f"[no-tool] {', '.join(stack.missing())} is not installed: tox -e stacks")
    if stack.first:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29617"}
        subprocess.run([sys.executable, "-c", stack.first], env={**os.environ, **alone}, check=True)
    return verify_program(
        str(stack.path(name)), stack.ranks, args=[*stack.arguments, *arguments], pretend=stack.pretend
    )


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_is_equal(name):
    """The program runs unmodified, and every value is compared and equal."""
    report = verified(name)
    assert report.status == 0, report.text()


@pytest.mark.parametrize("name, bug", [(name, bug) for name, stack in STACKS.items() for bug in stack.bugs()])
def test_a_bug_of_the_stack_is_caught(name, bug):
    """A dropped or doubled reduction, or a local norm, is reported with the value that it makes wrong."""
    report = verified(name, bug)
    assert report.status == 1, report.text()
    assert fnmatch.fnmatch(report.verdict.first.name, STACKS[name].bugs()[bug]), report.text()


def test_torchtune_cannot_be_installed_beside_this_pytorch():
    """A stack that is left out is a skip with its reason, which is counted."""
    pytest.skip("[no-tool] torchtune 0.6.1, the last one, imports what torchao 0.18 has not; 0.12 an older PyTorch")
