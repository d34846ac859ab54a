"""Programs that reproduce findings."""

import numpy as np
import pytest

from hyper_parallel.core.dtensor.placements import Shard, StridedShard
from hyper_parallel.core.shard.sample import Sample
from hyper_parallel.verify.ops.reproduce import _by_number, _plain, program
from hyper_parallel.verify.ops.values import FilledSample, Slot

pytestmark = pytest.mark.platforms("torch")

X = np.array([[1.0, -2.0, 0.5]])


def filled(*args, wanted=(True,), **kwargs):
    """Return a call of one operand."""
    return FilledSample(args, kwargs, (X,), wanted, {"a": 1, "b": 3}, integral=False)


def plain(call, sample=None):
    """Return the program that calls check_function, or None."""
    return _plain("torch", "permute", sample or Sample(()), call, (2,), ([Shard(1)],), "cpu")


def test_arguments_are_written_as_they_are():
    """Nested sequences, infinities and ellipses are written as Python."""
    line = next(
        text for text in plain(filled([Slot(0)], (2,), (), float("-inf"), k=...)).splitlines() if "return" in text
    )
    assert line == ("    return platform_named('torch').dispatcher.ops.permute([x0], (2,), (), float('-inf'), k=...)")


def test_samples_that_check_function_cannot_compare_go_by_number():
    """Samples that check_function cannot compare are named by number: writes, random values, missing gradients."""
    assert plain(filled(Slot(0), (1, 0))) is not None
    for sample in (Sample((), writes=True), Sample((), random=True), Sample((), uninitialized=True)):
        assert plain(filled(Slot(0)), sample) is None
    assert plain(filled(Slot(0), wanted=(False,))) is None
    assert plain(filled(Slot(0), object())) is None


def test_a_program_that_shows_nothing_is_not_given():
    """If the public path is right, the program asks the verifier for the sample itself."""
    text = program("torch", "permute", 4, Sample(()), filled(Slot(0), (1, 0)), (2,), ([Shard(1)],))
    assert text.splitlines() == [
        "from hyper_parallel import Partial, Replicate, Shard",
        "from hyper_parallel.verify.ops.sweep import check_one",
        "places = [(Shard(1),)]",
        "report = check_one('torch', 'permute', sample=4, sizes={'a': 1, 'b': 3}, dtype='float64',",
        "                   integral=False, mesh=(2,), places=places)",
        "assert report.holds, report.text()",
    ]


def test_a_program_that_fails_is_given():
    """If check_function fails on the call, its program is the shortest."""
    text = program("torch", "permute", 4, Sample(()), filled(Slot(0), (7, 9)), (2,), ([Shard(1)],))
    assert "from hyper_parallel.verify import check_function" in text.splitlines()
    assert "x0 = np.array([[ 1. ,-2. , 0.5]], np.float64)" in text.splitlines()


def test_a_program_imports_what_it_places_and_names_its_device():
    """Strided shards are imported where they occur, and a program for a device runs on one; on CPU nothing is added."""
    strided = ([StridedShard(1, split_factor=2), Shard(1)],)
    text = _plain("torch", "permute", Sample(()), filled(Slot(0), (1, 0)), (2, 2), strided, "npu")
    assert text.splitlines()[1] == "from hyper_parallel import Partial, Replicate, Shard, StridedShard"
    assert text.splitlines()[-2] == (
        "report = check_function(run, [x0], (2, 2), platform='torch', placements=places, device='npu')"
    )
    text = _by_number("torch", "permute", 4, filled(Slot(0), (1, 0)), (2, 2), strided, "npu")
    assert text.splitlines()[0] == "from hyper_parallel import Partial, Replicate, Shard, StridedShard"
    assert text.splitlines()[-2] == "                   integral=False, mesh=(2, 2), places=places, device='npu')"
    assert "device" not in plain(filled(Slot(0), (1, 0)))
    assert "Strided" not in plain(filled(Slot(0), (1, 0)))
