"""Fingerprints of collectives and messages."""

from pathlib import Path

import pytest

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.transport import frames
from hyper_parallel.transport.base import ReductionError, check_ranks, check_reduction
from hyper_parallel.transport.checks import fingerprint
from hyper_parallel.transport.checks.fingerprint import CollectiveFingerprint, MessageFingerprint, Site, call_site


def test_call_site_is_the_callers_line():
    """A call site is the file and line of the code that called into the transport."""
    site = call_site()
    assert site.near[0] == __file__
    assert site.user is None


def test_site_inside_the_library_names_the_user_too():
    """A collective called from inside the library shows the user's line first."""
    assert str(Site(("redistribute.py", 8), ("train.py", 3))) == "train.py:3 (through redistribute.py:8)"


def called_through(*paths):
    """Return the site of a call that goes through functions of files with these paths, the innermost last."""
    function = call_site
    for path in reversed(paths):
        names = {"inner": function}
        exec(compile("def outer():\n    return inner()", path, "exec"), names)  # noqa: S102 - files that do not exist
        function = names["outer"]
    return function()


@pytest.mark.parametrize("framework", ["torch", "mindspore"])
def test_frames_of_the_framework_are_not_the_users(framework):
    """A module's forward is called by the framework: the line of the program is the one that called the module."""
    package = str(Path(fingerprint.__file__).parents[2])
    steps, module = f"{package}/core/dtensor/steps.py", f"/env/lib/site-packages/{framework}/nn/module.py"
    assert called_through("train.py", module, module, steps) == Site((steps, 2), ("train.py", 2))
    assert called_through("train.py", steps) == Site((steps, 2), ("train.py", 2))
    assert called_through("/home/torch/train.py", steps).user == ("/home/torch/train.py", 2)


def test_programs_inside_the_library_are_a_users(monkeypatch):
    """A folder of this library may hold programs: a call in one of them is at that program's line."""
    monkeypatch.setattr(frames, "PROGRAMS", kept := [])
    monkeypatch.setattr(fingerprint, "PROGRAMS", kept)
    package = Path(fingerprint.__file__).parents[2]
    program = f"{package}/examples/train.py"
    assert called_through("main.py", program) == Site((program, 2), ("main.py", 2))
    frames.take_for_programs(package / "examples")
    frames.take_for_programs(package / "examples")
    assert called_through("main.py", program) == Site((program, 2))
    assert len(kept) == 1


def test_wrappers_around_the_framework_are_no_site(monkeypatch):
    """Functions that stand for a framework's while something watches are skipped like the transport's own."""
    monkeypatch.setattr(frames, "WRAPPERS", kept := [])
    monkeypatch.setattr(fingerprint, "WRAPPERS", kept)
    watching = f"{Path(fingerprint.__file__).parents[2]}/watching"
    assert called_through("train.py", f"{watching}/step.py").near == (f"{watching}/step.py", 2)
    frames.hide_folder(Path(watching))
    assert called_through("train.py", f"{watching}/step.py") == Site(("train.py", 2))


def in_words(operation, facts, sends=None, expects=None):
    """The text of a fingerprint."""
    return str(CollectiveFingerprint(operation, (0, 1), facts, Site(("train.py", 1)), sends, expects))


def test_collective_in_words():
    """A collective is described by its operation, dtype, shape and reduction in the library's notation."""
    facts = (("shape", (2, 3)), ("dtype", "torch.float32"), ("reduction", "sum"))
    assert in_words("all_reduce", facts) == "all_reduce(f32[2, 3], sum)"
    assert in_words("all_to_all", (("dtype", "int64"),), ((1,), ()), ((1,), (2,))) == (
        "all_to_all(i64[1] i64[], expects i64[1] i64[2])"
    )
    assert in_words("all_gather", (("dtype", "bool"), ("shapes", ((1,), (0,))))) == (
        "all_gather(b8, shapes=[[1], [0]])"
    )


def test_message_in_words():
    """A message is described from its receiver's or its sender's side."""
    message = MessageFingerprint(0, 1, 7, (("shape", (2,)), ("dtype", "float32")), Site(("a.py", 1)))
    assert message.text(sending=True) == "send(f32[2], dst=1, tag=7)"
    assert message.text(sending=False) == "recv(f32[2], src=0, tag=7)"


def test_ranks_must_contain_the_caller():
    """A collective over ranks without the caller is refused."""
    with pytest.raises(CollectiveMismatchError, match="is not a member"):
        check_ranks((0, 1), 2, 3)


@pytest.mark.parametrize("ranks", [(0, 0), (0, 3), (0, -1)])
def test_ranks_must_be_distinct_and_exist(ranks):
    """Ranks named twice or outside the world are refused."""
    with pytest.raises(CollectiveMismatchError, match=r"distinct and lie in 0\.\.2"):
        check_ranks(ranks, 0, 3)


def test_integers_have_no_average():
    """The average of integers is refused with what to do instead."""
    with pytest.raises(ReductionError, match="use 'sum', or convert"):
        check_reduction("avg", inexact=False)


def test_unknown_reduction_lists_the_known():
    """An unknown reduction is refused with the list of the known ones."""
    with pytest.raises(ReductionError, match="sum, avg, max, min, prod, all, any"):
        check_reduction("mean", inexact=True)


@pytest.mark.platforms("torch")
def test_ranks_on_different_devices_are_told():
    """A mesh whose ranks chose different types of devices fails in its first collective, with both calls."""
    import torch

    from hyper_parallel.transport.base import active_transport
    from hyper_parallel.verify.simulate import simulate

    def on_rank():
        transport = active_transport()
        x = torch.ones(3, device="meta" if transport.rank else "cpu")
        with pytest.raises(CollectiveMismatchError) as caught:
            transport.all_reduce(x, "sum", (0, 1))
        return str(caught.value).splitlines()

    first, *calls = simulate(on_rank, 2, "torch")[0]
    assert first == "ranks 0 and 1 disagree about the device of collective 0 of ranks (0, 1):"
    assert [line.partition(" at ")[0] for line in calls] == [
        "  rank 0: all_reduce(f32[3], sum)", "  rank 1: all_reduce(f32[3], sum, device=meta)",
    ]  # fmt: skip
