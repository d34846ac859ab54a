"""MindSpore's programs of the bug corpus through the harness: broken ones are caught, fixed ones pass."""

from fnmatch import fnmatchcase

import pytest

from hyper_parallel.verify.bugs.registry import CALLS, find_bugs
from hyper_parallel.verify.program.run import verify_program

pytestmark = pytest.mark.platforms("mindspore")

BUGS = {bug.name: bug for bug in find_bugs("mindspore")}


def report(bug, *, broken):
    """What the harness says of a form."""
    single = bug.reference(broken=broken)
    return verify_program(
        bug.program(broken=broken), bug.world_size, single=single, mesh=bug.mesh, platform="mindspore"
    )


def check(bug):
    """The fixed form is equal; the broken one differs first where its facts say, for the documented cause."""
    fixed = report(bug, broken=False)
    assert fixed.verdict is not None
    assert fixed.verdict.equal, fixed.verdict.text()
    broken = report(bug, broken=True)
    if bug.kind == CALLS:
        assert "disagree" in broken.failure
        return
    first = broken.verdict.first
    assert not broken.verdict.equal
    assert first.kind == bug.kind
    assert fnmatchcase(first.name, bug.tensor)
    assert first.cause.kind == bug.cause


def test_there_are_programs_of_many_classes():
    """At least ten programs, of at least seven classes of errors."""
    assert len(BUGS) >= 10
    assert len({bug.cause for bug in BUGS.values()}) >= 7


def test_a_missing_sum_is_named():
    """The first wrong tensor and the missing reduction are named; the fixed form passes."""
    check(BUGS["sequence_parallel_norm"])


@pytest.mark.sweep
@pytest.mark.parametrize("name", sorted(set(BUGS) - {"sequence_parallel_norm"}))
def test_every_program_is_caught_broken_and_passes_fixed(name):
    """Tensor and cause are those of the program's facts."""
    check(BUGS[name])
